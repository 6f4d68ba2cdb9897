"""The tests of others, with jgrad in the place of optax.

    python -m studies.clients PATH [arguments of pytest]

PATH is a checkout of a library that uses optax, and the arguments name its test files; nothing is
fetched. Each test runs with optax, with jgrad's optimizers with options of the same meaning, and
with all wrappers around these (`tests/clients/swap.py`). Prints a row of the table in
docs/clients.md, and the tests that pass with optax only. The environment needs what the tests need.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from tests.clients import swap

_ROOT = pathlib.Path(__file__).parents[1]


def run(checkout: pathlib.Path, mode: str, args: list[str]) -> dict[str, Any]:
    """Outcomes by the names of tests, and calls of jgrad by the names of optax."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        # The plugin is a module of its own, since the checkout may have a package `tests`, too. It
        # is not looked for in the checkout (-P).
        folders = [str(pathlib.Path(swap.__file__).parent), str(_ROOT)]
        path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
        settings = {swap.MODE: mode, swap.REPORT: str(report), "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "swap", *args]
        done = subprocess.run(
            [*command, "-q", "-p", "no:cacheprovider"],
            cwd=checkout,
            env=os.environ | settings,
            check=False,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"pytest did not run in {checkout}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(report.read_text())
        if not found["outcomes"]:
            raise RuntimeError(f"no test ran in {checkout}:\n{done.stdout}{done.stderr}")
        return found


def passed(found: dict[str, Any]) -> set[str]:
    """The tests that passed."""
    return {name for name, outcome in found["outcomes"].items() if outcome == "passed"}


def main(argv: list[str]) -> int:
    """0 if what passes with optax passes with jgrad, too."""
    if len(argv) < 2 or argv[1].startswith("-"):
        print(__doc__)
        return 2
    checkout, args = pathlib.Path(argv[1]), argv[2:]
    if not checkout.is_dir():
        print(f"studies.clients: PATH: {checkout} is no folder, expected a checkout.")
        return 2
    found = {mode: run(checkout, mode, args) for mode in swap.MODES}
    counts = [str(len(passed(x))) for x in found.values()]
    calls = ", ".join(f"{name} {n}" for name, n in found["jgrad"]["calls"].items()) or "none"
    print("| tests | optax passes | jgrad passes | with all wrappers | calls of jgrad |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| {checkout.name} `{' '.join(args)}` | {' | '.join(counts)} | {calls} |")
    lost = {mode: sorted(passed(found["optax"]) - passed(x)) for mode, x in found.items()}
    for mode, names in lost.items():
        for name in names:
            print(f"{mode} fails: {name}")
    return int(any(lost.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
