"""A process is killed during a save: the last complete step can still be restored."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from checkpoints import Checkpoints
from tests.pages import save_and_die
from tests.support.loops import assert_equal

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("moment", save_and_die.MOMENTS)
def test_kill(moment, keep, tmp_path):
    folder = tmp_path / "saved"
    done = subprocess.run(
        [sys.executable, "-m", "tests.pages.save_and_die", folder, moment, str(keep)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'colabs'}"},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    opened = Checkpoints(folder, keep=keep)
    last = 3 if moment == "while_removing" else 2  # old steps are removed when a new one is whole
    assert opened.latest() == last
    assert_equal(opened.restore(save_and_die.tree(0)), save_and_die.tree(last))
    opened.save(4, save_and_die.tree(4))  # and training goes on
    assert_equal(opened.restore(save_and_die.tree(0)), save_and_die.tree(4))
    opened.close()
    left = [last, 4][-keep:]
    assert {x.name for x in folder.iterdir()} == {str(i) for i in left}
