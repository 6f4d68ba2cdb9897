"""Breaks the library on purpose, one place at a time, and sees whether the tests notice.

    python -m tests.mutations                    # by the default suite
    python -m tests.mutations --all zero norms   # by every test, those whose names have these words
    python -m tests.mutations --near             # by the nearest tests alone: quick
    python -m tests.mutations --table            # runs nothing: what is broken, and how

Each mutation of `tests/data/mutations.txt` is applied to a copy of the tree. The tests nearest to it
run first, and the whole suite only if they pass. Prints a table: which test was the first to fail.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tests.support import edits

ROOT = pathlib.Path(__file__).parents[1]


class Mutation(NamedTuple):
    """An edit of one place of the library.

    Attributes:
      place: the name of a function, class or constant.
      name: what is broken.
      old: the pattern of what is replaced.
      new: the broken text.
      near: arguments of pytest, the tests that are run first.
    """

    place: str
    name: str
    old: str
    new: str
    near: str


def _read() -> list[Mutation]:
    """Of each line of the data; those of another kind name what follows."""
    names: dict[str, str] = {}
    found = []
    for line in (ROOT / "tests/data/mutations.txt").read_text().splitlines():
        if line.startswith("    Mutation("):
            found.append(eval(line.strip().removesuffix(","), {"Mutation": Mutation} | names))
        elif " = " in line and not line.lstrip().startswith("#"):
            name, _, value = line.strip().partition(" = ")
            names[name] = value.strip('"')
    return found


MUTATIONS = _read()


class Outcome(NamedTuple):
    """Whether a mutation was killed, and by which test."""

    mutation: Mutation
    test: str | None


def run(mutation: Mutation, *, every: bool, only_near: bool = False) -> Outcome:
    """Tries one mutation in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.png")
        shutil.copytree(ROOT, copy, dirs_exist_ok=True, ignore=ignored)
        place = edits.find(mutation.place)
        broken = edits.edited(place, mutation.old, mutation.new)
        (copy / place.path.relative_to(ROOT)).write_text(broken)
        near = [*mutation.near.split(), "-n0"]
        for arguments in (near,) if only_near else (near, ["-n1"]):
            options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *["--all"] * every]
            command = [sys.executable, "-m", "pytest", *options, *arguments]
            # Programs that a mutation leaves alone are compiled once for all.
            cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla")}
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, env=os.environ | cache
            )
            if done.returncode not in (0, 5):
                failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
                return Outcome(
                    mutation, failed[1] if failed else "an error while tests are collected"
                )
    return Outcome(mutation, None)


def main() -> int:
    """Prints the table; the status is 1 where a mutation survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="Run every test.")
    parser.add_argument("--near", action="store_true", help="Run the nearest tests alone.")
    parser.add_argument("--processes", type=int, default=2, help="Mutations at a time.")
    parser.add_argument("--table", action="store_true", help="Print the mutations, run nothing.")
    parser.add_argument("words", nargs="*", help="Only mutations whose names or places have these.")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or _has(m, options.words)]
    if options.table:
        print("| place | mutation | what is replaced | by |\n| --- | --- | --- | --- |")
        for m in chosen:
            row = [f"`{_shown(m)}`", m.name, f"`{m.old}`", f"`{m.new}`"]
            print("|", " | ".join(x.replace("|", "\\|") for x in row), "|")
        return 0
    print("| place | mutation | first test that fails |\n| --- | --- | --- |")
    survived = 0
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        outcomes = pool.map(lambda m: run(m, every=options.all, only_near=options.near), chosen)
        for mutation, test in outcomes:
            survived += test is None
            shown = "**survived**" if test is None else f"`{test.replace('|', ' ')}`"
            print(f"| `{_shown(mutation)}` | {mutation.name} | {shown} |", flush=True)
    killed = len(chosen) - survived
    print(f"\n{killed} of {len(chosen)} killed", flush=True)
    return 1 if survived else 0


def _shown(mutation: Mutation) -> str:
    return edits.find(mutation.place).name


def _has(mutation: Mutation, words: list[str]) -> bool:
    return any(word in mutation.name or word in _shown(mutation) for word in words)


if __name__ == "__main__":
    sys.exit(main())
