"""Trains for long, with kills at random moments, and saves and restores for long.

    python -m studies.endurance

runs `colabs/train_distributed.py` on 8 virtual CPU devices, once undisturbed and once with a `kill
-9` at random moments after which it is started again, and compares the last parameters, bit by bit.
Reads the memory of the undisturbed process as it goes. Then saves and restores in a loop. About
twenty minutes on two cores. Needs the extra "distributed".
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from absl import app, flags, logging

_STEPS = flags.DEFINE_integer("steps", 10_000, "Steps to train.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "Steps between checkpoints.")
_KILLS = flags.DEFINE_integer("kills", 10, "How often training is killed.")
_ROUNDS = flags.DEFINE_integer("rounds", 100, "Saves and restores in a loop.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")

_COLABS = pathlib.Path(__file__).parents[1] / "colabs"
_DEVICES = 8


class Training(NamedTuple):
    """What one training came to.

    Attributes:
      parameters: digest of the last ones.
      starts: how often it was started.
      resident: bytes of memory of the process at each step; of a training that is not killed.
      seconds: from the first start to the end.
    """

    parameters: str
    starts: int
    resident: dict[int, int]
    seconds: float


def train(steps: int, save_every: int, kills: int, seed: int) -> Training:
    """Trains in a new folder, killed at that many moments that differ with the seed."""
    rng = random.Random(seed)
    # Each after another checkpoint than the one before, so that each start has come further.
    ends = sorted(rng.sample(range(save_every, steps, save_every), kills))
    ends = [end + rng.randrange(save_every) for end in ends]
    resident: dict[int, int] = {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for starts, end in enumerate([*ends, None], 1):
            for line, pid in _lines(folder, steps, save_every):
                if found := re.match(r"step (\d+):", line):
                    step = int(found[1])
                    if not kills:
                        resident[step] = _resident(pid)
                    if end is not None and step >= end:
                        time.sleep(rng.random() * 0.2)  # also in the midst of a save
                        with contextlib.suppress(ProcessLookupError):  # it has come to its end
                            os.kill(pid, signal.SIGKILL)
                        break
                if found := re.match(r"process 0: parameters (\w+)", line):
                    return Training(found[1], starts, resident, time.perf_counter() - begun)
    raise RuntimeError("training did not come to its end")


def _lines(folder: str, steps: int, save_every: int) -> Iterator[tuple[str, int]]:
    """What the command prints, with the process that trains."""
    command = [
        *(sys.executable, _COLABS / "train_distributed.py", "--processes=1"),
        *(f"--devices={_DEVICES}", f"--folder={folder}", f"--steps={steps}"),
        *(f"--save_every={save_every}", "--log_every=1", "--hidden=64"),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        pid = 0
        for line in run.stdout:
            if found := re.match(r"process 0: pid (\d+)", line):
                pid = int(found[1])
            yield line, pid


def _resident(pid: int) -> int:
    """Bytes of memory that a process has at this moment."""
    pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def save_and_restore(rounds: int) -> list[int]:
    """Saves and restores a model of some megabytes; the bytes of this process after each round."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jgrad
    from checkpoints import Checkpoints

    keys = jax.random.split(jax.random.key(0), 10)
    params: Any = jgrad.pack({str(i): jax.random.normal(k, (300, 300)) for i, k in enumerate(keys)})
    state = jgrad.adam(0.1).init(params)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        for i in range(rounds):
            params, state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), (params, state))
            params, state = jgrad.pack(jgrad.unpack((params, state)), like=(params, state))
            checkpoints.save(i, (params, state))
            restored = checkpoints.restore((params, state))
            for x, y in zip(
                jax.tree.leaves(restored), jax.tree.leaves((params, state)), strict=True
            ):
                np.testing.assert_array_equal(x, y)
            params, state = restored
            found.append(_resident(os.getpid()))
        checkpoints.close()
    return found


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax tells of every step
    steps, save_every = _STEPS.value, _SAVE_EVERY.value
    whole = train(steps, save_every, 0, _SEED.value)
    early = min(1000, steps // 10)
    first, last = (whole.resident[step] / 2**20 for step in (early, steps))
    print(
        f"undisturbed: {steps} steps in {whole.seconds:.0f} s, parameters {whole.parameters[:16]}"
    )
    print(f"memory: {first:.1f} MiB at step {early}, {last:.1f} MiB at the end")
    killed = train(steps, save_every, _KILLS.value, _SEED.value)
    print(f"killed {killed.starts - 1} times: {killed.seconds:.0f} s, {killed.parameters[:16]}")
    rounds = save_and_restore(_ROUNDS.value)
    tenth, end = (rounds[i] / 2**20 for i in (len(rounds) // 10, -1))
    print(f"{len(rounds)} saves and restores: {tenth:.1f} MiB after a tenth, {end:.1f} at the end")
    lost = whole.parameters != killed.parameters
    grown = last > 1.05 * first
    print("LOST" if lost else "Nothing lost.", "GROWN" if grown else "No growth of memory.")
    return int(lost or grown)


if __name__ == "__main__":
    app.run(main)
