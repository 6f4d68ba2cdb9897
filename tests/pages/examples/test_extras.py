"""Examples that need an extra of pyproject.toml say so before anything else."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

import extras

ROOT = pathlib.Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "orbax-checkpoint": "orbax", "absl-py": "absl"}
NEEDED = {
    "train_equinox": {"sklearn", "equinox"},
    "train_linen": {"sklearn", "flax", "orbax"},
    "train_nnx": {"sklearn", "flax", "orbax"},
    "train_sharded_nnx": {"sklearn", "flax", "orbax"},
    "train_digits": {"sklearn", "matplotlib", "rich"},
    "train_distributed": {"sklearn", "rich", "orbax"},
    "train_language_model": {"matplotlib", "rich", "orbax"},
    "train_plain": set(),
}
# Calls an example where some modules are missing and all others are there, and prints what was
# imported until its end.
CALL = """
import importlib.machinery, importlib.util, runpy, sys, types
script, missing, *flags = sys.argv[1:]
sys.path[0] = script.rpartition("/")[0]
for name in ("sklearn", "matplotlib", "rich", "orbax"):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
sys.modules |= dict.fromkeys(missing.split(","))
sys.argv = [script, *flags]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as error:
    print(error)
print(*{"numpy", "jax", "absl", "rich"} & {k for k, x in sys.modules.items() if x})
"""


def modules(requirements):
    names = [x.partition(">=")[0] for x in requirements]
    return {MODULES.get(name, name) for name in names}


def imported(path):
    """Modules that are not Python's, also those of an example's own modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {x.name.split(".")[0] for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    own = {x for x in found if (path.parent / f"{x}.py").exists()}
    others = found - own - set(sys.stdlib_module_names)
    return others.union(*(imported(path.parent / f"{x}.py") for x in own))


def test_they_are_those_of_pyproject():
    optional = PROJECT["optional-dependencies"]
    assert {name: modules(optional[name]) for name in extras.EXTRAS} == {
        name: set(own) for name, own in extras.EXTRAS.items()
    }


def test_every_example_is_here():
    assert {x.stem for x in (ROOT / "colabs").glob("train_*.py")} == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_what_an_example_needs(name):
    core = {*modules(PROJECT["dependencies"]), "jgrad", "numpy"}
    assert imported(ROOT / "colabs" / f"{name}.py") - core == NEEDED[name]


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("train_digits", "sklearn,rich", "sklearn, rich. Give: pip install 'jgrad[demo]'"),
        ("train_distributed", "orbax", "orbax. Give: pip install 'jgrad[distributed]'"),
        ("train_distributed", "rich,orbax", "rich, orbax. Give: pip install 'jgrad[distributed]'"),
        ("train_language_model", "orbax,matplotlib",
         "orbax, matplotlib. Give: pip install 'jgrad[demo,distributed]'"),
        ("train_distributed", "jgrad", f"jgrad. Give: pip install '{ROOT}[distributed]'"),
    ],
)  # fmt: skip
def test_it_is_said_first(name, missing, message):
    found = called(name, missing)
    assert found.stdout == f"Not installed: {message}\n\n", found.stderr


def called(name, missing, *flags):
    return subprocess.run(
        [sys.executable, "-c", CALL, ROOT / "colabs" / f"{name}.py", missing, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
