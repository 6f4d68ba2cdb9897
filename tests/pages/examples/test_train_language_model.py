"""`colabs/train_language_model.py`: what it trains, what it refuses, and that a killed run goes on.

Most tests train in this process. Each program takes seconds to compile, so few do by default.
"""

import contextlib
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bits
import jgrad
import language_training
import recipes
import text
import watched
from checkpoints import CheckpointError, Checkpoints
from language_training import Settings, SettingsError
from tests.pages.examples.command import Command
from tests.support.eight_bits import unquantized
from tests.support.loops import assert_equal
from tests.support.private import forced

TINY = Settings(
    layers=2,
    width=32,
    heads=2,
    length=16,
    batch=4,
    steps=4,
    warmup=1,
    accumulate=2,
    ema=0.9,
    skip=True,
)
PLAIN = TINY._replace(accumulate=1, ema=0.0)
LAYOUTS = {
    "tree": {},
    "packed": {"packed": True},
    "jit": {"devices": 2},
    "zero": {"devices": 2, "zero": True},
}
STORED = "8bit_bf16_stochastic"  # the recipe with most in its state


@pytest.fixture(autouse=True)
def dtypes(standard_promotion):
    """Schedules of optax divide integers by floats, which strict dtypes forbid."""


@functools.cache
def split():
    """The texts, read once."""
    return text.load()


def train(settings, texts=None, **options):
    return language_training.train(settings, texts or split(), **options)


class Stop(Exception):
    """Raised after a step in the place of a kill."""


def stopped(settings, folder, after):
    """A run that saves a checkpoint after a step, and is stopped there."""

    def on_step(done, loss, seconds):
        if done == after:
            raise Stop

    with pytest.raises(Stop):
        continued(settings, folder, save_every=after, on_step=on_step)


def continued(settings, folder, **options):
    """A run that goes on after the last checkpoint in a folder."""
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        return train(settings, checkpoints=checkpoints, **options)


def assert_refused(kind, message, run, *args, **options):
    with pytest.raises(kind, match=re.escape(message)):
        run(*args, **options)


# ---- training ------------------------------------------------------------------------------------


def combinations():
    """All but those in which Muon's matrices would be packed; `test_settings_that_do_not_fit` has their error."""
    found = itertools.product(recipes.OPTIMIZERS, LAYOUTS, recipes.RECIPES)
    return [x for x in found if x[0] != "muon" or x[1] in ("tree", "jit")]


@pytest.mark.parametrize(("optimizer", "layout", "recipe"), combinations())
@pytest.mark.slow
def test_every_combination(optimizer, layout, recipe):
    """Two updates lower the loss of the averaged parameters, with clipping, skipping and windows."""
    settings = TINY._replace(optimizer=optimizer, recipe=recipe, **LAYOUTS[layout])
    run = train(settings)
    params, state = language_training.program(settings.checked()).start()
    before = language_training.measured(params, state, settings, split().validation)
    ((done, after),) = run.history.validation
    assert done == len(run.history.training) == settings.steps
    assert after < before - 1e-3
    assert run.state.skipped == 0


@pytest.fixture
def in_the_backward_pass(monkeypatch):
    """Calls of `step_in_backward`, which on a CPU takes the ordinary step otherwise."""
    calls, step_in_backward = [], jgrad.step_in_backward

    def recorded(*args, **options):
        calls.append(options)
        return step_in_backward(*args, **options)

    monkeypatch.setattr(jgrad, "step_in_backward", recorded)
    with forced():
        yield calls


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "changed",
    [{"recipe": "8bit", "clip": 0.0, "skip": False}, {"clip": 1.0, "skip": True}],
    ids=["8bit", "clip"],
)
def test_a_step_in_the_backward_pass(changed, in_the_backward_pass):
    """The losses of the ordinary step; a norm of all gradients is added in another order."""
    settings = PLAIN._replace(layers=3, **changed)
    expected = train(settings)
    assert not in_the_backward_pass
    found = train(settings._replace(step_in_backward=True))
    assert in_the_backward_pass == [{"first_pass": True}]
    losses = (run.history.training for run in (found, expected))
    np.testing.assert_allclose(*losses, rtol=4 * np.finfo(np.float32).eps)


