"""The tests of others, with jgrad in the place of optax.

    python -m studies.clients PATH [arguments of pytest]
    python -m studies.clients --optax [arguments of pytest]

PATH is a checkout of a library that uses optax, and the arguments name its test files; nothing is
fetched. `--optax` runs the tests of the installed optax, those in `OPTAX` unless named, and prints
a row for each file. Each test runs with optax, with jgrad's optimizers with options of the same
meaning, and with all wrappers around these (`tests/pages/clients/swap.py`). Prints a row of the
table in benchmarks/notes/tests_of_others.md, and the tests that pass with optax only. The
environment needs what the tests need.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import optax

from tests.pages.clients import swap

_ROOT = pathlib.Path(__file__).parents[1]
_INSTALLED = pathlib.Path(optax.__file__).parent

# Files of optax's wheel that take what is replaced.
OPTAX = [
    "_src/alias_test.py",
    "_src/combine_test.py",
    "_src/float64_test.py",
    "_src/linesearch_test.py",
    "_src/lookahead_test.py",
    "_src/sharding_test.py",
    "_src/transform_test.py",
    "contrib/_common_test.py",
    "contrib/_muon_test.py",
    "contrib/_schedule_free_test.py",
    "experimental/_aggregating_test.py",
    "schedules/_inject_test.py",
    "transforms/_accumulation_test.py",
    "transforms/_clipping_test.py",
    "transforms/_combining_test.py",
    "transforms/_conditionality_test.py",
    "transforms/_freezing_test.py",
    "transforms/_layouts_test.py",
    "transforms/_masking_test.py",
    "transforms/_monitoring_test.py",
    "tree_utils/_state_utils_test.py",
]


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


def run_optax(mode: str, args: list[str]) -> dict[str, Any]:
    """The same of optax's own tests, on eight devices, with no settings of pytest."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("PJRT_NPROC", "16")
    return run(_INSTALLED, mode, ["-c", os.devnull, "--rootdir", ".", *args])


def passed(found: dict[str, Any]) -> set[str]:
    """The tests that passed."""
    return {name for name, outcome in found["outcomes"].items() if outcome == "passed"}


def _row(tests: str, passes: Iterable[set[str]], calls: dict[str, int]) -> str:
    counts = " | ".join(str(len(x)) for x in passes)
    called = ", ".join(f"{name} {n}" for name, n in calls.items()) or "none"
    return f"| {tests} | {counts} | {called} |"


def main(argv: list[str]) -> int:
    """0 if what passes with optax passes with jgrad, too."""
    of_optax = argv[1:2] == ["--optax"]
    if len(argv) < 2 or (argv[1].startswith("-") and not of_optax):
        print(__doc__)
        return 2
    checkout, args = pathlib.Path(argv[1]), argv[2:]
    if not of_optax and not checkout.is_dir():
        print(f"studies.clients: PATH: {checkout} is no folder, expected a checkout.")
        return 2
    if of_optax:
        found = {mode: run_optax(mode, args or OPTAX) for mode in swap.MODES}
    else:
        found = {mode: run(checkout, mode, args) for mode in swap.MODES}
    print("| tests | optax passes | jgrad passes | with all wrappers | calls of jgrad |")
    print("| --- | --- | --- | --- | --- |")
    if of_optax:
        for file, calls in sorted(found["jgrad"]["calls of files"].items()):
            own = ({t for t in passed(x) if t.startswith(f"{file}::")} for x in found.values())
            if calls:
                print(_row(f"`{file}`", own, calls))
    else:
        tests = f"{checkout.name} `{' '.join(args)}`"
        print(_row(tests, map(passed, found.values()), found["jgrad"]["calls"]))
    lost = {mode: sorted(passed(found["optax"]) - passed(x)) for mode, x in found.items()}
    for mode, names in lost.items():
        for name in names:
            print(f"{mode} fails: {name}")
    return int(any(lost.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
