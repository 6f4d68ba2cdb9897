"""Which values of a parameter a test takes by default, and which only with `--all`."""

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
