"""Tables of errors, as `tests/data/messages` has them: what is raised, word for word, and by what.

    # a rate
    ValueError: adam_update: `lr`: nan, expected a number in (-inf, inf).
        adam(lr=NAN)

A blank line is between rows. The first line, which may be missing, names the row; the call may use
whatever the module of the test has, beside the names below. Lines are joined by spaces.
"""

import builtins
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.errors import assert_error

DATA = pathlib.Path(__file__).parents[1] / "data" / "messages"
NAMES = {x.__name__: x for x in (jgrad, jax, optax, functools)} | {"jnp": jnp, "np": np, "P": jax.P}


def read(table):
    """(name, error, message, call) of each row."""
    for row in (DATA / f"{table}.txt").read_text().strip().split("\n\n"):
        lines = row.splitlines()
        name = lines.pop(0).removeprefix("# ") if row.startswith("# ") else ""
        call = " ".join(x.strip() for x in lines if x.startswith(" "))
        text = " ".join(x for x in lines if not x.startswith(" "))
        error, _, message = text.partition(": ")
        yield name or message[:60], getattr(builtins, error), message, call


def test_of(table, names):
    """A test of each row: its call, among these names, raises this error with this message."""
    names = NAMES | names
    rows = [pytest.param(*row, id=name) for name, *row in read(table)]

    @pytest.mark.parametrize(("error", "message", "call"), rows)
    def test(error, message, call):
        assert_error(error, message, lambda: eval(call, names))

    return test
