"""Runs `tests/multi_device/`, each file in a process with eight virtual CPU devices.

A process of its own, since XLA counts devices once. Twice as many threads as devices, and time-outs for
collectives that wait for each other: on two cores eight virtual devices can otherwise lock up.
"""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "multi_device"
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=10",
    "--xla_cpu_collective_call_terminate_timeout_seconds=60",
]


@pytest.mark.parametrize("file", sorted(f.name for f in FOLDER.glob("test_*.py")))
def test_file(file):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(FLAGS),
        "PJRT_NPROC": "16",
        "JGRAD_MULTI_DEVICE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        FOLDER / file,
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, cwd=FOLDER.parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
