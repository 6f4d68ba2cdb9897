"""The house: data flows one way through the folders, and files and functions are short."""

import ast
import graphlib
import io
import pathlib
import re
import tokenize

import pytest

import jgrad

PACKAGE = pathlib.Path(jgrad.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = [name for name in FILES if not name.endswith("/__init__.py")]
FOLDERS = sorted({name.partition("/")[0] for name in FILES if "/" in name})


def folder_of(name):
    """A name in the folder of the package stands for itself."""
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


def floors():
    """The folders from the top down, by the table of CONTRIBUTING.md."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    table = text.partition("| folder | what it has |\n")[2].partition("\n\n")[0]
    cells = (line.split("|")[1] for line in table.splitlines())
    return [folder for cell in cells for folder in re.findall(r"`(_\w+)`", cell)]


def test_imports_go_down():
    """Into folders further down."""
    order = floors()
    assert sorted(order) == FOLDERS
    for name in ROOMS:
        for other in imported(name):
            pair = folder_of(name), folder_of(other)
            down = "/" not in name or order.index(pair[1]) >= order.index(pair[0])
            assert down, f"{name} imports {other}"


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_its_docstring_says(folder):
    text = ast.get_docstring(ast.parse(FILES[f"{folder}/__init__.py"].read_text()))
    allowed = set(re.findall(r"`(_\w+)`", text))
    own = [name for name in ROOMS if name.startswith(f"{folder}/")]
    others = {folder_of(other) for name in own for other in imported(name)} - {folder}
    assert others <= allowed


def lines_of_code(text):
    """The numbers of the lines that are neither blank, comment nor docstring."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    others = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in others | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return code - docstrings


@pytest.mark.parametrize("name", FILES)
def test_files_are_short_and_say_what_they_are_for(name):
    """By a first line that says what lives there: a newcomer reads these lines first."""
    text = FILES[name].read_text()
    first, _, rest = ast.get_docstring(ast.parse(text)).partition("\n")
    assert first
    assert not rest.partition("\n")[0]
    assert len(lines_of_code(text)) <= 400


@pytest.mark.parametrize("name", ROOMS)
def test_functions_are_short(name):
    """Those inside of a function are functions of their own."""
    text = FILES[name].read_text()
    code = lines_of_code(text)
    spans = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    for outer in spans:
        of_others = {
            line
            for inner in ast.walk(outer)
            if isinstance(inner, ast.FunctionDef) and inner is not outer
            for line in range(inner.lineno, inner.end_lineno + 1)
        }
        own_lines = {*range(outer.lineno, outer.end_lineno + 1)} & code - of_others
        assert len(own_lines) <= 70, outer.name


@pytest.mark.parametrize("name", [name for name in ROOMS if not name.startswith("_packed/")])
def test_nobody_else_looks_into_packed_trees(name):
    """Other folders ask a layout, an `ArraySpec` or `LayerAxes`: no type is tested, no name read."""
    text = FILES[name].read_text()
    assert not re.search(r"isinstance\([^)]*\b(Packed|PackedLayers|Layout|Span)\b", text)
    assert not re.search(r"getattr\([^)]*\"(blocks|buffers|layout)\"", text)
    assert not re.search(r"[\"']leaf |[\"']buffers[\"']", text)
