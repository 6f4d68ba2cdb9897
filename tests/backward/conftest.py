"""On a CPU a step is the ordinary one, unless a test asks for the other form, as all here do."""

import pytest

from jgrad._backward.step_in_backward import on_every_platform


@pytest.fixture(autouse=True)
def _in_the_backward_pass():
    token = on_every_platform.set(True)
    yield
    on_every_platform.reset(token)
