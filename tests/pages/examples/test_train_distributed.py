"""`colabs/train_distributed.py` on several processes, some of which are killed.

Every run has a time limit; what ends a run early is said by the messages that these tests read.
"""

import contextlib
import functools
import os
import pathlib
import random
import re
import signal
import tempfile
import time

import pytest

from tests.pages.examples.command import Command
from tests.pages.harm import data_file, flip_a_bit

pytestmark = pytest.mark.slow
OPTIONS = ["--steps=120", "--save_every=30", "--log_every=1", "--hidden=32"]
ONE = ["--processes=1", "--devices=2"]  # the same devices in one process
SURVIVORS = 15  # seconds in which all have ended when one was killed


class Run(Command):
    """The command with its processes, in a folder."""

    def __init__(self, folder, *options):
        flags = (*OPTIONS, f"--folder={folder}", *options)
        super().__init__(folder.parent, "train_distributed", *flags)

    def pid(self, process):
        return int(re.search(rf"process {process}: pid (\d+)", self.text)[1])

    def wait_for(self, text):
        """Until it has printed this."""
        self.wait_until(lambda: text in self.text)

    def steps(self):
        """Whose losses were printed."""
        return [int(x) for x in re.findall(r"step (\d+): ", self.text)]

    def kill(self):
        for pid in re.findall(r"process \d+: pid (\d+)", self.text):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        super().kill()

    def parameters(self):
        """The digest of the last parameters on each process."""
        assert self.ended() == 0, self.text
        return re.findall(r"process \d+: parameters (\w+)", self.text)

    def preempted(self):
        """As by SIGTERM: the step that was saved, or before which it ended."""
        self.process.send_signal(signal.SIGTERM)
        assert self.ended(SURVIVORS) == os.EX_TEMPFAIL, self.text
        return int(re.search(r"Asked to end: (?:saved|before) step (\d+)\.", self.text)[1])


@pytest.fixture
def start(tmp_path):
    """Starts the command; nothing of it is left after the test."""
    with contextlib.ExitStack() as stack:

        def start(*options):
            return stack.enter_context(Run(tmp_path / "saved", *options))

        yield start


def stopped(folder, step):
    """The last line of a run that is not done; of one that has saved nothing, without a step."""
    if step is None:
        return "Training stopped. Nothing was saved: the same command starts anew."
    saved = f"step {step}, saved in {folder / 'saved'}"
    return f"Training stopped. The same command goes on after {saved}."


@functools.cache
def uninterrupted(*options):
    """The parameters of one process with two devices, from start to end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(pathlib.Path(folder) / "saved", *ONE, *options) as run,
    ):
        (found,) = run.parameters()
        return found


def test_preemption(start, tmp_path):
    """On SIGTERM all processes save the same step; one process with two devices goes on from it."""
    run = start()
    run.wait_for("step 30:")
    step = run.preempted()
    assert run.last_line() == stopped(tmp_path, step)
    again = start(*ONE)
    assert again.parameters() == [uninterrupted()]
    # Without the end of the line: the other process may write into the middle of it.
    assert f"Going on after step {step}." in again.text


@pytest.mark.slow(exhaustive=True)
def test_twenty_kills(start, tmp_path):
    """At any moment, of a save above all: the last line says how to go on, and nobody's traceback.

    One process is killed, or the command is asked to end as by Ctrl-C in a terminal.
    """
    rng, expected = random.Random(28), None
    options = ("--steps=1000", "--save_every=5")
    for i in range(20):
        run = start(*options)
        run.wait_for("process 1: pid ")
        moment, victim = MOMENTS[i % 5], (0, 1, "command")[i % 3]
        moment(run, tmp_path / "saved", rng)
        if victim == "command":
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pid(victim), signal.SIGKILL)
        status = run.ended()
        told = f"{i}, {moment.__name__}, {victim}:\n{run.text}"
        assert status in ((1, os.EX_TEMPFAIL) if victim == "command" else (1,)), told
        if f"Going on after step {expected}." not in run.text:  # as the run before has said
            assert expected is None or not run.steps(), told
        saved = [int(x.name) for x in (tmp_path / "saved").glob("*") if x.name.isdigit()]
        expected = max(saved, default=None)
        assert run.last_line() == stopped(tmp_path, expected), told
        assert not re.search(r"^(Traceback|  File |    @ )", run.text, re.MULTILINE), told
    found = start("--steps=1000", "--save_every=1000").parameters()
    assert found == [uninterrupted("--steps=1000", "--save_every=1000")] * 2


def in_its_start(run, folder, rng):
    """Of the processes, of JAX or of the training."""
    end = time.monotonic() + 8 * rng.random()
    while time.monotonic() < end and not run.steps():
        time.sleep(0.01)


def after_some_steps(run, folder, rng):
    run.wait_for(": loss ")
    last = run.steps()[0] + rng.randrange(10)
    run.wait_until(lambda: run.steps()[-1] >= last)


def in_a_save(run, folder, rng):
    after_some_steps(run, folder, rng)
    run.wait_until(lambda: any("tmp" in x.name for x in folder.glob("*")))
    time.sleep(0.05 * rng.random())


MOMENTS = [in_a_save, in_its_start, in_a_save, after_some_steps, in_a_save]


def test_what_does_not_begin(start, tmp_path):
    """Training to another end than it was meant for, or from numbers that were altered."""
    start("--processes=1", "--steps=20").parameters()
    run = start("--processes=2")
    assert run.ended() == 1
    message = "Not trained: --steps: 120, expected 20, as until step 20, or another --folder.\n"
    assert run.text.count(message) == 1
    assert run.text.endswith("process 0 did not begin.\nprocess 1 did not begin.\n")
    file = data_file(tmp_path / "saved" / "20")
    flip_a_bit(file)
    run = start("--processes=1", "--steps=20")
    assert run.ended() == 1
    assert f"Not trained: {file}: altered or missing since step 20 was saved; " in run.text
    assert run.text.endswith("process 0 did not begin.\n")  # and not that it would go on


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--first_process=2", "expected at most 1: there are 2 processes"),
        ("--local_processes=3", "expected at most 2: there are 2 processes"),
        ("--local_processes=1", "expected host:port of process 0, which is not told"),
        ("--devices=0", "expected --local_processes=1: each takes all accelerators"),
        ("--batch=255", "expected a multiple of the 2 devices"),
    ],
)
def test_flags_that_do_not_fit(start, flags, message):
    run = start(flags)
    assert run.ended() != 0
    assert f", {message}" in run.text or f": {message}" in run.text
