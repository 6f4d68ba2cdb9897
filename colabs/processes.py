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
from typing import Any

import jax

_GRACE = 10.0  # seconds in which the others end by themselves when one is lost
_LOST = 3  # exit status of a process that cannot go on without the others
_REFUSED = 4  # of one that was told not to begin


# ---- from outside --------------------------------------------------------------------------------


def run(commands: Mapping[int, Sequence[str]], environment: Mapping[str, str]) -> list[str]:
    """Runs Python with each command, a process for each number, until the last has ended.

    SIGTERM and SIGINT are handed on, as SIGTERM: JAX then finds a step at which all can save. Where
    this process itself is killed, those that it started end in the same way.

    Returns:
      What is to be said of those that failed, a line for each.
    """
    workers = {}
    for i, command in commands.items():
        workers[i] = subprocess.Popen(
            [sys.executable, *command], env=environment, stdin=subprocess.PIPE
        )
        print(f"process {i}: pid {workers[i].pid}", flush=True)

    def end(*_: Any) -> None:
        for worker in workers.values():
            worker.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    _wait(list(workers.values()))
    failed = [(i, worker.returncode) for i, worker in workers.items() if worker.returncode]
    failed.sort(key=lambda pair: pair[1] == _LOST)  # first what was the cause
    return [f"process {i} {_reason(status)}." for i, status in failed]


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
    and a process that waits in vain is ended.
    """
    if devices == 0:
        return dict(os.environ)
    options = {
        "xla_force_host_platform_device_count": devices,
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": 10,
        "xla_cpu_collective_call_terminate_timeout_seconds": 20,
    }
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


def to_the_end(process: int, train: Callable[[], None], *, refused: type[Exception]) -> None:
    """Calls `train`, and ends this process if that fails, whatever the others do.

    By `os._exit`, since the usual end of JAX waits for the others. Where the process that has
    started this one is gone, it is as if SIGTERM had come.

    Args:
      process: the number of this process.
      train: the work.
      refused: what it raises, on all processes, where it does not begin.
    """
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    try:
        train()
    except refused as error:
        if process == 0:
            print(f"Not trained: {error}", flush=True)
        os._exit(_REFUSED)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:160]
        print(f"process {process}: a step failed, others may be gone: {reason}", flush=True)
        os._exit(_LOST)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _end_with_the_starter() -> None:
    """Waits for the end of a pipe of which the starter has the other end, and never writes."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
