"""A method that is missing somewhere is red: its files, its names, its row, its pages.

The methods are the public functions of which the first argument is a learning rate. `cases.py` has
a row of each, from which most tests come; what does not come from the row is compared with it here.
"""

import functools
import importlib
import inspect
import pathlib
import re

import pytest

import jgrad
from tests.cases import CASES, METHODS
from tests.golden import FORMS, TRANSFORMATIONS
from tests.mutations import MUTATIONS
from tests.reference import optimizers as reference
from tests.support import edits
from tests.support.eight_bits import EACH, MAKES
from tests.support.public import EXPORTED, PACKAGE

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.ci
FILES = sorted(
    str(path.relative_to(PACKAGE).with_suffix(""))
    for folder in ("_optimizers", "_muon", "_soap")
    for path in (PACKAGE / folder).glob("*.py")
    if path.stem != "__init__"
)
FUNCTIONS = {name: x for name in EXPORTED if inspect.isfunction(x := getattr(jgrad, name))}
# Of no single method: a step along any direction, and the direction of Adam.
OTHER_UPDATES = {"optimizer_update", "adam_step"}
# Of devices, layers and forms of moments, which have tests of their own.
OF_NO_ROW = {"mesh_axes", "layer_axes", "shard_over", "compute_dtype"}
OF_NO_ROW |= {"moment_dtype", "full_precision", "split"}
OTHERWISE = ("output_axes", "fraction")  # of which the reference takes a number, too

every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def is_update(f):
    """Functional updates alone have Ivy's argument `out`."""
    return "out" in inspect.signature(f).parameters


def faces(file):
    """The functions of a file that users would call: pairs, their parts, and functional updates."""
    module = importlib.import_module(f"jgrad.{file.replace('/', '.')}")
    for name, f in vars(module).items():
        if inspect.isfunction(f) and f.__module__ == module.__name__ and name[0] != "_":
            returned = getattr(f, "__annotations__", {}).get("return")
            if "Transformation" in str(returned) or is_update(f):
                yield name


@pytest.mark.parametrize("file", FILES)
def test_what_a_file_defines_is_public(file):
    """Then `test_docs.py` asks for it in the docstring of jgrad and in docs/reference.md."""
    assert set(faces(file)) <= set(EXPORTED)


def test_the_files_have_the_faces_of_every_method():
    """What finds them finds them all."""
    found = {name for file in FILES for name in faces(file)}
    assert {method.__name__ for method in METHODS} <= found
    assert {f"{case.make.__name__}_update" for case in CASES if case.step} <= found


def test_every_method_has_a_row():
    """That is, each public function of which the first argument is a learning rate."""
    rated = {
        name
        for name, f in FUNCTIONS.items()
        if [*inspect.signature(f).parameters][:1] == ["learning_rate"]
    }
    assert rated == {method.__name__ for method in METHODS}


def test_every_functional_update_is_that_of_a_row():
    found = {name for name, f in FUNCTIONS.items() if name.endswith("_update") and is_update(f)}
    assert found - OTHER_UPDATES == {f"{case.make.__name__}_update" for case in CASES if case.step}


def test_every_moment_has_a_row():
    """`test_state_has_what_the_method_uses` compares the rows with the states."""
    for method in METHODS:
        has_moments = "moment_dtype" in inspect.signature(method).parameters
        assert has_moments == any(case.rounded for case in CASES if case.make is method)


@every_method
def test_every_option_is_in_a_row(method):
    """So that its numbers are compared with the reference; of options, that is, that do nothing unset."""
    given = {name for case in CASES if case.make is method for name in case.options}
    parameters = inspect.signature(method).parameters.values()
    names = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY and not x.default}
    assert names - given <= OF_NO_ROW


@every_method
def test_the_reference_has_the_defaults(method):
    """Of the same options by the same names: a row without options compares both."""
    own, other = (
        inspect.signature(f).parameters for f in (method, getattr(reference, method.__name__))
    )
    for name, x in own.items():
        if x.kind is x.KEYWORD_ONLY and name in other and name not in OTHERWISE:
            assert other[name].default in (x.default, inspect.Parameter.empty), name


@every_method
def test_what_comes_from_the_row(method):
    """Moments in 8 bits and states of golden files."""
    cases = [case for case in CASES if case.make is method]
    kept = [case for case in cases if case.rounded]
    assert {case.name for case in kept} <= MAKES.keys()
    assert any(case.name in EACH for case in kept) or not kept
    forms = FORMS if kept else [""]
    for form in forms:
        assert any(case.name + form in TRANSFORMATIONS for case in cases), form


@functools.cache
def broken_files():
    return {edits.find(mutation.place).path for mutation in MUTATIONS}


@every_method
def test_a_mutation_breaks_the_method(method):
    """At least one, in its file."""
    assert pathlib.Path(inspect.getfile(inspect.unwrap(method))) in broken_files()


@pytest.mark.parametrize("page", ["CHANGELOG.md", "docs/memory.md", "docs/methods.md"])
@every_method
def test_pages_name_the_method(method, page):
    assert re.search(rf"`{method.__name__}[`(]", (ROOT / page).read_text())
