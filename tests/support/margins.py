"""How near each comparison of the tests came to its bound, as a plugin of pytest.

    JGRAD_MARGINS=margins.jsonl pytest -p tests.support.margins -o enable_assertion_pass_hook=true
    python -m tests.support.margins margins.jsonl

The first command records what was measured, divided by what is allowed, of `assert_allclose`, of
chex's `assert_trees_all_close`, of `pytest.approx`, and of each `assert` of one floating number below
another. The second prints the comparisons above a quarter, for which another processor may round
otherwise and be red. Several files, such as those of several instruction sets, are read together.
"""

import collections
import json
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest

NEAR = 1 / 4
_NUMBER = r"[^\s(]*?\(?(-?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan))(?:, dtype=\S+)?\)?"
_BELOW = re.compile(rf"^{_NUMBER} (<=?) {_NUMBER}$")

_TESTS = pathlib.Path(__file__).parents[1]
_MODULES = [x.relative_to(_TESTS.parent).with_suffix("").parts for x in _TESTS.rglob("*.py")]
pytest.register_assert_rewrite(*{".".join(x) for x in _MODULES} - {*sys.modules})
_test = "outside of tests"


def record(place: str, measured: float) -> None:
    """One line: the test, where it compares, and what share of its bound was used."""
    with open(os.environ["JGRAD_MARGINS"], "a") as file:
        file.write(json.dumps([_test, place, float(measured)]) + "\n")


def share(actual: Any, desired: Any, rtol: float, atol: float) -> float:
    """The largest distance of two arrays, each element's in units of what is allowed for it."""
    actual, desired = (np.asarray(x) for x in (actual, desired))
    if not all(np.issubdtype(x.dtype, np.inexact) for x in (actual, desired)):
        wide = [np.asarray(x, np.float64) for x in (actual, desired)]  # bfloat16 and integers
        actual, desired = wide
    with np.errstate(all="ignore"):
        allowed = atol + rtol * np.abs(desired)
        used = np.abs(actual - desired) / allowed
    return float(np.max(used[np.isfinite(used)], initial=0.0))


def place_of_caller() -> str:
    """The line of the tests that compares."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}tests{os.sep}" in path and not path.endswith("margins.py"):
            return f"{os.path.relpath(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _test
    _test = item.nodeid
    return (yield)


def pytest_assertion_pass(item, lineno, orig, expl):
    match = _BELOW.match(expl.partition("\n")[0])
    if match is None:
        return
    measured, bound = match.group(1), match.group(3)
    is_float = any(set(x) & set(".en") for x in (measured, bound))
    if is_float and float(bound) > 0 and np.isfinite(float(bound)):
        record(f"{item.location[0]}:{lineno} {orig}", abs(float(measured)) / float(bound))


def pytest_configure():
    if "JGRAD_MARGINS" not in os.environ:
        raise pytest.UsageError("tests.support.margins needs a file in JGRAD_MARGINS")
    approx = type(pytest.approx(1.0))
    compare, equals = np.testing.assert_allclose, approx.__eq__

    def recorded(actual, desired, rtol=1e-7, atol=0, *args, **kwargs):
        compare(actual, desired, rtol, atol, *args, **kwargs)
        if rtol or atol:
            record(place_of_caller(), share(actual, desired, rtol, atol))

    def approximately(self, actual):
        result = equals(self, actual)
        if isinstance(actual, float) and self.tolerance:
            record(place_of_caller(), abs(actual - self.expected) / self.tolerance)
        return result

    np.testing.assert_allclose = recorded
    approx.__eq__ = approximately


def main(files: list[str]) -> None:
    """Prints comparisons near their bounds, the nearest first, with the test that came nearest."""
    most: dict[str, tuple[float, str]] = collections.defaultdict(lambda: (0.0, ""))
    for name in files:
        with open(name) as file:
            for test, place, used in map(json.loads, file):
                most[place] = max(most[place], (used, test))
    near = sorted(((x, y) for y, x in most.items() if x[0] > NEAR), reverse=True)
    for (used, test), place in near:
        print(f"{used:6.2f}  {place}  {test}")
    print(f"{len(near)} of {len(most)} comparisons use more than a quarter of their bound.")


if __name__ == "__main__":
    main(sys.argv[1:])
