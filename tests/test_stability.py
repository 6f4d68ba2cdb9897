"""What docs/stability.md promises: this version has what the record of 2.0.0 has."""

import json

import pytest

from tests import frozen
from tests.support.public import EXPORTED

(FILE,) = frozen.DATA.glob("frozen_*.json")
RECORD = json.loads(FILE.read_text())
BY_NAME = "KEYWORD_ONLY"


def problems(then, now):
    """How arguments differ from those of the record; new ones are given by name and have defaults.

    One that was required may have got a default, by which no call changes.
    """
    found, required = [], {x[0] for x in then if x[2] is None}
    now = [[x, kind, None if x in required else default] for x, kind, default in now]
    by_position = [[x for x in each if x[1] != BY_NAME] for each in (then, now)]
    if by_position[0] != by_position[1]:
        found.append(f"by position: {by_position[1]}, expected {by_position[0]}")
    named = {x[0]: x for x in now}
    found += [f"{x} is {named.get(x[0])}" for x in then if named.get(x[0]) != x]
    added = [x for x in now if x[0] not in {y[0] for y in then}]
    return found + [f"{x} is required" for x in added if x[2] is None]


@pytest.mark.parametrize("name", RECORD)
def test_what_is_frozen(name):
    """Names, arguments, defaults and fields."""
    assert name in EXPORTED
    then, now = RECORD[name], frozen.of(name)
    if "fields" in then:
        assert now["fields"][: len(then["fields"])] == then["fields"]
    else:
        assert not problems(then["arguments"], now["arguments"])


THEN = [["tx", "POSITIONAL_OR_KEYWORD", None], ["seed", BY_NAME, "0"]]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (THEN, 0),
        ([*THEN, ["more", BY_NAME, "None"]], 0),
        ([["tx", "POSITIONAL_OR_KEYWORD", "None"], THEN[1]], 0),  # no longer required
        ([*THEN, ["more", BY_NAME, None]], 1),  # required
        ([THEN[0], ["seed", BY_NAME, "1"]], 1),  # another default
        (THEN[:1], 1),  # gone
        ([THEN[0], ["seed", "POSITIONAL_OR_KEYWORD", "0"]], 2),  # another kind
        ([["state", "POSITIONAL_OR_KEYWORD", "None"], *THEN], 1),  # another order
    ],
)
def test_what_a_difference_is(now, expected):
    assert len(problems(THEN, now)) == expected
