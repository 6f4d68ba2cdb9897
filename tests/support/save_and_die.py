"""Saves two steps, and a third in the midst of which the process is killed.

PYTHONPATH=colabs python -m tests.support.save_and_die FOLDER MOMENT KEEP
"""

import os
import pathlib
import signal
import sys
import threading

import jax.numpy as jnp

import checkpoints

SIZE = 2_000_000  # elements: saving them takes a while


def tree(step):
    """What is saved at a step."""
    return {"w": jnp.full((SIZE,), float(step)), "step": jnp.asarray(step)}


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def while_writing(folder):
    """As soon as orbax has begun to write files of the step."""

    def watch():
        while not any(x.is_file() for x in folder.glob("*tmp*/**/*")):
            pass
        die()

    threading.Thread(target=watch, daemon=True).start()


def before_the_manifest(folder):
    """All arrays are written."""
    checkpoints._digest = die


def in_the_manifest(folder):
    """Its text is written, under another name yet."""
    checkpoints.os.fsync = die


def while_removing(folder):
    """The oldest step loses its files when a newer one is there."""

    def remove_some(path, *_, **__):
        next(x for x in pathlib.Path(path).rglob("*") if x.is_file()).unlink()
        die()

    checkpoints.shutil.rmtree = remove_some


MOMENTS = {
    f.__name__: f for f in (while_writing, before_the_manifest, in_the_manifest, while_removing)
}

if __name__ == "__main__":
    folder, moment = pathlib.Path(sys.argv[1]), MOMENTS[sys.argv[2]]
    opened = checkpoints.Checkpoints(folder, keep=int(sys.argv[3]))
    opened.save(1, tree(1))
    opened.save(2, tree(2))
    moment(folder)
    opened.save(3, tree(3))
