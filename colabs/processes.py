"""Processes of one machine that train together, and end together when one of them is lost."""

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
from typing import Any, NamedTuple

import jax

ASKED = os.EX_TEMPFAIL  # exit status of a process that was asked to end before it was done
_LOST = 3  # of one that cannot go on without the others
_REFUSED = 4  # of one that was told not to begin
_GRACE = 10.0  # seconds in which the others end by themselves when one is lost

_PIPE = "PROCESSES_PIPE"  # names the end of a pipe, of which the starter has the other end


# ---- from outside --------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How the processes ended.

    Attributes:
      failed: what is to be said of each that failed.
      asked: whether they were asked to end before they were done.
      lost: whether one was lost, and nothing else was wrong.
    """

    failed: list[str]
    asked: bool
    lost: bool


def run(commands: Mapping[int, Sequence[str]], environment: Mapping[str, str]) -> Ended:
    """Runs Python with each command, a process for each number, until the last has ended.

    SIGTERM and SIGINT are handed on, as SIGTERM: JAX then finds a step at which all can save. Where
    this process itself is killed, those that it started end in the same way.
    """
    pipe, kept = os.pipe()
    environment = {**environment, _PIPE: str(pipe)}
    workers = {}
    for i, command in commands.items():
        workers[i] = subprocess.Popen([sys.executable, *command], env=environment, pass_fds=[pipe])
        print(f"process {i}: pid {workers[i].pid}", flush=True)
    os.close(pipe)

    def end(*_: Any) -> None:
        for worker in workers.values():
            worker.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    _wait(list(workers.values()))
    os.close(kept)
    found = [(i, x.returncode) for i, x in workers.items() if x.returncode not in (0, ASKED)]
    found.sort(key=lambda pair: pair[1] == _LOST)  # first what was the cause
    return Ended(
        [f"process {i} {_reason(status)}." for i, status in found],
        asked=any(worker.returncode == ASKED for worker in workers.values()),
        lost=all(status < 0 or status == _LOST for _, status in found),
    )


def _wait(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; those that do not, soon after one has failed, are ended."""
    deadline = math.inf
    while any(worker.poll() is None for worker in workers):
        time.sleep(0.05)
        if deadline == math.inf and any(worker.poll() for worker in workers):
            deadline = time.monotonic() + _GRACE
        if time.monotonic() > deadline:
            for worker in workers:
                worker.kill()


def _reason(status: int) -> str:
    if status == _LOST:
        return "could not go on without the others"
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
    except refused as error:
        if jax.process_index() == 0:
            print(f"Not trained: {error}", flush=True)
        os._exit(_REFUSED)
    except BaseException as error:
        if _may_be_of_others(error):
            reason = str(error).splitlines()[0][:160]
            name = f"process {jax.process_index()}"
            print(f"{name}: a step failed, others may be gone: {reason}", flush=True)
            os._exit(_LOST)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _may_be_of_others(error: BaseException) -> bool:
    """Whether this process would have gone on if it had been alone."""
    own = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
    others = jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError)
    return others and not str(error).startswith(own)


def _end_with_the_starter() -> None:
    """Waits for the end of a pipe to which nobody writes."""
    os.read(int(os.environ[_PIPE]), 1)
    os.kill(os.getpid(), signal.SIGTERM)
