"""What the default tests cost, in CPU seconds: of each folder, of the dearest tests, in all.

    python -m tests.cost                 # README's second command, with an empty cache of programs
    python -m tests.cost tests/packed    # arguments are pytest's; the budget is not held
    pytest -p tests.cost --budget        # as a plugin, as CI runs README's command

CPU seconds and not minutes, because they are about the same beside other work: those of XLA's
threads and of processes that tests start count, waiting does not.
"""

import collections
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import pytest

BUDGET = 460  # two cores have 480 in four minutes
SLACK = 1.5  # equal tests differ by a third in CPU seconds between quiet and busy machines
DEAREST = 20


def pytest_addoption(parser):
    help = f"With -p tests.cost: fail if the run takes more than {SLACK} x {BUDGET} CPU seconds."
    parser.addoption("--budget", action="store_true", help=help)


def pytest_configure(config):
    config.pluginmanager.register(Cost(config))


def _seconds() -> float:
    """Of this process, and of those that it started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Cost:
    """Counts in each process that runs tests; the one that collects reports adds and prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.of_tests: dict[str, float] = {}
        self.of_workers: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        start = _seconds()
        try:
            return (yield)
        finally:
            self.of_tests[item.nodeid] = _seconds() - start

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        """xdist's hook, at the end of a worker."""
        output = getattr(node, "workeroutput", {})
        self.of_tests.update(output.get("cost_of_tests", {}))
        self.of_workers.append(output.get("cost", 0.0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output.update(cost_of_tests=self.of_tests, cost=_seconds())
        elif self.config.getoption("--budget") and self.total() > SLACK * BUDGET:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def total(self) -> float:
        # Workers are children of this process, which may have waited for some of them already.
        own = time.process_time() if self.of_workers else _seconds()
        return sum(self.of_workers) + own

    def pytest_terminal_summary(self, terminalreporter):
        for line in table(self.of_tests, self.total()):
            terminalreporter.write_line(line)
        if self.config.getoption("--budget"):
            terminalreporter.write_line(
                f"The budget is {BUDGET} CPU seconds; a failure from {SLACK} times that on."
            )


def table(of_tests: dict[str, float], total: float) -> list[str]:
    """The lines that are printed."""
    folders: dict[str, list[float]] = collections.defaultdict(list)
    for test, seconds in of_tests.items():
        folders[str(pathlib.PurePath(test.partition("::")[0]).parent)].append(seconds)
    lines = ["", "CPU seconds   tests   folder"]
    for folder, each in sorted(folders.items(), key=lambda x: -sum(x[1])):
        lines.append(f"{sum(each):11.1f}{len(each):8}   {folder}")
    lines.append(f"{total - sum(of_tests.values()):11.1f}           imports and collection")
    lines.append(f"{total:11.1f}{len(of_tests):8}   in all")
    dearest = sorted(of_tests.items(), key=lambda x: -x[1])[:DEAREST]
    lines += ["", f"CPU seconds   the {len(dearest)} dearest tests"]
    return [*lines, *(f"{seconds:11.1f}   {test}" for test, seconds in dearest), ""]


def main(arguments: list[str]) -> int:
    """Runs pytest; its status, which is 1 above the budget, too."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.cost", *(arguments or ["--budget"])]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
