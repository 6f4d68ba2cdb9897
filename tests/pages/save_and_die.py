"""Saves two steps, and a third in the midst of which the process is killed.

PYTHONPATH=colabs python -m tests.pages.save_and_die FOLDER MOMENT KEEP
"""

import os
import pathlib
import signal
import sys
import threading

import jax.numpy as jnp

import checkpoints
import manifest

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
    manifest.write = die


def after_the_manifest(folder):
    """It is written, and the step not committed."""
    write = manifest.write

    def write_and_die(*args, **kwargs):
        write(*args, **kwargs)
        die()

    manifest.write = write_and_die


def while_removing(folder):
    """The oldest step has lost a file, and the newest one is there."""
    unlink = os.unlink

    def remove_one(*args, **kwargs):
        unlink(*args, **kwargs)
        if (folder / "3").exists():
            die()

    os.unlink = remove_one


MOMENTS = {
    f.__name__: f for f in (while_writing, before_the_manifest, after_the_manifest, while_removing)
}

if __name__ == "__main__":
    folder, moment = pathlib.Path(sys.argv[1]), MOMENTS[sys.argv[2]]
    opened = checkpoints.Checkpoints(folder, keep=int(sys.argv[3]))
    opened.save(1, tree(1))
    opened.save(2, tree(2))
    moment(folder)
    opened.save(3, tree(3))
