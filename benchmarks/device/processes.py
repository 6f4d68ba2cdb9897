"""Rows, each in a process of its own, within a time for all.

This process looks for no device: a TPU belongs to one process at a time, and on a GPU the first
takes most of the memory.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.progress import Progress

from benchmarks.device.rows import Measured, Row, Settings
from benchmarks.measure import Ratio

_GRACE = 60  # seconds after the time for all, when a row is ended


class Device(NamedTuple):
    """The first that JAX finds.

    Attributes:
      platform: JAX's name of it.
      title: its kind, and how many there are.
    """

    platform: str
    title: str


def device() -> Device:
    """As a process says that ends with that; what JAX has to say about others stands above."""
    code = (
        "import jax, json; found = jax.devices(); x = found[0]\n"
        "print(json.dumps([x.platform, x.device_kind, len(found)]))"
    )
    command = [sys.executable, "-c", code]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    platform, kind, count = json.loads(text.splitlines()[-1])
    return Device(platform, kind if count == 1 else f"{kind}, the first of {count}")


def all_measured(
    rows: Sequence[Row], seconds: float, settings: Settings
) -> dict[str, Measured | str]:
    """By name, what was measured, or why it was not; each row has its share of the time left."""
    found: dict[str, Measured | str] = {}
    end = time.time() + seconds
    # A program is compiled once for all processes.
    with tempfile.TemporaryDirectory() as cache, Progress() as progress:
        bar = progress.add_task("", total=len(rows))
        for done, row in enumerate(rows):
            progress.update(bar, description=row.name)
            left = end - time.time()
            if left > 0:
                until = time.time() + left / (len(rows) - done)
                own = settings._replace(until=until)
                found[row.name] = asked(row, own, cache=cache, limit=left + _GRACE)
            else:
                found[row.name] = "not begun, since the time was over; --seconds has more"
            progress.advance(bar)
    return found


def asked(row: Row, settings: Settings, *, cache: str, limit: float) -> Measured | str:
    """What the process of a row says, or why it says nothing.

    Args:
      row: what to measure.
      settings: for it.
      cache: a folder for compiled programs.
      limit: seconds after which the process is ended.
    """
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    given = json.dumps(settings._asdict())
    command = [sys.executable, "-m", "benchmarks.device.rows", row.name, given]
    try:
        done = subprocess.run(
            command, env=environment, timeout=limit, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit:.0f} s"
    if done.returncode:
        errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        return errors[-1][:200] if errors else f"exit status {done.returncode}"
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(**found | {"step": Ratio(*found["step"])})
