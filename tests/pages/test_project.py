"""What a public project has around its code: addresses, versions, stages of CI, a package's page."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.support.public import VERSION

ROOT = pathlib.Path(__file__).parents[2]
PLACEHOLDER = "OWNER"
ADDRESS = re.compile(r"github(?:usercontent)?\.com/([\w-]+)/jgrad\b")
GENERATED = {"_build", "gallery", "reference", "repository", "__pycache__", "data"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
pytestmark = pytest.mark.ci


def addresses():
    """By file the owners that its addresses of this repository name."""
    folders = ["jgrad", "tests", "colabs", "benchmarks", "studies", "docs", ".ci", ".github"]
    files = [x for x in ROOT.iterdir() if x.is_file()]
    files += [x for folder in folders for x in (ROOT / folder).rglob("*") if x.is_file()]
    found = {}
    for path in files:
        name = path.relative_to(ROOT)
        if GENERATED & set(name.parts) or path.suffix in (".npz", ".gz", ".png", ".pyc"):
            continue
        if owners := set(ADDRESS.findall(path.read_text())):
            found[str(name)] = owners
    return found


def address(folder, *args):
    command = [sys.executable, str(folder / ".ci" / "address.py"), *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_one_owner_in_every_address():
    assert len(set.union(*addresses().values())) == 1


def test_the_owner_is_replaced_in_every_file(tmp_path):
    """Those in which it stands are those that the command knows, and it leaves none."""
    owner = next(iter(addresses()["pyproject.toml"]))
    files = addresses()
    pages = ["README.md", "CONTRIBUTING.md"]
    for name in dict.fromkeys([*files, *pages, ".ci/address.py"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        text = (ROOT / name).read_text()
        if name in files:  # also once the real one has its address
            (tmp_path / name).write_text(text.replace(f"/{owner}/jgrad", f"/{PLACEHOLDER}/jgrad"))
    found = address(tmp_path, "some-body")
    assert not found.returncode, found.stderr
    expected = {*files, *pages}
    assert sorted(re.findall(r"^(\S+): [1-9]\d*$", found.stdout, re.MULTILINE)) == sorted(expected)
    for name in expected:
        text = (tmp_path / name).read_text()
        assert PLACEHOLDER not in text
        assert set(ADDRESS.findall(text)) == {"some-body"}


def test_one_version():
    """Of the package, its citation, the newest section of the changelog and the golden states."""
    version = VERSION
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [version]
    released = re.findall(r"^## (\d\S*?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version
    assert (ROOT / "tests" / "data" / f"states_{version}.npz").is_file()


def test_the_page_of_a_package_index():
    """README with absolute links to files that exist; its sections stay where they are."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text)
    assert len(links) > 5
    for rule in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert not re.search(r"\]\((?!https?:|#)", text)
    own = re.findall(r"\]\(https://[\w.]+/[\w-]+/jgrad/(?:blob/)?main/([^)\s#]+)", text)
    assert own == links
    assert all((ROOT / name).exists() for name in own)


def test_every_stage_runs_in_the_workflow():
    """Each once, but for `tests`, which runs with every Python from the oldest to the newest."""
    stages = re.search(r"^stages=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    asked_for = re.findall(r"^ +(?:- |stages: )([a-z_ ]+)$", workflow, re.MULTILINE)
    found = sorted(name for line in asked_for for name in line.split())
    assert sorted([*found, "tests"]) == sorted(stages[1].split())
    assert ".ci/run tests\n" in workflow
    first = int(PYPROJECT["project"]["requires-python"].removeprefix(">=3."))
    last = re.search(r"^python==3\.(\d+)", (ROOT / ".ci/newest.txt").read_text(), re.MULTILINE)
    pythons = ", ".join(f'"3.{minor}"' for minor in range(first, int(last[1]) + 1))
    assert f"        python: [{pythons}]\n" in workflow


def test_a_stage_that_does_not_exist():
    found = subprocess.run([ROOT / ".ci" / "run", "lnt"], capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith(
        "No stage is named lnt, expected some of: tests as_users newest slow "
    )