# ---- killed, and resumed -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "recipe", "layout"),
    [
        ("adamw", STORED, "tree"),
        ("adamw", STORED, "zero"),
        ("lamb", "bf16_master", "packed"),
        ("muon", "8bit", "jit"),
    ],
)
def test_a_run_goes_on_to_the_same_bits(optimizer, recipe, layout, tmp_path):
    """Saved in the midst of a window of `accumulate`, after the first update."""
    settings = TINY._replace(optimizer=optimizer, recipe=recipe, **LAYOUTS[layout])
    expected, begun = train(settings), []
    stopped(settings, tmp_path, after=3)
    options = {"on_start": lambda done, _: begun.append(done)}
    found = continued(settings, tmp_path, **options)
    again = continued(settings, tmp_path, **options)  # there is nothing left to do
    assert begun == [3, 4]
    assert_equal((found.params, found.state), (expected.params, expected.state))
    # A small leaf of a packed tree was float32 in the file: the same numbers, maybe by other scales.
    numbers = [unquantized((run.params, run.state)) for run in (again, expected)]
    assert_equal(*numbers)
    assert found.history == again.history == expected.history
    assert expected.history.validation[-1][1] < expected.history.training[0] - 1e-3


@pytest.mark.slow
def test_a_killed_process(tmp_path):
    """The command, killed in the midst of its steps, and given again; the last line says so."""
    settings = TINY._replace(recipe=STORED, steps=300)
    flags = [f"--{name}={value}" for name, value in settings._asdict().items() if value is not None]
    flags += ["--save_every=20", "--sample=40", "--plot="]

    def run(folder, *, killed=False):
        where = f"--checkpoint_folder={tmp_path / folder}"
        with Command(tmp_path, "train_language_model", *flags, where) as command:
            if killed:
                return command.wait_until((tmp_path / folder / "40").exists)
            assert command.ended() == 0, command.text
            return command.text.splitlines()

    run("killed", killed=True)
    lines = {folder: run(folder) for folder in ("whole", "killed")}
    like = language_training.program(settings.checked()).start()
    for folder, printed in lines.items():
        assert any("Going on after step" in x for x in printed) == (folder == "killed")
        with contextlib.closing(Checkpoints(tmp_path / folder)) as checkpoints:
            params, _ = checkpoints.restore(like, settings.steps)
        assert printed[-1] == f"parameters {bits.digest(params)}"
    assert lines["killed"][-1] == lines["whole"][-1]


# ---- under control -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "recipe", "layout"),
    [("muon", STORED, "tree"), ("lamb", "bf16_master", "zero"), ("momentum", "float32", "jit")],
)
def test_goes_on_as_another_run(optimizer, recipe, layout, tmp_path):
    """Other moments, dtypes, wrappers and devices; the step is kept, and what is lost is said."""
    stopped(TINY, tmp_path, after=2)
    settings = TINY._replace(
        optimizer=optimizer, recipe=recipe, skip=False, ema=0.0, watch=1, **LAYOUTS[layout]
    )
    accounts = []
    options = {"resume_as": True, "on_other_settings": lambda *told: accounts.append(told)}
    run = continued(settings, tmp_path, **options)
    ((done, account),) = accounts
    assert done == 2
    assert "step" in account.kept
    assert any(name.startswith("average_params") for name in account.dropped)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(run.params)}
    assert dtypes == {"float32" if recipe == "float32" else "bfloat16"}
    states = jax.tree.leaves(run.state, is_leaf=lambda x: isinstance(x, jgrad.OptState))
    assert [int(x.step) for x in states if isinstance(x, jgrad.OptState)] == [2]
    assert len(run.history.training) == 4
    assert np.isfinite(run.history.training).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_watch(layout, tmp_path):
    """The ratio of each layer, by NumPy from parameters before and after a step; table and plot."""
    settings = PLAIN._replace(skip=False, steps=1, warmup=0, watch=1, **LAYOUTS[layout]).checked()
    before = jax.device_get(jgrad.unpack(language_training.program(settings).start()[0]))
    table = watched.Watched()
    after = jax.device_get(jgrad.unpack(train(settings, on_report=table.add).params))
    assert len(table.rows) == 2 + 2 * len(before["layers"])  # two layers, embedding and norm
    for row in table.rows:
        keys = row.leaf.split("/")
        w, new = (functools.reduce(lambda x, key: x[key], keys, tree) for tree in (before, after))
        w, new = (np.asarray(x[row.layer] if len(keys) > 1 else x, float) for x in (w, new))
        ratio = np.linalg.norm(new - w) / np.linalg.norm(w)
        np.testing.assert_allclose(row.update_ratio, ratio, rtol=1e-3)
        np.testing.assert_allclose(row.param_norm, np.linalg.norm(w), rtol=1e-5)
        assert row.grad_norm > 0
    table.write(tmp_path / "watch.csv")
    lines = (tmp_path / "watch.csv").read_text().splitlines()
    assert lines[0] == "step,leaf,layer,grad_norm,update_norm,param_norm,update_ratio"
    assert len(lines) == 1 + len(table.rows)
    if importlib.util.find_spec("matplotlib"):  # of the extra "demo"
        table.plot(tmp_path / "watch.png")
        assert (tmp_path / "watch.png").stat().st_size > 10_000


