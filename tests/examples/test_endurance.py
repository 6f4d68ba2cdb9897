"""A short form of `studies/endurance.py`, whose long form BUILD_NOTES.md reports."""

import pytest

from studies import endurance

pytestmark = pytest.mark.slow  # it starts processes, as the others in this folder


@pytest.mark.slow(exhaustive=True)
def test_training_that_is_killed_again_and_again():
    """On eight devices: nothing is lost, bit for bit, and it was started anew each time."""
    whole = endurance.train(steps=60, save_every=15, kills=0, seed=0)
    killed = endurance.train(steps=60, save_every=15, kills=2, seed=0)
    assert killed.starts == 3
    assert killed.parameters == whole.parameters


def test_saves_and_restores():
    """Each gives back what was saved; the function compares."""
    assert len(endurance.save_and_restore(rounds=10)) == 10
