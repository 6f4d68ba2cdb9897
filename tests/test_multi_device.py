"""Runs `tests/multi_device/`, each file in a process with eight virtual CPU devices.

A process of its own, since XLA counts devices once. Twice as many threads as devices: on two cores
the collectives of eight virtual devices can otherwise wait for each other, which XLA ends after 40
seconds by killing the process.

Other flags of XLA and an expression after `-m` are handed on.
"""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "multi_device"
MARKED = ("test_zero.py",)  # with tests that are marked `bits`


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(f.name, marks=[pytest.mark.bits] if f.name in MARKED else [])
        for f in sorted(FOLDER.glob("test_*.py"))
    ],
)
def test_file(file, request):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "PJRT_NPROC": "16",
        "JGRAD_MULTI_DEVICE": "1",
    }
    options = ["-q", "-n0", "-pno:cacheprovider", "-m", request.config.getoption("markexpr")]
    command = [sys.executable, "-m", "pytest", *options, FOLDER / file]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, cwd=FOLDER.parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
