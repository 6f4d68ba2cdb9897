"""Studies stand above the benchmarks: they import these, and nothing imports a study but its tests."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = {x.stem: x for x in (ROOT / "benchmarks").glob("*.py")}
# A file, or a folder with a `__main__.py`.
STUDIES = {x.stem: x for x in sorted((ROOT / "studies").glob("*.py")) if x.stem != "__init__"}
STUDIES |= {x.parent.name: x for x in sorted((ROOT / "studies").glob("*/__main__.py"))}

# The tests of studies; no other file of `tests/` may import one, least of all a helper.
THEIR_TESTS = {
    "tests/everywhere/test_swap.py": {"clients"},
    "tests/examples/test_endurance.py": {"endurance"},
    "tests/examples/test_lightbench.py": {"lightbench"},
    "tests/examples/test_soap_study.py": {"soap"},
    "tests/examples/test_zero_gradients.py": {"zero_gradients"},
    "tests/multi_device/test_traffic.py": {"traffic"},
    "tests/quantized/test_errors_of_steps.py": {"memory"},
    "tests/test_docs.py": {"traffic"},  # a table that a study prints
}


def imported(file):
    """The modules that a file imports, wherever it does, by their whole names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module
            yield from (f"{node.module}.{x.name}" for x in node.names)


def studies_in(names):
    return {x.split(".")[1] for x in names if x.startswith("studies.")} & set(STUDIES)


@pytest.mark.parametrize("folder", ["jgrad", "benchmarks", "colabs"])
def test_nothing_below_imports_a_study(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        assert not any(x.split(".")[0] == "studies" for x in imported(file)), file


def test_tests_import_the_study_that_they_test():
    found = {}
    for file in (ROOT / "tests").rglob("*.py"):
        if of := studies_in(imported(file)):
            found[str(file.relative_to(ROOT))] = of
    assert found == THEIR_TESTS


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_by_its_name(name):
    text = STUDIES[name].read_text()
    assert f"python -m studies.{name}" in ast.get_docstring(ast.parse(text))
    assert '\nif __name__ == "__main__":\n' in text


def test_benchmarks_are_what_their_report_needs():
    """From `python -m benchmarks` each file is reached by imports."""
    reached, todo = set(), ["__main__"]
    while todo:
        reached.add(name := todo.pop())
        names = {x.split(".")[1] for x in imported(BENCHMARKS[name]) if x.startswith("benchmarks.")}
        todo += (names & set(BENCHMARKS)) - reached
    assert reached == set(BENCHMARKS) - {"__init__"}
