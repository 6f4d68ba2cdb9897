"""Processes of one machine that train together, and end together when one of them is lost."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax

from tracebacks import Errors

ASKED = os.EX_TEMPFAIL  # exit status of a process that was asked to end before it was done
_LOST = 3  # of one that cannot go on without the others
_REFUSED = 4  # of one that was told not to begin
_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # as others send them
_GRACE = 10.0  # seconds in which the others end by themselves when one is lost

_PIPE = "PROCESSES_PIPE"  # names the end of a pipe, of which the starter has the other end
_SIGNS = ("Gloo", "oordination service", "DEADLINE_EXCEEDED", "UNAVAILABLE")  # of lost processes
_alone = threading.Event()


# ---- from outside --------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How the processes ended.

    Attributes:
      failed: what is to be said of each that failed.
      asked: whether they were asked to end before they were done.
      lost: whether the cause was that one was lost, here or on another machine.
    """

    failed: list[str]
    asked: bool
    lost: bool


def run(commands: Mapping[int, Sequence[str]], environment: Mapping[str, str]) -> Ended:
    """Runs Python with each command, a process for each number, until the last has ended.

    SIGTERM and SIGINT are handed on, as SIGTERM: JAX then finds a step at which all can save. Where
    this process itself is killed, those that it started end in the same way. Tracebacks of those
    that end because another one was lost are left out.
    """
    pipe, kept = os.pipe()
    environment = {**environment, _PIPE: str(pipe)}
    workers, errors = {}, {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, in the workers: they are asked
    for i, command in commands.items():
        workers[i] = subprocess.Popen(
            [sys.executable, *command], env=environment, pass_fds=[pipe], stderr=subprocess.PIPE
        )
        errors[i] = Errors(_stderr(workers[i]))
    os.close(pipe)

    def end(*_: Any) -> None:
        for worker in workers.values():
            worker.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    for i, worker in workers.items():
        print(f"process {i}: pid {worker.pid}", flush=True)
    late = _wait(workers)
    os.close(kept)
    for own in errors.values():
        own.wait()
    return _ended({i: x.returncode for i, x in workers.items()}, late, errors)


def _stderr(worker: subprocess.Popen[bytes]) -> IO[bytes]:
    assert worker.stderr is not None  # it was asked for
    return worker.stderr


def _wait(workers: Mapping[int, subprocess.Popen[bytes]]) -> set[int]:
    """Until all have ended; those that do not, soon after one has failed, are ended: these."""
    deadline, late = math.inf, set[int]()
    while running := [i for i, worker in workers.items() if worker.poll() is None]:
        time.sleep(0.05)
        if deadline == math.inf and any(worker.poll() for worker in workers.values()):
            deadline = time.monotonic() + _GRACE
        if time.monotonic() > deadline:
            late.update(running)
            for i in running:
                workers[i].kill()
    return late


def _ended(statuses: Mapping[int, int], late: set[int], errors: Mapping[int, Errors]) -> Ended:
    """What is to be said: of those that only followed another one, not their tracebacks."""
    killed = {i for i, status in statuses.items() if -status in _KILLS} - late
    followed = {i for i in statuses if statuses[i] == _LOST or errors[i].are_of_others()} | late
    if killed:
        followed |= {i for i in statuses if statuses[i] in (1, -signal.SIGABRT)}
    failed, crashed = [], False
    for i, status in sorted(statuses.items(), key=lambda pair: pair[0] in followed):
        if i in followed:
            why = errors[i].short()
            more = f": {why}" if why else ""
            failed.append(f"process {i} could not go on without the others{more}.")
            continue
        if i not in killed:
            errors[i].show()
        if status not in (0, ASKED):
            failed.append(f"process {i} {_reason(status)}.")
            crashed |= status > 0
    return Ended(failed, asked=ASKED in statuses.values(), lost=bool(failed) and not crashed)


def _reason(status: int) -> str:
    if status == _REFUSED:
        return "did not begin"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def environment(devices: int) -> dict[str, str]:
    """For that many virtual CPU devices in each process; for 0, as it is here.

    Collectives of virtual devices wait for each other where there are not twice as many threads,
    and a process that waits in vain is ended, by XLA sooner than by default where it can be told.
    """
    if devices == 0:
        return dict(os.environ)
    options = {"xla_force_host_platform_device_count": devices}
    if jax.__version_info__ >= (0, 10):  # XLA ends a process that is given options it does not have
        options["xla_cpu_collective_call_warn_stuck_timeout_seconds"] = 10
        options["xla_cpu_collective_call_terminate_timeout_seconds"] = 20
    given = os.environ.get("XLA_FLAGS", "")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(max(2 * devices, os.cpu_count() or 1)),
        "XLA_FLAGS": " ".join([given, *(f"--{name}={x}" for name, x in options.items())]).strip(),
    }


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# ---- from inside ---------------------------------------------------------------------------------


def to_the_end(train: Callable[[], bool], *, refused: type[Exception]) -> int:
    """Calls `train`, and ends this process if that fails, whatever the others do.

    By `os._exit`, since the usual end of JAX waits for the others. Where the process that has
    started this one by `run` is gone, it is as if SIGTERM had come.

    Args:
      train: the work; returns whether it was done, or asked to end before.
      refused: what it raises, on all processes, where it does not begin.

    Returns:
      The exit status of a process that did not fail.
    """
    if _PIPE in os.environ:
        threading.Thread(target=_end_with_the_starter, daemon=True).start()
    try:
        return 0 if train() else ASKED
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody reads it any more
            os._exit(_said(error, refused))
        os._exit(1)


def _said(error: BaseException, refused: type[Exception]) -> int:
    """The exit status for an error, which is printed."""
    if isinstance(error, refused):
        if jax.process_index() == 0:
            print(f"Not trained: {error}", flush=True)
        return _REFUSED
    if _may_be_of_others(error):
        line = next(iter(str(error).splitlines()), type(error).__name__)[:160]
        name = f"process {jax.process_index()}"
        print(f"{name}: a step failed, others may be gone: {line}", flush=True)
        return _LOST
    traceback.print_exception(error)
    sys.stderr.flush()
    return 1


def is_alone() -> bool:
    """Whether the process that has started this one is gone."""
    return _alone.is_set()


def _may_be_of_others(error: BaseException) -> bool:
    """Whether this process would have gone on if it had been alone.

    What of a collective failed is raised by JAX, or by what waits for its result as another type
    of exception: orbax gets a ValueError, and may raise another one from it.
    """
    own = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    if jax.process_count() == 1:
        return False
    if isinstance(error, jax.errors.JaxRuntimeError):
        return not str(error).startswith(own)
    if any(sign in str(error) for sign in _SIGNS):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and _may_be_of_others(before)


def _end_with_the_starter() -> None:
    """Waits for the end of a pipe to which nobody writes."""
    os.read(int(os.environ[_PIPE]), 1)
    _alone.set()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the starter has read it
    os.kill(os.getpid(), signal.SIGTERM)
