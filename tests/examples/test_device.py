"""`python -m benchmarks.device`, on a CPU: every row on small arrays, and what it says without a device."""

import math
import os
import re
import subprocess
import sys
import time
import types

import jax
import pytest

from benchmarks.device import processes, rows, table
from benchmarks.device.rows import ROWS, TRAIN, WORKS, Measured, Settings
from benchmarks.measure import Ratio, in_turn
from benchmarks.methods import METHODS
from benchmarks.programs import Program
from tests.support import pages

SMALL = Settings(rounds=2, small=True)
FOUND = Measured(
    size=100,
    step=Ratio(0.002, 0.004, 0.5, 0.25, 0.75),
    copy=1e9,
    share=0.4,
    least=2800,
    moved=3000,
    kernels=7,
    peak=1600,
    counted=1650,
)


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


def test_the_peak_is_that_of_the_row(monkeypatch, standard_promotion):
    """Read when the row's program is compiled and has run, and before anything else is there."""
    events = []

    def noted(name, f):
        def call(*args):
            events.append(name)
            return f(*args)

        return call

    def memory_stats():
        events.append("peak")
        return {"peak_bytes_in_use": 1000 * events.count("build")}

    device = types.SimpleNamespace(memory_stats=memory_stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(Program, "build", noted("build", Program.build))
    monkeypatch.setattr(Program, "__call__", noted("step", Program.__call__))
    monkeypatch.setattr(rows, "_numbers", noted("arrays", rows._numbers))
    row = rows.Row("medium", "AdamW", "packed", ("AdamW", "optax"))
    found = rows.measured(row, SMALL)
    assert found.peak == 1000
    before, after = events[: events.index("peak")], events[events.index("peak") + 1 :]
    assert before == ["build", "arrays", "arrays", "step", "step", "step"]
    # Of the copy, and of the peer.
    assert after[:4] == ["build", "build", "arrays", "arrays"]


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


def test_peers_are_in_the_same_work():
    for row in ROWS.values():
        if row.peer:
            task = rows.task(row.work, *row.peer, SMALL)
            own = rows.task(row.work, row.recipe, row.form, SMALL)
            sizes = [sum(x.size for x in jax.tree.leaves(y.params)) for y in (own, task)]
            assert sizes[0] == sizes[1], row.name


# ---- processes and time ------------------------------------------------------------------------


def test_a_row_that_fails(tmp_path):
    """Its reason stands in its place, and other rows go on."""
    row = rows.Row("medium", "Lion", "tree", None)
    reason = processes.asked(row, SMALL, cache=str(tmp_path), limit=100)
    assert reason == "KeyError: 'medium: Lion, tree'"
    reason = processes.asked(ROWS["medium: AdamW, tree"], SMALL, cache=str(tmp_path), limit=0.01)
    assert reason == "no end within 0 s"


def test_rows_share_the_time(monkeypatch):
    """What one leaves is for the next; the limit is the time for all, and a minute."""
    given = []

    def asked(row, settings, *, cache, limit):
        given.append((settings.until - time.time(), limit))
        return FOUND

    monkeypatch.setattr(processes, "asked", asked)
    chosen = list(ROWS.values())[:4]
    found = processes.all_measured(chosen, 100, SMALL)
    assert found == {row.name: FOUND for row in chosen}
    shares, limits = zip(*given, strict=True)
    assert shares == pytest.approx([25, 100 / 3, 50, 100], abs=2)
    assert limits == pytest.approx([160] * 4, abs=2)


def test_no_row_begins_when_the_time_is_over(monkeypatch):
    """The table has the others, and says why one is missing."""
    first, second = list(ROWS.values())[:2]
    monkeypatch.setattr(processes, "asked", lambda *_, **__: time.sleep(0.3) or FOUND)
    found = processes.all_measured([first, second], 0.2, SMALL)
    assert found[first.name] == FOUND
    text = table.section([first, second], found).markdown("")
    reason = "not begun, since the time was over; --seconds has more"
    assert f"- **{second.name}** was not measured: {reason}\n" in text
    assert cells_of(text) == {
        first[:3]: [
            *("optax", "2 / 4", "0.50", "0.25 to 0.75"),
            *("28.0", "30.0", "40% / 20%", "7", "16.00", "16.50"),
        ],
        second[:3]: ["optax", *["-"] * 9],
    }


@pytest.mark.parametrize(("until", "expected"), [(0, 3), (math.inf, 5)])
def test_rounds_end_with_the_time(until, expected):
    """Three are for a median."""
    found = in_turn({"a": lambda: None, "b": lambda: None}, 5, until=until)
    assert {name: len(times) for name, times in found.items()} == {"a": expected, "b": expected}
