"""The house: data flows one way, down the folders of CONTRIBUTING.md, and no file is long."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize

import pytest

from tests import rooms
from tests.support.public import PACKAGE

FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = [name for name in FILES if not name.endswith("/__init__.py")]
FOLDERS = sorted({name.partition("/")[0] for name in FILES if "/" in name})

every_file = pytest.mark.parametrize("name", FILES)


def folder_of(name):
    return name.partition("/")[0]


def imported(name):
    """The files of jgrad that a file imports."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("jgrad") for alias in node.names), "use `from`"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level == 0, "a relative import"
        parts = (node.module or "").split(".")
        if parts[0] != "jgrad":
            continue
        module = "/".join(parts[1:])
        if f"{module}.py" in FILES:
            yield f"{module}.py"
        else:
            yield from (f"{module}/{alias.name}.py" for alias in node.names)


def test_every_folder_is_a_floor():
    """The table of CONTRIBUTING.md has each once; `python -m tests.rooms` prints what is in them."""
    assert sorted(rooms.floors()) == FOLDERS


@pytest.mark.parametrize("name", ROOMS)
def test_imports_go_down(name):
    """Into folders further down, or to another file of the folder."""
    order = ["__init__.py", *rooms.floors()]
    for other in imported(name):
        assert order.index(folder_of(other)) >= order.index(folder_of(name)), f"imports {other}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_imports_nothing(folder):
    assert not list(imported(f"{folder}/__init__.py"))


def test_every_import_is_seen():
    """Of the file that imports most, by hand: what is not found cannot be wrong."""
    found = set(imported("_optimizers/lamb.py"))
    assert {"_optimizers/adam.py", "_inputs/functional.py", "_arithmetic/leafwise.py"} <= found
    assert "_layers/trust.py" in found


@pytest.mark.parametrize("of", ["files", "folders"])
def test_imports_have_an_order(of):
    """Derived from the imports alone: no cycle, of files or of folders."""
    graph = {}
    for name in FILES:
        for other in imported(name):
            pair = (name, other)
            if of == "folders":
                pair = (folder_of(name), folder_of(other))
            if pair[0] != pair[1]:
                graph.setdefault(pair[0], set()).add(pair[1])
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order[-1] == "__init__.py"


@pytest.mark.ci
def test_importing_jgrad_leaves_out_pallas():
    """A program for a TPU imports it when it is lowered; others need not wait for it."""
    code = "import sys, jgrad; print({'jax.experimental.pallas'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert found.stdout == "set()\n", found.stderr


# What a CPU does not run, and the default test that runs it: by a switch for tests, or as the program
# of another platform, which `tests/support/other_platforms.py` runs on a CPU.
ON_OTHER_PLATFORMS = {
    "_backward/step_in_backward.py": "tests/backward/test_layouts.py::test_the_programs_of_other_platforms",
    "_kernels/platforms.py": "tests/kernels/test_kernels.py::forced",
    "_layers/trust.py": "tests/everywhere/test_surroundings.py::lamb-packed-cuda",
    "_muon/newton_schulz.py": "tests/everywhere/test_surroundings.py::muon-tree-tpu",
    "_packed/packed_layers.py": "tests/everywhere/test_surroundings.py::lamb-packed-cuda",
    "_packed/buffers.py": "tests/everywhere/test_surroundings.py::pack_small-tree-cuda",
    "_soap/bases.py": "tests/soap/test_soap.py::test_stacks_of_other_platforms",
    "_wrappers/watch.py": "tests/wrappers/test_watch.py::as_on",
}


def test_what_a_cpu_does_not_run_is_run_by_default_tests():
    """A mistake there is one that no user sees on a CPU."""
    choice = re.compile(r"lax\.platform_dependent|def forced\(|register_lowering")
    chosen = {name for name, path in FILES.items() if choice.search(path.read_text())} - {
        "_trees/unpromised.py"  # where the name is
    }
    assert chosen == ON_OTHER_PLATFORMS.keys()
    for place in ON_OTHER_PLATFORMS.values():
        name, _, word = place.partition("::")
        assert word in (PACKAGE.parent / name).read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_its_docstring_says(folder):
    text = ast.get_docstring(ast.parse(FILES[f"{folder}/__init__.py"].read_text()))
    allowed = set(re.findall(r"`(_\w+)`", text))
    own = [name for name in ROOMS if name.startswith(f"{folder}/")]
    others = {folder_of(other) for name in own for other in imported(name)} - {folder}
    assert others <= allowed


