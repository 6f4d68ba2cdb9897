"""On a CPU a step is the ordinary one, unless a test asks for the other form, as all here do."""

import pytest

from jgrad._backward import step_in_backward


@pytest.fixture(autouse=True)
def _in_the_backward_pass():
    with step_in_backward.forced():
        yield
