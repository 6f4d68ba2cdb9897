"""The marker `slow` says what the default suite leaves out."""

import pytest

from tests.support import choice


class Item:
    """As much of a test of pytest as the rule asks for."""

    def __init__(self, name, *marks, of_file=None):
        self.nodeid = name
        self.own_markers = [x.mark for x in marks]
        self.of_file = of_file and of_file.mark

    def add_marker(self, mark):
        self.own_markers.append(mark.mark)

    def get_closest_marker(self, name):
        return next((x for x in self.own_markers if x.name == name), self.of_file)


SLOW = pytest.mark.slow


def quick(*items, all_names=True):
    """Names of what runs by default, and of what `-m slow` would choose the rest."""
    slow, kept = choice.of_suite(items, all_names=all_names)
    assert all(x.get_closest_marker("slow") for x in slow)
    assert not any(x.own_markers for x in kept)
    return [x.nodeid.removeprefix("f::") for x in kept]


def choices(count, *marks, test="f::t"):
    return [Item(f"{test}[{i}]", *marks) for i in range(count)]


def test_a_test_or_one_of_its_choices():
    assert quick(Item("f::t"), Item("f::u", SLOW), Item("f::v[a]"), Item("f::v[b]", SLOW)) == [
        "t",
        "v[a]",
    ]


def test_a_quick_test_of_a_slow_file():
    mark = SLOW(always=True)
    assert quick(
        Item("f::t", of_file=SLOW),
        Item("f::u[a]", mark, of_file=SLOW),
        Item("f::u[b]", SLOW, mark, of_file=SLOW),
    ) == ["u[a]"]


def test_choices_by_name():
    assert quick(*choices(3, SLOW(always=["1"]))) == ["t[1]"]
    assert quick(*choices(3, SLOW(always=["1"]), SLOW)) == ["t[1]"]
    with pytest.raises(pytest.UsageError, match=r"f::t: always=\['7'\], expected some of"):
        quick(*choices(3, SLOW(always=["7"])))
    assert quick(*choices(3, SLOW(always=["7"])), all_names=False) == []


def test_one_in():
    kept = quick(*choices(20, SLOW(one_in=8)))
    assert len(kept) == 3
    assert quick(*choices(3, SLOW(one_in=8))) != []
    # Other tests take other choices, and a name stays beside those of the hash.
    assert [x[1:] for x in quick(*choices(20, SLOW(one_in=8), test="f::u"))] != [
        x[1:] for x in kept
    ]
    other = next(f"{i}" for i in range(20) if f"t[{i}]" not in kept)
    assert {*quick(*choices(20, SLOW(one_in=8, always=[other])))} == {*kept, f"t[{other}]"}
    assert quick(*choices(4, SLOW(one_in=2), SLOW)) == []


def test_an_option_that_there_is_not():
    with pytest.raises(pytest.UsageError, match="'one_of': 3"):
        quick(*choices(3, SLOW(one_of=3)))


def test_of_slow_choices_some():
    slow, kept = choice.of_suite(choices(640, SLOW), all_names=True)
    assert kept == []
    assert len(choice.thinned(slow)) == 10
    slow, kept = choice.of_suite(choices(12, SLOW(always=["3"])), all_names=True)
    assert len(kept) == len(choice.thinned(slow)) == 1
    slow, kept = choice.of_suite([Item("f::t", SLOW(exhaustive=True))], all_names=True)
    assert len(slow) == 1
    assert choice.thinned(slow) == []


def test_what_ci_alone_runs(pytestconfig):
    """Where nobody asks for it, every test of a folder is left out, and a marked one of another."""
    items = [Item("f::t"), Item("f::u", pytest.mark.ci), Item("examples/f::t")]
    for item, name in zip(items, ("inputs/f.py", "inputs/f.py", "examples/f.py"), strict=True):
        item.path = pytestconfig.rootpath / name
    assert choice.of_ci(pytestconfig, items) == {*items[1:]} - (
        set(items) if "ci" in pytestconfig.getoption("markexpr") else set()
    )


def test_a_share_of_all():
    """Each test has its turn, and stays in its share where others are added or go."""
    items = choices(200)
    shares = [choice.share(items, 8, turn) for turn in range(8)]
    assert sorted(x.nodeid for share in shares for x in share) == sorted(x.nodeid for x in items)
    assert all(10 < len(share) < 40 for share in shares)
    assert choice.share(items, 8, 11) == shares[3]
    assert choice.share(items[::3], 8, 3) == [x for x in shares[3] if x in items[::3]]
    assert choice.share(items, 1, 5) == items


def test_every_slow_choice_has_its_turn():
    items = choices(150)
    found = [x.nodeid for turn in range(64) for x in choice.thinned(items, turn)]
    assert sorted(found) == sorted(x.nodeid for x in items)


class Call:
    """A choice of parameters, before pytest makes an item of it."""

    def __init__(self, name, *marks):
        self.id = name
        self.marks = [x.mark for x in marks]


class Metafunc:
    def __init__(self, calls, *marks):
        self.definition, self._calls = Item("f::t", *marks), calls


@pytest.mark.parametrize(
    "marks",
    [(), (SLOW,), (SLOW(one_in=8),), (SLOW(always=["3"]),), (SLOW(one_in=2, always=["3"]),)],
)
def test_no_items_of_what_is_left_out(marks):
    """The same choices are quick as of all items; where none is, one stands for the test."""
    expected = quick(*choices(20, *marks))
    of_test = Metafunc([Call(f"{i}") for i in range(20)], *marks)
    names = choice.leave_out(of_test)
    found = [f"t[{x.id}]" for x in of_test._calls]
    assert found == (expected or ["t[0]"])
    left = [Item(f"f::{name}", *marks) for name in found]
    slow, kept = choice.of_suite(left, all_names=True, quick_names={"f::t": names})
    assert [x.nodeid.removeprefix("f::") for x in kept] == expected
    assert [x.nodeid for x in slow] == ([] if expected else ["f::t[0]"])


def test_a_choice_that_is_slow_makes_no_item():
    of_test = Metafunc([Call("0"), Call("1", SLOW)])
    assert choice.leave_out(of_test) == {"f::t[0]"}
    assert [x.id for x in of_test._calls] == ["0"]
