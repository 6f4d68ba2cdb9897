"""Mutations have their places, and a pattern finds what it says however it is written."""

import ast
import functools
import subprocess
import sys

import pytest

from tests.mutations import MUTATIONS, ROOT
from tests.support import edits
from tests.support.errors import assert_error


@pytest.mark.ci
def test_each_mutation_fits(tmp_path):
    """It changes the program, and names nothing that is not there: it would be noticed for that."""
    program = functools.cache(lambda text: ast.dump(ast.parse(text)))
    for i, mutation in enumerate(MUTATIONS):
        place = edits.find(mutation.place)
        new = edits.edited(place, mutation.old, mutation.new)
        assert program(new) != program(place.path.read_text()), mutation
        (tmp_path / f"mutation_{i}.py").write_text(new)
    arguments = ["ruff", "check", "--isolated", "--select=F821", "--output-format=concise"]
    done = subprocess.run(
        [sys.executable, "-m", *arguments, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_nearest_tests_are_there():
    """pytest fails where a file is not there, as if it had noticed the mutation."""
    paths = {word for m in MUTATIONS for word in m.near.split() if word.startswith("tests/")}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_names_and_places_differ():
    pairs = [(mutation.place, mutation.name) for mutation in MUTATIONS]
    assert len(set(pairs)) == len(pairs)


FORMS = [
    ("a + b", "X + Y", "X - Y", "a - b"),
    ("f(\n    a,  # first\n    b,\n)", "f(X, _)", "X", "a"),
    ("f(g(é), é)", "f(_, X)", "f(X, X)", "f(é, é)"),
    ("a == b == a", "X == _ == X", "X", "a"),
    ("not (a and b)", "X and Y", "X or Y", "not (a or b)"),
    ("x: int = a", "x: _ = X", "x = X + 1", "x = a + 1"),
    ("if a:\n    x = b\n    return", "X = b; return", "pass", "if a:\n    pass"),
    ("with a:\n    b(c)", "b(X)", "y = 1", "with a:\n    y = 1"),
]


@pytest.mark.parametrize(("old", "pattern", "new", "expected"), FORMS)
def test_a_pattern(tmp_path, old, pattern, new, expected):
    def function(body):
        return "def f():\n    " + body.replace("\n", "\n    ") + "\n"

    place = written(tmp_path, function(old))
    result = ast.parse(edits.edited(place, pattern, new))
    assert ast.dump(result) == ast.dump(ast.parse(function(expected)))


def test_what_surrounds_stays(tmp_path):
    text = "# é\nx = 1  # one\n\n\ny = [\n    2,\n]\n"
    result = edits.edited(written(tmp_path, text), "x = 1", "x = 3")
    assert result == text.replace("x = 1", "x = 3")


@pytest.mark.parametrize(("pattern", "count"), [("X * Y", 0), ("f(X)", 2), ("f(X) + f(X)", 0)])
def test_a_pattern_is_found_once(tmp_path, pattern, count):
    place = written(tmp_path, "x = f(a) + f(b)\n")
    message = f"expected {pattern!r} once in f, found it {count} times"
    assert_error(ValueError, message, lambda: edits.edited(place, pattern, "X"))


def test_a_place_has_one_name():
    message = "expected the name of one place of jgrad, got 'ddam': none"
    assert_error(ValueError, message, lambda: edits.find("ddam"))
    with pytest.raises(ValueError, match=r"got 'update': \w+"):
        edits.find("update")


def written(folder, text):
    """A file as a place."""
    path = folder / "file.py"
    path.write_text(text)
    return edits.Place("f", path, ast.parse(text))
