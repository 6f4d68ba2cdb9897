"""Which tests are near to a file, and that every file of jgrad has some."""

import pathlib

from tests import near

ROOT = pathlib.Path(__file__).parents[1]
FILES = [x.relative_to(ROOT).as_posix() for x in sorted((ROOT / "jgrad").rglob("[!_]*.py"))]


def test_what_is_near():
    lamb = near.near(["jgrad/_optimizers/lamb.py"])
    assert {*near.HOUSE, *near.METHOD} <= lamb.keys()
    assert lamb["tests/everywhere/test_scales.py"] == {"layers"}
    assert lamb["tests/everywhere/test_decay_rules.py"] == set()
    # Words of one file are joined, and a file that runs whole needs none.
    assert near.near(["jgrad/_soap/bases.py"])["tests/soap/test_soap.py"] > {"that_die"}
    both = near.near(["jgrad/_soap/bases.py", "tests/soap/test_soap.py"])
    assert both["tests/soap/test_soap.py"] == set()
    assert "tests/inputs/test_by_path.py" in near.near(["jgrad/_inputs/by_path.py"])
    assert "tests/trees" in near.near(["jgrad/_trees/protocols.py"])
    of_messages = near.near(["tests/data/messages/pack.txt"])
    assert of_messages.keys() == {*near.HOUSE, "tests/packed/test_layouts.py"}
    assert near.near(["README.md"]).keys() == {*near.HOUSE, *near.TEXTS}


def test_every_file_has_tests():
    assert [x for x in FILES if not near.near([x]).keys() - {*near.HOUSE, *near.METHOD}] == []
