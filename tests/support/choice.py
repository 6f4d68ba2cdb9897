"""Which values of a parameter a test takes by default, and which folders run only when asked for."""

import pathlib
from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values, for `pytest.mark.parametrize`; those that are not in `quick` are slow.

    `quick` has values or their names, by which pytest shows them; each must be there.
    """
    values = list(values)
    kept = [i for i, x in enumerate(values) if x in quick or str(x) in quick]
    assert all(x in values or x in map(str, values) for x in quick), (quick, values)
    slow = pytest.mark.slow
    return [x if i in kept else pytest.param(x, marks=slow) for i, x in enumerate(values)]


def asked_for(config: pytest.Config, folder: pathlib.Path, marker: str) -> bool:
    """By `-m` with the marker, or by the name of a folder or of a file in it."""
    here = config.invocation_params.dir
    paths = [(here / x.partition("::")[0]).resolve() for x in config.args]
    named = any(folder in (path, *path.parents) for path in paths)
    return named or marker in config.getoption("markexpr")
