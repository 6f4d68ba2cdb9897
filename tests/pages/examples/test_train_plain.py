"""`colabs/train_plain.py`, the first example: it is short, it learns, and needs jgrad and optax alone."""

import pathlib

import numpy as np
import optax
import pytest

import jgrad
import train_plain

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.slow
def test_it_learns_as_with_optax(capsys):
    """What is left is a hundredth of the function's square, and optax's AdamW takes the same steps."""
    found = train_plain.train(jgrad.adam(train_plain.RATE, weight_decay=1e-4))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {100 * i}: loss {x:.6f}" for i, x in enumerate(found, 1)]
    assert len(found) == 5
    assert found[-1] < 0.2 / 100
    expected = train_plain.train(optax.adamw(train_plain.RATE, weight_decay=1e-4))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_it_is_short():
    """`test_extras.py` says that it needs no extra."""
    assert len(pathlib.Path(train_plain.__file__).read_text().splitlines()) <= 60
