"""`colabs/train_language_model.py`: what it trains, what it refuses, and that a killed run goes on.

Most tests train in this process. Each program takes seconds to compile, so few do by default.
"""

import contextlib
import functools
import importlib.util
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import bigram
import bits
import jgrad
import language_model
import language_training
import recipes
import shown
import text
import watched
from checkpoints import CheckpointError, Checkpoints
from jgrad._backward.step_in_backward import forced
from language_training import Settings, SettingsError, bytes_on_one_device
from tests.examples.command import Command
from tests.support.eight_bits import unquantized
from tests.support.loops import assert_equal

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


# ---- the text, and the bigram model ------------------------------------------------------------


def test_no_file_is_in_two_parts():
    """The part of a file is known by its name: the same in every version of Python."""
    paths = [path for part in text.files().values() for path in part]
    assert len(set(paths)) == len(paths) > 400
    sizes = [len(x.codes) for x in split()]
    assert 0.6 < sizes[0] / sum(sizes) < 0.95
    names = "heapq.py", "shutil.py", "json/decoder.py", "dis.py"
    assert [*map(text.part_of, names)] == ["training", "validation", "training", "test"]


def test_batches_are_known_by_their_number():
    texts = split().training
    assert_equal(texts.batches(3, seed=1, windows=2)[2], texts.batch(2, seed=1, windows=2))
    for i, seed in ((3, 1), (2, 2)):
        assert not np.array_equal(texts.batch(2, seed=1), texts.batch(i, seed=seed))
    windows = text.Text(b"abcdefghi").spread(3, length=3)
    assert windows.tobytes() == windows.dtype.type([*b"abcdefghi"]).tobytes()


def test_bigram_by_hand():
    """Of "abab", a is followed twice by b, and b once by a: p(b | a) = 3 / 258, p(a | b) = 2 / 257."""
    table = bigram.log_probabilities(np.frombuffer(b"abab", np.uint8))
    found = bigram.loss(table, np.array([[97, 98, 97, 99]]))
    expected = -np.log([3 / 258, 2 / 257, 1 / 258]).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(np.exp(table).sum(axis=1), 1, rtol=1e-12)


# ---- the model -----------------------------------------------------------------------------------


def scores(params, codes):
    """Under strict dtypes."""
    with jax.numpy_dtype_promotion("strict"):
        return jax.jit(functools.partial(language_model.logits, heads=2))(params, codes)


def small_model():
    """With scores that differ from byte to byte."""
    init = functools.partial(language_model.init, layers=2, width=16)
    return jax.tree.map(lambda x: 3 * x, jax.jit(init)(jax.random.key(0)))


@pytest.mark.slow
def test_a_byte_does_not_see_those_after_it():
    codes = np.arange(12, dtype=np.int32).reshape(2, 6)
    codes[1] = codes[0] + np.array([0, 0, 0, 0, 1, 0])
    found = scores(small_model(), codes)
    assert_equal(found[0, :4], found[1, :4])
    assert jnp.all(jnp.any(found[0, 4:] != found[1, 4:], axis=1))


@pytest.mark.slow
def test_positions_are_relative():
    """Products of one vector, turned at two positions, depend on the distance alone."""
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    turned = np.asarray(language_model._rotated(jnp.broadcast_to(x, (1, 9, 1, 8)))[0, :, 0])
    near, far = (np.diagonal(turned @ turned.T, distance) for distance in (1, 2))
    np.testing.assert_allclose(near, near[0], rtol=1e-5)
    np.testing.assert_allclose(far, far[0], rtol=1e-5)
    assert not np.isclose(near[0], far[0], rtol=1e-2)


@pytest.mark.slow
def test_a_sample_without_chance():
    """With a temperature near 0, each byte is the likeliest one after the six before it."""
    params, prompt = small_model(), jnp.array([100, 101, 102, 32], jnp.int32)
    found = language_model.sample(
        params, prompt, jax.random.key(1), number=8, length=6, heads=2, temperature=1e-6
    )
    assert_equal(found[:4], prompt)
    before = jnp.stack([found[i - 6 : i] for i in range(6, 12)])
    likeliest = scores(params, before).argmax(axis=2).astype(jnp.int32)
    assert_equal(found[4:], jnp.concatenate([likeliest[0, 3:5], likeliest[:, -1]]))
    assert len(set(found[4:].tolist())) > 2


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", recipes.OPTIMIZERS)
@pytest.mark.slow
def test_every_combination(optimizer, recipe, layout):
    """Two updates lower the loss of the averaged parameters, with clipping, skipping and windows."""
    settings = TINY._replace(optimizer=optimizer, recipe=recipe, **LAYOUTS[layout])
    run = train(settings)
    params, state = language_training.program(settings.checked()).start()
    before = language_training.measured(params, state, settings, split().validation)
    ((done, after),) = run.history.validation
    assert done == len(run.history.training) == settings.steps
    assert after < before - 1e-3
    assert run.state.skipped == 0


