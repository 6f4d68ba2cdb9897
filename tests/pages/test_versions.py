"""The versions that README names are those with which CI ran, and what CI says of others."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.ci

# What JAX does not promise. The first two may change with any release, as their documentation says;
# `jgrad/_trees/unpromised.py` has all names of theirs.
PRIVATE = re.compile(
    r"jax\.extend|jax\.interpreters|jax\.experimental|jax\._src|_internal_pmap|NamedAxisEffect"
    r"|\bmanual_axes\b|\"manual_axis_type\"|get_bind_params|weak_type"
    r"|axis_context|\"manager\""
)


def record(name):
    text = (ROOT / ".ci" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


OLDEST, NEWEST = record("oldest"), record("newest")


def minor(version):
    return ".".join(version.split(".")[:2])


def test_readme():
    """From the oldest to the newest of both; the page on stability names these."""
    python = PROJECT["requires-python"].removeprefix(">=")
    expected = f"Python {python} to {NEWEST['python']} and JAX {OLDEST['jax']} to {NEWEST['jax']}"
    assert expected in (ROOT / "README.md").read_text().replace("\n", " ")
    tested = (ROOT / "docs/stability.md").read_text().partition("## Tested versions\n")[2]
    assert f"JAX {OLDEST['jax']} on Python {python}" in tested.replace("\n", " ")
    assert f"JAX {NEWEST['jax']} on Python {NEWEST['python']}" in tested.replace("\n", " ")


def test_lower_bounds():
    """They are what CI installs."""
    bounds = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(PROJECT["dependencies"])))
    assert {"jax", "jaxlib", "optax"} <= bounds.keys()
    for name, version in bounds.items():
        # "2.1" of pyproject is "2.1.0" of pip's constraints.
        assert re.fullmatch(re.escape(version) + r"(\.0)*", OLDEST[name]), name


def test_classifiers():
    """Of each Python from the oldest to the newest that CI ran, and beyond."""
    found = re.findall(r":: Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
    first = int(PROJECT["requires-python"].rpartition(".")[2])
    assert list(map(int, found)) == list(range(first, int(found[-1]) + 1))
    assert int(NEWEST["python"].partition(".")[2]) in map(int, found)


def test_what_jax_does_not_promise():
    """Where a file uses it stands in which versions that was checked."""
    checked = f"checked in JAX {minor(OLDEST['jax'])} to {minor(NEWEST['jax'])}"
    files = {path: path.read_text() for path in (ROOT / "jgrad").rglob("*.py")}
    private = {path: text for path, text in files.items() if PRIVATE.search(text)}
    assert len(private) > 3
    assert not [path for path, text in private.items() if checked not in text.replace("\n# ", " ")]


def versions(path, *options):
    command = [sys.executable, ".ci/versions.py", str(path), *options]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_what_ci_says_of_others(tmp_path):
    """Another version than the record has is said, and what to do; written, it is said no more."""
    path, jax = tmp_path / "newest.txt", importlib.metadata.version("jax")
    path.write_text("# Kept.\njax==0.6.1\n")
    first, second, third = versions(path).splitlines()
    assert re.match(rf"python 3\.\d+, jax {re.escape(jax)}, jaxlib ", first)
    assert second == f"{path} differs: jax 0.6.1 there, {jax} here."
    assert (
        third == f"If the tests pass: `python .ci/versions.py {path} --write`, and README's range."
    )
    versions(path, "--write")
    assert path.read_text() == f"# Kept.\njax=={jax}\n"
    assert versions(path) == f"{first}\n"
