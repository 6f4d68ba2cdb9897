"""What type checkers read of the library, on programs as users write them."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.public import PACKAGE

ROOT = PACKAGE.parent
PROGRAMS = pathlib.Path(__file__).parent / "types"
pytestmark = pytest.mark.ci


def by_mypy(file, folder):
    """The lines with errors, and the text of these."""
    command = ["mypy", "--strict", "--follow-imports=silent", f"--cache-dir={folder}", str(file)]
    command += ["--config-file=", "--python-executable", sys.executable]
    found = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT
    )
    assert not found.stderr, found.stderr
    return {int(n) for n in re.findall(r"\.py:(\d+): error", found.stdout)}, found.stdout


def by_pyright(file, folder):
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, str(file)]
    found = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT
    )
    errors = [x for x in json.loads(found.stdout)["generalDiagnostics"] if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1 for x in errors}, "\n".join(
        x["message"] for x in errors
    )


CHECKERS = {"mypy": by_mypy, "pyright": by_pyright}


@pytest.mark.parametrize("checker", CHECKERS)
def test_types(checker, tmp_path):
    """A strict checker accepts all of one program, and refuses each marked line of another."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: it is in the extra `release`, as CI has it")
    errors, text = CHECKERS[checker](PROGRAMS / "right.py", tmp_path)
    assert not errors, text
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    wrong = {i for i, line in enumerate(lines, start=1) if line.endswith("# error")}
    errors, text = CHECKERS[checker](PROGRAMS / "wrong.py", tmp_path)
    assert errors == wrong, text