@pytest.mark.slow
def test_layouts_train_alike():
    """The numbers are those of one device, but for the order of sums, and of one leaf each."""
    settings = PLAIN._replace(steps=3)
    trained = {name: train(settings._replace(**layout)) for name, layout in LAYOUTS.items()}
    expected = jax.device_get(trained["tree"].params)
    for name, run in trained.items():
        found = jax.device_get(jgrad.unpack(run.params))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), found, expected)
        share = bytes_on_one_device(run.state) / bytes_on_one_device(trained["tree"].state)
        whole = 0.5 if name in ("jit", "zero") else 1
        assert whole <= share < 1.06 * whole  # packed has padding, of small leaves most


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


# ---- what is shown -------------------------------------------------------------------------------


def shown_lines(seconds, steps, *, is_terminal=False, done=0, **changed):
    """What is written in a run, each of whose steps takes so long."""
    output, now = io.StringIO(), [0.0]
    console = Console(file=output, width=120 if is_terminal else 40, force_terminal=is_terminal)
    settings = Settings(steps=steps, batch=2, length=50, **changed)
    progress = shown.Shown(settings, console, clock=lambda: now[0])
    with progress.progress:
        progress.start(done, jnp.zeros(2500))
        for i in range(done + 1, steps + 1):
            now[0] += seconds
            progress.step(i, 2 / shown.BITS, seconds)
    return [line for line in output.getvalue().splitlines() if line]


def steps_of(lines):
    return [int(re.match(r"step (\d+) of \d+: ", line)[1]) for line in lines]


def test_what_is_shown_of_a_run():
    """A file gets a line each tenth of the steps, and each ten seconds; a terminal gets a bar."""
    lines = shown_lines(0.001, 1400)
    assert steps_of(lines) == [1, *range(140, 1401, 140)]
    assert lines[-1] == "step 1400 of 1400: loss 2.00 bits, 100,000 tokens/s, state 0.01 MB"
    slow = steps_of(shown_lines(4.0, 70))
    assert {1, *range(7, 71, 7)} <= {*slow}
    assert np.diff(slow).max() == 3
    resumed = shown_lines(0.001, 1400, done=1000, devices=2)
    assert resumed[0] == "Going on after step 1000."
    assert steps_of(resumed[1:]) == [1001, 1120, 1260, 1400]
    assert resumed[1].endswith("state 0.01 MB on each device")
    bar = shown_lines(0.001, 20, is_terminal=True)
    assert not [line for line in bar if line.startswith("step ")]
    assert "20/20" in "".join(bar)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [TINY.ema, 0.0])
def test_the_weights_stand_beside_their_average(ema):
    """Each with its own loss, which is that of a model with these parameters."""
    settings = TINY._replace(ema=ema)
    run = train(settings)
    pairs = bigram.log_probabilities(split().training.codes)
    table = shown.table(run, settings, split(), pairs, shown.Shown(settings))
    names, *losses = ([*column.cells] for column in table.columns)
    average = language_training.evaluated(run.params, run.state, settings)
    trees = {"transformer": run.params} | ({"transformer, average": average} if ema else {})
    assert names == ["bigram model", *trees]
    loss = jax.jit(functools.partial(language_model.loss, heads=settings.heads))
    for part, column in zip((split().validation, split().test), losses, strict=True):
        codes = language_training.windows(part, settings).reshape(-1, settings.length + 1)
        expected = [float(loss(x, codes)) * shown.BITS for x in trees.values()]
        np.testing.assert_allclose([float(x) for x in column[1:]], expected, atol=1e-3)
    assert len(set(losses[0])) == len(names)


