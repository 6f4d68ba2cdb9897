"""Runs the tests nearest to files: those that notice first when something in them is broken.

    python -m tests.near                                  # of what git says you changed
    python -m tests.near jgrad/_optimizers/adam.py        # of these files
    python -m tests.near jgrad/_optimizers/adam.py -x     # other arguments are pytest's

Of a file of `jgrad/` they are the tests that kill its mutations (`tests/data/mutations.txt`) and those
that XX
"""

import collections
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable

from tests.mutations import MUTATIONS
from tests.support import edits

ROOT = pathlib.Path(__file__).parents[1]
HOUSE = ("tests/test_house.py", "tests/test_signatures.py", "tests/test_mutations.py")
TEXTS = ("tests/pages/test_docs.py", "tests/pages/test_project.py")
METHOD = ("tests/test_methods.py", "tests/trees/test_made_by.py", *TEXTS)
OF_METHODS = [("jgrad", folder) for folder in ("_optimizers", "_muon", "_soap")]


def near(files: Iterable[str]) -> dict[str, set[str]]:
    """Tests' files or folders, each with the words of `-k`; without words the file runs whole."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    wholes = {*HOUSE}
    for file in files:
        path = pathlib.PurePath(file)
        if path.parts[:2] in OF_METHODS or file in ("jgrad/__init__.py", "tests/cases.py"):
            wholes.update(METHOD)
        if path.parts[0] == "tests" or path.name.startswith("test_"):
            wholes.update([file] if path.name.startswith("test_") else _that_read(path.stem))
            continue
        if path.parts[0] != "jgrad":
            wholes.update(TEXTS)
            continue
        for arguments in _near_of_mutations().get(ROOT / file, []):
            tests, _, word = arguments.partition(" -k ")
            for test in tests.split():
                found[test].add(word)
        own = ROOT / "tests" / path.parent.name.lstrip("_")
        if (of_its_name := own / f"test_{path.stem}.py").is_file():
            wholes.add(_shown(of_its_name))
        elif not found:
            wholes.add(_shown(own) if own.is_dir() else "tests/everywhere/test_matrix.py")
    found.update((test, set()) for test in wholes)
    return {test: set() if "" in words else words for test, words in found.items()}


@functools.cache
def _near_of_mutations() -> dict[pathlib.Path, list[str]]:
    found = collections.defaultdict(list)
    for mutation in MUTATIONS:
        found[edits.find(mutation.place).path].append(mutation.near)
    return found


def _that_read(table: str) -> list[str]:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [_shown(x) for x in tests if f'messages.test_of("{table}"' in x.read_text()]


def _shown(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pytest_collection_modifyitems(config, items):
    """As a plugin, in each process: leaves out what no word names, of files that have some."""
    chosen = json.loads(os.environ["JGRAD_NEAR"])

    def is_chosen(item):
        path = item.path.relative_to(ROOT)
        words = [chosen[str(x)] for x in (path, *path.parents) if str(x) in chosen]
        return any(not each or any(word in item.name for word in each) for each in words)

    kept = [x for x in items if is_chosen(x)]
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = kept


def changed() -> list[str]:
    """Files that differ from the last commit, those that git does not know yet among them."""
    command = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line[3:].strip('"') for line in lines.splitlines()]
    return [name for name in names if (ROOT / name).is_file()]


def main(arguments: list[str]) -> int:
    """Runs pytest; its status."""
    files = [x for x in arguments if (ROOT / x).is_file()]
    options = [x for x in arguments if x not in files]
    chosen = near(files or changed())
    print("near:", *(f"{x}{_of(words)}" for x, words in sorted(chosen.items())), sep="\n  ")
    command = [sys.executable, "-m", "pytest", "-p", "tests.near", *chosen, *options]
    environment = os.environ | {"JGRAD_NEAR": json.dumps({x: [*y] for x, y in chosen.items()})}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _of(words: set[str]) -> str:
    return f" ({', '.join(sorted(words))})" if words else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