@pytest.mark.slow
def test_which_calls_are_measured():
    """Those that close a window: there an update is made."""
    seen = []
    train(TINY._replace(watch=1, spikes=True), on_report=lambda done, x: seen.append((done, x)))
    assert [done for done, _ in seen] == [1, 2, 4]
    assert [float(x["update_norm"]) > 0 for _, x in seen] == [False, False, True]  # a rate of 0
    assert {"spikes", "skipped", "clip_factor", "learning_rate"} <= seen[0][1].keys()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"optimizer": "sgd"}, "--optimizer=sgd is not known: choose adamh, adamw, "),
        ({"recipe": "int4"}, "--recipe=int4 is not known: choose float32, bf16_master, "),
        ({"packed": True, "devices": 2}, "--packed with --devices=2 needs --zero, which "),
        ({"zero": True}, "--zero shards the state over devices: give --devices=2 or more, too."),
        ({"step_in_backward": True}, "--step_in_backward updates each layer as soon as its gradient is known, and "
         "--accumulate needs those of all layers at once: leave out one of them."),
        ({"step_in_backward": True, "packed": True}, "is known, and --packed needs those of all "),
        ({"step_in_backward": True, "devices": 2, "zero": True}, "is known, and --zero needs those of all "),
        ({"devices": 3}, "--batch=4, expected a multiple of 3, of which each of the 3 devices "),
        ({"width": 34}, "--width=34, expected a multiple of 2 * 2 heads, since each head "),
        ({"steps": 5}, "--steps=5, expected a multiple of --accumulate=2, so that "),
        ({"warmup": 2}, "--warmup=2, expected fewer than the 2 updates of the whole run: "),
        ({"devices": 64, "batch": 64}, "--devices=64, expected at most 8, as many as JAX has "),
        ({"optimizer": "muon", "devices": 2, "zero": True},
         "--zero packs parameters, and Muon's matrices are not packed: leave it out."),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(changed, message):
    assert_refused(SettingsError, message, train, TINY._replace(**changed))


@pytest.mark.slow
def test_checkpoints_of_other_runs(tmp_path):
    """Each message names the flag; the text is no flag, and another model is another run."""
    saved = TINY._replace(recipe=STORED, **LAYOUTS["zero"])  # compiled already
    stopped(saved, tmp_path / "own", after=1)
    refused = functools.partial(assert_refused, CheckpointError)
    for name, value, before in [
        ("width", 16, 32),
        ("layers", 1, 2),
        ("optimizer", "lamb", "adamw"),
        ("recipe", "8bit", STORED),
        ("steps", 8, 4),
        ("ema", 0.5, 0.9),
        ("seed", 1, 0),
    ]:
        # Of the steps a warm-up follows, which is not what was changed.
        warmup = None if name == "steps" else saved.warmup
        changed = saved._replace(**{"rate": 0.01, "warmup": warmup, name: value})
        message = f"--{name}: {value}, expected {before}, as until step 1, or another "
        refused(message, continued, changed, tmp_path / "own")
        if name == "layers":
            refused(message, continued, changed, tmp_path / "own", resume_as=True)
    texts = split()._replace(training=text.Text(b"of another version" * 10))
    message = "Until step 1 the sources of another version of Python were learned: "
    refused(message, continued, saved, tmp_path / "own", texts=texts)
    with contextlib.closing(Checkpoints(tmp_path / "others")) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(3)}, about={"steps": 3})
    message = "Step 1 was saved by another program: give another --checkpoint_folder."
    refused(message, continued, saved, tmp_path / "others")
