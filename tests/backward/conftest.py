"""On a CPU a step is the ordinary one, unless a test asks for the other form, as all here do."""

import pytest

from tests.support.private import forced


@pytest.fixture(autouse=True)
def _in_the_backward_pass():
    with forced():
        yield