def lines_of_code(text):
    """Without docstrings, comments and blank lines."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in blank | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


@every_file
def test_files_are_short_and_say_what_they_are_for(name):
    """At most 400 lines of code."""
    text = FILES[name].read_text()
    assert rooms.title(FILES[name]).endswith(".")  # one line, since `tests.rooms` prints no more
    assert lines_of_code(text) <= 400


# What there is to read behind a public function: the files that its file imports, directly or not,
# and their lines of code; at most. A storage format, a kernel, a packed tree or another method is
# behind a door, which the core does not open. Who goes above says why in BUILD_NOTES.md.
CLOSURES = {
    "_optimizers/adam.py": (24, 2_730),
    "_optimizers/lion.py": (24, 2_610),
    "_optimizers/gradient_descent.py": (24, 2_600),
    "_optimizers/lamb.py": (29, 3_570),
    "_wrappers/clip.py": (22, 2_710),
    "_wrappers/skip_nonfinite.py": (26, 3_200),
    "_backward/step_in_backward.py": (34, 4_270),
}


def closure(name):
    """A file, and all that it imports; imports inside functions count, too."""
    found, left = set(), [name]
    while left:
        if (first := left.pop()) not in found:
            found.add(first)
            left += imported(first)
    return found


@pytest.mark.parametrize("name", CLOSURES)
def test_what_there_is_to_read(name):
    files, lines = CLOSURES[name]
    found = closure(name)
    assert len(found) <= files
    assert 0 <= lines - sum(lines_of_code(FILES[x].read_text()) for x in found) < 100


def test_few_files_know_a_form():
    """By its name; the others ask `_trees/forms.py`."""
    word = re.compile(r"^(?:from .* import .*|class )\b(?:Blocks|Factors)\b", re.MULTILINE)
    assert len([name for name in ROOMS if word.search(FILES[name].read_text())]) <= 15


def words(name):
    """The words of a file, of its comments and texts, too."""
    return re.findall(r"\w+", FILES[name].read_text())


def test_holes_end_at_the_door():
    """Methods, norms and wrappers have lists of what is there: few have entries that may be None."""
    hole = r"(?:list|Sequence|PerArray)\[[\w.]+ \| None\]|\[None\] \*|[\[(]None if |else None for "
    inside = re.compile("_(optimizers|layers|muon|soap|wrappers)/")
    texts = [ast.unparse(ast.parse(FILES[x].read_text())) for x in filter(inside.match, FILES)]
    assert sum(len(re.findall(hole, text)) for text in texts) <= 7


def bound(text):
    """The names that a file gives to variables, arguments, attributes, functions and classes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_names_have_nouns():
    """Few say only how something came about or whose it is: what it is, is the better name."""
    names = [x.strip("_") for name in FILES for x in bound(FILES[name].read_text())]
    bare = {"of", "said", "made", "found", "own", "given", "each"}
    assert sum(x in bare for x in names) <= 28  # `Rows.of(axes)` says it by its type
    used = [x for name in FILES for x in words(name) if re.match("_?of_", x)]
    assert len(used) <= 110


def test_a_block_is_256_elements_with_one_scale():
    """Buffers have rows, fused matrices pieces, devices parts; users pass `scan_layers` a block."""
    names = {x: set(bound(FILES[x].read_text())) for x in FILES if "block" in FILES[x].read_text()}
    found = {x.split("/")[0] for x, y in names.items() if any("block" in z.lower() for z in y)}
    assert found == {"_backward", "_kernels", "_quantized", "_trees", "_wrappers"}


def test_bound_names():
    text = "def a(b, *c, d=e):\n    f.g, h = i\n    for j in k: pass\nclass l: m: n = 1"
    assert set(bound(text)) == set("abcdghjlm")


def test_types_say_what_a_value_is():
    """`Any` where JAX or a user decides; `Leaf` and `PyTree` are the words for leaves and trees."""
    assert sum(words(name).count("Any") for name in FILES) <= 360


def test_a_closure_is_followed():
    """From Adam over two files to a third, and not to a kernel."""
    found = closure("_optimizers/adam.py")
    assert {"_inputs/kinds.py", "_inputs/options.py", "_trees/told.py"} <= found
    assert not any(name.startswith(("_kernels/", "_quantized/", "_packed/")) for name in found)


def test_lines_of_code_are_counted():
    text = '"""A docstring."""\n\nx = f(\n    1,  # one\n)\n# a comment\n'
    assert lines_of_code(text) == 3


def lines_of(function):
    """How long a function is, with those inside of it, and without its docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function) is not None
    docstring = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


@every_file
def test_no_function_is_long(name):
    """At most 70 lines without the docstring, those of a factory's inner functions among them."""
    nodes = ast.walk(ast.parse(FILES[name].read_text()))
    functions = [x for x in nodes if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert not {x.name: lines_of(x) for x in functions if lines_of(x) > 70}


def test_lines_of_a_function_are_counted():
    text = '''
def outer(a):
    """Two lines
    of a docstring."""
    def inner():
        return a

    return inner
'''
    outer = ast.parse(text).body[0]
    assert lines_of(outer) == 5
    assert lines_of(outer.body[1]) == 2


@pytest.mark.parametrize("name", [name for name in ROOMS if not name.startswith("_packed/")])
def test_nobody_else_looks_into_packed_trees(name):
    """Other folders ask a layout, an `ArraySpec` or `LayerAxes`: no type is tested, no name read."""
    text = FILES[name].read_text()
    assert not re.search(r"isinstance\([^)]*\b(Packed|PackedLayers|Layout|Span)\b", text)
    assert not re.search(r"getattr\([^)]*\"(blocks|buffers|layout)\"", text)
    assert not re.search(r"[\"']leaf |[\"']buffers[\"']", text)


# Of tests: lines of code without what `tests/pages` has of prose, examples and other libraries, and
# files that name private modules. Who adds, takes out as much; a table of messages, figures or
# mutations is data, in `tests/data`.
TESTS = [*sorted((PACKAGE.parent / "tests").rglob("*.py")), PACKAGE.parent / "conftest.py"]
LINES_OF_TESTS, NAMING_PRIVATE_MODULES = 24_000, 40


@pytest.mark.ci
def test_the_budget_of_tests():
    texts = {x: x.read_text() for x in TESTS if "pages" not in x.parts}
    assert sum(map(lines_of_code, texts.values())) <= LINES_OF_TESTS
    private = [x for x in TESTS if re.search(r"jgrad\._", x.read_text())]
    assert len(private) <= NAMING_PRIVATE_MODULES


@every_file
def test_an_option_is_followed_by_its_name(name):
    """From a factory to the equation."""
    assert "locals()" not in FILES[name].read_text()
