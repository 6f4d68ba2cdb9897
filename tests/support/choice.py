"""The rule by which the default suite chooses: which tests and which choices of parameters are slow.

One marker says it, beside the test:

    @pytest.mark.slow                     # a test, or one choice of a parameter, for `--all`
    @pytest.mark.slow(one_in=8)           # of the choices of parameters one in eight is quick
    @pytest.mark.slow(always=["lamb-8"])  # this choice is quick: it alone notices some mutation
    @pytest.mark.slow(always=True)        # a quick test in a file whose `pytestmark` is `slow`
    @pytest.mark.slow(exhaustive=True)    # for `--all --exhaustive` alone

`one_in` and `always` may stand together. A hash of the names chooses, so that tests with the same
parameters take different ones, and a choice stays where others are added. `--all` runs also what is
slow, of a test with many slow choices one in 64; `--all --exhaustive` runs every choice. Of all that
would run, `--every=n` keeps one share of n, by a hash too; another `--turn` has the others.

Another marker, `ci`, is for tests of prose, examples and type checkers, and for those that start
Python again: they run with `-m ci`, with `--all`, or where their file is named. Every test of
`FOLDERS_OF_CI` has it.
"""

import collections
import pathlib
import zlib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

ONE_IN = 64  # of slow choices one in so many runs by `--all`
FOLDERS_OF_CI = {"examples", "guides"}
_OPTIONS = {"one_in", "always", "exhaustive"}
NONE: Mapping[str, Collection[str]] = MappingProxyType({})


def of_suite(
    items: list[Any], *, all_names: bool, quick_names: Mapping[str, Collection[str]] = NONE
) -> tuple[list[Any], list[Any]]:
    """The slow tests and the quick ones. Afterwards the slow ones, and no others, have the marker.

    Args:
      items: pytest's, of whole files, or of tests that were asked for by name.
      all_names: whether a name in `always` that no choice has is an error.
      quick_names: what `leave_out` found.
    """
    choices = collections.defaultdict(list)
    for item in items:
        choices[_test(item)].append(item)
    quick = set()
    for test, of_test in choices.items():
        if test in quick_names:
            quick.update(x for x in of_test if x.nodeid in quick_names[test])
        else:
            quick.update(_quick(of_test, all_names))
    for item in items:
        exhaustive = _options([item]).get("exhaustive", False)
        item.own_markers = [x for x in item.own_markers if x.name != "slow"]
        if item not in quick:  # `-m slow` chooses them, too
            item.add_marker(pytest.mark.slow(exhaustive=exhaustive))
    return [x for x in items if x not in quick], [x for x in items if x in quick]


def leave_out(metafunc: Any) -> set[str]:
    """Of a test's choices those that the default suite runs; pytest makes no items of the others.

    One choice stays where none is quick: without any, pytest would call the test without them.
    """
    test = metafunc.definition
    choices = [_Choice(test, x) for x in metafunc._calls]
    quick = {x.nodeid for x in _quick(choices, all_names=True)} if choices else set()
    kept = [x for x, y in zip(metafunc._calls, choices, strict=True) if y.nodeid in quick]
    metafunc._calls[:] = kept or metafunc._calls[:1]
    return quick


class _Choice:
    """What `_quick` asks of an item, before there is one. pytest's names, checked in 8.2 and 9.2."""

    def __init__(self, test: Any, call: Any) -> None:
        self.nodeid = f"{test.nodeid}[{call.id}]"
        self.own_markers = [*test.own_markers, *call.marks]
        self._test = test

    def get_closest_marker(self, name: str) -> Any:
        own = (x for x in self.own_markers if x.name == name)
        return next(own, self._test.get_closest_marker(name))


