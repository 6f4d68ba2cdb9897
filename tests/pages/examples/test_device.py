"""`python -m benchmarks.device`, on a CPU: every row on small arrays, and what it says without a device."""

import os
import re
import subprocess
import sys

import jax
import pytest

from benchmarks.accelerators.train_steps import FORMS, ON_HOSTS
from benchmarks.device import rows
from benchmarks.device.rows import ROWS, TRAIN, WORKS, Settings
from benchmarks.methods import METHODS
from tests.support import pages


def command(*flags):
    """With what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.device", *flags],
        cwd=pages.ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def cells_of(text):
    """By work, recipe and form."""
    found = {}
    for part in text.split("\n### ")[1:]:
        (work,) = (name for name, title in WORKS.items() if title == part.partition("\n")[0])
        found |= {(work, *row[:2]): row[2:] for row in pages.rows(part)}
    return found


# ---- the command -------------------------------------------------------------------------------


def test_without_a_device(tmp_path):
    """One sentence that says what to do, and no table."""
    file = tmp_path / "device.md"
    done = command("--small", "--only=many: AdamW, packed", f"--output={file}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "JAX finds no GPU or TPU here, so there is nothing to time: install JAX for your device "
        "(https://docs.jax.dev/en/latest/installation.html) and run this again, or try it out on a CPU "
        "by --any_device --small.\n"
    )
    assert not file.exists()


@pytest.mark.parametrize(
    "only",
    [
        "train step: AdamW,",
        pytest.param("", marks=pytest.mark.slow(exhaustive=True)),  # three minutes
    ],
    ids=["two", "all"],
)
def test_rows(tmp_path, only):
    """Each has figures; the device keeps no statistics."""
    file = tmp_path / "device.md"
    done = command("--any_device", "--small", "--rounds=2", f"--only={only}", f"--output={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    text = file.read_text()
    assert text.startswith("# jgrad on cpu\n")
    assert "its figures mean nothing" in text
    assert "was not measured" not in text
    found = cells_of(text)
    chosen = [row for name, row in ROWS.items() if only in name]
    assert list(found) == [(row.work, row.recipe, row.form) for row in chosen]
    for row in chosen:
        peer, ms, step, quartiles, least, moved, share, kernels, peak, counted = found[row[:3]]
        number = r"[\d.]+"
        assert re.fullmatch(f"{number} / {number}" if row.peer else number, ms)
        assert peer == row.beside
        assert re.fullmatch(number if row.peer else "-", step)
        assert re.fullmatch(f"{number} to {number}" if row.peer else "-", quartiles)
        assert re.fullmatch("-" if row.work == TRAIN else number, least)
        assert re.fullmatch("-" if row.work == TRAIN else r"\d+%( / \d+%)?", share)
        assert float(moved) > 10
        assert int(kernels) > 1
        assert peak == "-"
        assert float(counted) > 8


def test_only_of_no_row():
    done = command("--only=Lion")
    assert done.returncode == 1
    assert "--only=Lion: no such row" in done.stdout + done.stderr


# ---- a row -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "count"), [*zip(ON_HOSTS, (0, 4, 6), strict=True)])
def test_what_a_row_has_in_host_memory(recipe, count):
    """Both moments of both stacks, and the stacks themselves, before a step and behind it."""
    task = rows.task(TRAIN, recipe, FORMS[1], Settings(small=True))
    program = jax.make_jaxpr(task.step)(task.carry, task.inputs)
    for types in (program.in_avals, program.out_avals):
        assert sum(x.memory_space == jax.memory.Space.Host for x in types) == count


@pytest.mark.parametrize(
    ("recipe", "form", "expected"),
    [
        ("AdamW", "tree", METHODS["Adam"].floor),
        ("AdamW", "packed", METHODS["Adam"].floor),
        ("LARS", "tree", METHODS["LARS"].floor),
        ("LAMB", "packed", METHODS["LAMB"].floor),
        ("skip(clip + AdamW)", "tree", 32),
        # Codes take a byte, and four of a scale 256 elements.
        ("AdamW, 8 bits", "tree", 12 + 4 * (1 + 4 / 256)),
        ("bf16: stochastic(AdamW, 8 bits)", "tree", 6 + 4 * (1 + 4 / 256)),
    ],
)
def test_bytes_that_a_step_must_move(recipe, form, expected):
    """Those of the method, whose parameters and gradients are arguments, too."""
    row = ROWS[f"medium: {recipe}, {form}"]
    task = rows.task(row.work, row.recipe, row.form, Settings())
    size = sum(x.size for x in jax.tree.leaves(task.params))
    assert size == 24 * 2048 * 1024
    # Counters are more.
    assert rows.least_bytes(task, row.again) / size == pytest.approx(expected, abs=1e-5)
