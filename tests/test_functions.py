"""An update runs through few functions in few files, so that it can be followed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ci
# Functions and files at most.
LIMITS = {
    "adam, decay": (92, 17),
    "adam, decay, 8 bits of small leaves": (99, 18),
    "adam, decay, 8 bits": (172, 30),
    "lamb, decay": (173, 24),
    "muon, decay": (198, 27),
    "adam_update": (84, 13),
    "skip(clip, adam, decay)": (189, 27),
    "skip(accumulate(clip, adam))": (223, 28),
    "carry_over, adam to skip(clip, adam)": (122, 27),
}


@pytest.fixture(scope="module")
def table():
    """What `tests.functions` prints, in a process whose caches of JAX nobody else needs."""
    command = [sys.executable, "-m", "tests.functions"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name: tuple(map(int, counts)) for name, *counts in rows}


def test_little_to_pass(table):
    more = {
        name: (table[name][:2], limits)
        for name, limits in LIMITS.items()
        if any(x > limit for x, limit in zip(table[name], limits, strict=False))
    }
    assert not more, "functions and files, and the most of both"


def test_what_is_counted(table):
    """Each function once, however often it is called; comprehensions are counted apart."""
    for functions, files, with_comprehensions, calls in table.values():
        assert 0 < files < functions <= with_comprehensions < calls