def thinned(slow: list[Any], turn: int = 0) -> list[Any]:
    """Of each test one in 64 of its slow choices of parameters, in another turn others.

    One at least. The choices are those of the whole matrix, of which the default suite runs a core.
    Together the tests still meet every optimizer, dtype and form.
    """
    choices = collections.defaultdict(list)
    for item in slow:
        choices[_test(item)].append(item)
    kept = set()
    for test, of_test in choices.items():
        first = (_hash(test) + turn) % min(ONE_IN, len(of_test))
        kept.update(sorted(of_test, key=lambda x: _hash(x.nodeid))[first::ONE_IN])
    return [x for x in slow if x in kept and not _options([x]).get("exhaustive")]


def share(items: list[Any], every: int, turn: int) -> list[Any]:
    """One share of `every`. A test stays in its share when others are added; each has its turn."""
    return [x for x in items if (_hash(f"share of {x.nodeid}") - turn) % every == 0]


def _quick(items: list[Any], all_names: bool) -> list[Any]:
    """Of one test, the choices of parameters that the default suite runs."""
    options = _options(items)
    if options.keys() - _OPTIONS:
        raise pytest.UsageError(f"{_test(items[0])}: slow has {sorted(_OPTIONS)}, got {options}")
    always = options.get("always", [])
    quick = [x for x in items if not _is_slow(x)]
    if not options or always is True:
        return quick
    named = {item.nodeid.partition("[")[2].removesuffix("]"): item for item in items}
    if all_names and (unknown := {*always} - named.keys()):
        place = f"{_test(items[0])}: always={sorted(unknown)}"
        raise pytest.UsageError(f"{place}, expected some of {list(named)}")
    chosen = [named[x] for x in always if x in named]
    if one_in := options.get("one_in"):
        chosen += sorted(quick, key=lambda x: _hash(x.nodeid))[::one_in]
    return chosen


def _options(items: list[Any]) -> dict[str, Any]:
    """What the marker beside a test says of its choices."""
    marks = (mark for item in items for mark in item.own_markers if mark.name == "slow")
    return next((mark.kwargs for mark in marks if mark.kwargs), {})


def _is_slow(item: Any) -> bool:
    """By a marker of the choice itself, or by that of the file where the test has none."""
    marks = [mark for mark in item.own_markers if mark.name == "slow"]
    return not all(mark.kwargs for mark in marks) or bool(
        not marks and item.get_closest_marker("slow")
    )


def _test(item: Any) -> str:
    """The name without the choice of parameters."""
    return item.nodeid.partition("[")[0]


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values, for `pytest.mark.parametrize`; those that are not in `quick` are slow.

    `quick` has values or their names, by which pytest shows them; each must be there.
    """
    values = list(values)
    kept = [i for i, x in enumerate(values) if x in quick or str(x) in quick]
    assert all(x in values or x in map(str, values) for x in quick), (quick, values)
    slow = pytest.mark.slow
    return [x if i in kept else pytest.param(x, marks=slow) for i, x in enumerate(values)]


def is_left_to_ci(config: pytest.Config, path: pathlib.Path) -> bool:
    """Whether a folder has tests of CI alone, and nobody asked for it: it is not imported then."""
    return path.name in FOLDERS_OF_CI and not asked_for(config, path, "ci")


def of_ci(config: pytest.Config, items: list[Any]) -> set[Any]:
    """Gives the marker `ci` to the tests of its folders, and returns those that nobody asked for."""
    found = set()
    for item in items:
        home = item.path
        if home.parent.name in FOLDERS_OF_CI:
            home = home.parent
            item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("ci") and not asked_for(config, home, "ci"):
            found.add(item)
    return found


def asked_for(config: pytest.Config, folder: pathlib.Path, marker: str) -> bool:
    """By `-m` with the marker, or by the name of a folder or of a file in it."""
    here = config.invocation_params.dir
    paths = [(here / x.partition("::")[0]).resolve() for x in config.args]
    named = any(folder in (path, *path.parents) for path in paths)
    return named or marker in config.getoption("markexpr")
