"""A program of `colabs/` in a process of its own, with a time limit."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

COLABS = pathlib.Path(__file__).parents[3] / "colabs"
LIMIT = 240  # seconds for a run, of which most is its start


class Command:
    """A program that was started, and what it has printed so far, into a file of a folder.

    As a context manager it leaves no process.
    """

    def __init__(self, folder, script, *flags):
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        self.output = pathlib.Path(tempfile.mkstemp(dir=folder)[1])
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, COLABS / f"{script}.py", *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a group, as a terminal makes one
            )

    @property
    def text(self):
        return self.output.read_text()

    def last_line(self):
        return self.text.splitlines()[-1]

    def wait_until(self, condition):
        """Of its output or of its files."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def ended(self, limit=LIMIT):
        """The exit status."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"no end after {limit} s:\n{self.text}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()
