"""`colabs/train_plain.py`, the first example: it is short, it learns, and needs jgrad and optax alone."""

import ast
import pathlib
import sys
import tomllib

import jax
import numpy as np
import optax
import pytest

import jgrad
import train_plain

FILE = pathlib.Path(train_plain.__file__)


@pytest.fixture(autouse=True)
def _as_users_run_it(standard_promotion):
    with jax.numpy_rank_promotion("allow"):
        yield


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


def test_it_is_short_and_needs_no_extra():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 60
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {x.name.split(".")[0] for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    project = tomllib.loads((FILE.parents[1] / "pyproject.toml").read_text())["project"]
    needed = {x.partition(">=")[0] for x in project["dependencies"]}
    assert imported <= needed | {"jgrad"} | set(sys.stdlib_module_names)
