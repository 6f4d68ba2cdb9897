"""`colabs/processes.py`: what is said of processes that end together, and whose fault it was.

The processes are of Python alone: the whole is in `test_train_distributed.py`.
"""

import os
import signal

import jax
import pytest

import processes

KILLED = "import os, time; time.sleep(0.2); os.kill(os.getpid(), 9)"
RAISES = "import time; time.sleep(0.6); raise ValueError('UNKNOWN: Gloo AllGather failed')"
FATAL = (
    "F1124 10:49:12.587122   19809 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died"
)
ABORTED = f"""
import os, sys, time
time.sleep(0.6)
sys.stderr.write({FATAL!r} + chr(10) + '*** Check failure stack trace: ***' + chr(10))
sys.stderr.write('    @     0x7fbd3a240634  absl::SendToLog()' + chr(10))
sys.stderr.flush()
os.abort()
"""
LOST = "could not go on without the others"


@pytest.fixture
def ended(capfd):
    """How some programs ended, and what was written to stderr; signals are as before."""
    before = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}

    def ended(*programs):
        found = processes.run({i: ["-c", x] for i, x in enumerate(programs)}, dict(os.environ))
        return found, capfd.readouterr().err

    yield ended
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (RAISES, ": ValueError: UNKNOWN: Gloo AllGather failed"),
        (
            ABORTED,
            ": Terminating process because the JAX distributed service detected fatal errors",
        ),
        (f"raise SystemExit({processes._LOST})", ""),
    ],
    ids=["raises", "aborted", "recognized"],
)
def test_one_is_killed(ended, program, why):
    """The cause is said first, and of the other one line."""
    found, errors = ended(program, KILLED)
    assert errors == ""
    assert found.failed == ["process 1 was ended by SIGKILL.", f"process 0 {LOST}{why}."]
    assert found.lost


def test_one_of_another_machine_is_killed(ended):
    """C++ says it."""
    found, errors = ended(ABORTED)
    assert (errors, found.lost, len(found.failed)) == ("", True, 1)


def test_an_error_of_ones_own(ended):
    """Its traceback is shown, and not that it would go on; what is no traceback is passed on."""
    program = f"import sys; print('a warning', file=sys.stderr); {RAISES}"
    found, errors = ended(program, ABORTED.replace("sleep(0.6)", "sleep(0.9)"))
    assert errors.startswith("a warning\nTraceback (most recent call last):\n")
    assert errors.endswith("\nValueError: UNKNOWN: Gloo AllGather failed\n")
    assert found.failed[0] == "process 0 ended with status 1."
    assert found.failed[1].startswith(f"process 1 {LOST}: ")
    assert not found.lost


@pytest.mark.parametrize("asked", [True, False])
def test_done(ended, asked):
    program = f"raise SystemExit({processes.ASKED})" if asked else ""
    assert ended(program, program)[0] == processes.Ended([], asked=asked, lost=False)


def raised(error, cause):
    try:
        raise error from cause
    except type(error) as found:
        return found


GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:30116"


@pytest.mark.parametrize(
    ("error", "is_of_others"),
    [
        (ValueError(GLOO), True),
        (jax.errors.JaxRuntimeError(GLOO), True),
        (jax.errors.JaxRuntimeError("INTERNAL: what nobody knows"), True),
        (raised(RuntimeError("Failed to save."), ValueError(GLOO)), True),
        (ValueError("a shape that does not fit"), False),
        (OSError(28, "No space left on device"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 GB"), False),
        (AssertionError("parameters differ between processes"), False),
    ],
    ids=repr,
)
def test_errors_that_may_be_of_others(error, is_of_others, monkeypatch):
    """Whatever their type; of one process alone none is."""
    assert not processes._may_be_of_others(error)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert processes._may_be_of_others(error) == is_of_others
