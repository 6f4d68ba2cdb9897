"""The house: data flows one way, every file says what it is for, and no file is long."""

import ast
import pathlib

import pytest

import jgrad

PACKAGE = pathlib.Path(jgrad.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up; a file imports from floors below its own, or from its own.
FLOORS = [
    {"trees", "numerics", "checks", "values", "places", "rows", "collectives"},
    {"leafwise"},
    {"blocks", "layouts", "cutting", "buffers", "norms", "sums", "rules", "ratios"},
    {"methods"},
    {"packing"},
    {"arguments", "differentiation", "slots"},
    {"steps", "gradients", "jacobians", "execution", "variables"},
    {"transforms"},
    {"__init__"},
]


def module(file):
    """The top-level module or folder that a file belongs to."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def floor(name):
    return next(i for i, names in enumerate(FLOORS) if name in names)


def imported(file):
    """Which modules of jgrad a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "jgrad":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("jgrad."):
                yield node.module.split(".")[1]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_down(file):
    own = module(file)
    for other in imported(file):
        assert floor(other) <= floor(own), f"{own} imports {other} from a floor above"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are_for(file):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 250
