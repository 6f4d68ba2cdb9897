"""A process is killed in the midst of a save: the last whole step is still there."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from checkpoints import Checkpoints
from tests import save_and_die
from tests.loops import assert_equal

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("moment", save_and_die.MOMENTS)
def test_kill(moment, tmp_path):
    folder = tmp_path / "saved"
    done = subprocess.run(
        [sys.executable, "-m", "tests.save_and_die", folder, moment],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'colabs'}"},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    opened = Checkpoints(folder, keep=2)
    assert opened.latest() == 2
    assert_equal(opened.restore(save_and_die.tree(0)), save_and_die.tree(2))
    opened.save(3, save_and_die.tree(3))  # and training goes on
    assert_equal(opened.restore(save_and_die.tree(0)), save_and_die.tree(3))
    opened.close()
    assert {x.name for x in folder.iterdir()} == {"2", "2.json", "3", "3.json"}