@pytest.mark.slow
def test_a_digest_is_of_every_bit():
    """Of the numbers, and not of their layout."""
    params = small_model()
    norm = np.array(params["norm"])
    norm[-1] = np.nextafter(norm[-1], np.float32(9))
    found = [bits.digest(x) for x in (params, {**params, "norm": norm}, jgrad.pack(params))]
    assert found[0] == found[2] != found[1]


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
def test_a_run_goes_on_in_another_layout(tmp_path):
    stopped(TINY, tmp_path, after=2)
    run = continued(TINY._replace(**LAYOUTS["zero"]), tmp_path)
    np.testing.assert_allclose(run.history.training, train(TINY).history.training, rtol=1e-4)


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
    assert any(name.startswith("ema") for name in account.dropped)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(run.params)}
    assert dtypes == {"float32" if recipe == "float32" else "bfloat16"}
    states = jax.tree.leaves(run.state, is_leaf=lambda x: isinstance(x, jgrad.OptState))
    assert [int(x.step) for x in states if isinstance(x, jgrad.OptState)] == [2]
    assert len(run.history.training) == 4
    assert np.isfinite(run.history.training).all()


@pytest.mark.slow
def test_the_same_recipe_in_other_wrappers_goes_on(tmp_path):
    """Without `skip_nonfinite` and packed, losses are those of a run that was never stopped."""
    stopped(TINY, tmp_path, after=3)
    run = continued(TINY._replace(skip=False, packed=True), tmp_path, resume_as=True)
    np.testing.assert_allclose(run.history.training, train(TINY).history.training, rtol=1e-6)


SPIKE = 35


@pytest.mark.slow
def test_a_spike_is_left_out(monkeypatch):
    """Of a batch of strange bytes nothing is learned: what follows has the bits of a run without."""
    settings = PLAIN._replace(steps=40, spikes=True)
    batch = text.Text.batch

    def with_spike(self, i, **options):
        codes = batch(self, i, **options)
        return 255 - codes % 16 if i == SPIKE else codes

    def without(self, i, **options):
        return batch(self, i + (i >= SPIKE), **options)

    monkeypatch.setattr(text.Text, "batch", with_spike)
    found = train(settings)
    monkeypatch.setattr(text.Text, "batch", without)
    expected = train(settings)
    losses = found.history.training
    assert losses[SPIKE] > max(losses[SPIKE - 8 : SPIKE]) + 0.5
    assert [*losses[:SPIKE], *losses[SPIKE + 1 :]] == expected.history.training[:-1]
    assert (int(found.state.skipped), int(expected.state.skipped)) == (1, 0)


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
        (
            {"step_in_backward": True},
            "--step_in_backward updates each layer as soon as its gradient is known, and "
            "--accumulate needs those of all layers at once: leave out one of them.",
        ),
        ({"step_in_backward": True, "packed": True}, "is known, and --packed needs those of all "),
        (
            {"step_in_backward": True, "devices": 2, "zero": True},
            "is known, and --zero needs those of all ",
        ),
        ({"devices": 3}, "--batch=4, expected a multiple of 3, of which each of the 3 devices "),
        ({"width": 34}, "--width=34, expected a multiple of 2 * 2 heads, since each head "),
        ({"steps": 5}, "--steps=5, expected a multiple of --accumulate=2, so that "),
        ({"warmup": 2}, "--warmup=2, expected fewer than the 2 updates of the whole run: "),
        ({"devices": 64, "batch": 64}, "--devices=64, expected at most 8, as many as JAX has "),
        (
            {"optimizer": "muon", "devices": 2, "zero": True},
            "--zero packs parameters, and Muon's matrices are not packed: leave it out.",
        ),
    ],
)
def test_settings_that_do_not_fit(changed, message):
    assert_refused(SettingsError, message, train, TINY._replace(**changed))


@pytest.mark.parametrize(
    ("changed", "warmup"),
    [
        ({}, 100),
        ({"steps": 50}, 3),
        ({"steps": 1}, 0),
        ({"steps": 1400, "accumulate": 4}, 25),
        ({"steps": 50, "warmup": 20}, 20),
        ({"steps": 50, "warmup": 0}, 0),
    ],
)
def test_the_warmup_fits_the_steps(changed, warmup):
    """By default one in 14 updates, and what a message proposes is accepted."""
    settings = Settings(**changed).checked()
    assert settings.warmup == warmup
    assert settings.checked() == settings
    with pytest.raises(SettingsError) as refused:
        settings._replace(warmup=500, steps=400).checked()
    proposed = [int(x) for x in re.findall(r"(?:for --warmup|--steps)=(\d+)", str(refused.value))]
    settings._replace(warmup=proposed[0], steps=400).checked()
    settings._replace(warmup=500, steps=proposed[1]).checked()


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
