"""The guides that a newcomer reads: their examples run in order, and do what the text says."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from benchmarks.accelerators.recipes import RECIPES
from tests.accelerators.limits import NOT_REACHED, limit
from tests.support.loops import assert_equal
from tests.test_docs import blocks, page, rows, run_example, section

STARTED, MEMORY = "docs/getting_started.md", "docs/memory.md"
COMPILED = "benchmarks/notes/accelerators.md"
RUNS = "docs/runs.md"
# The rows of its table by the recipes that are compiled.
ACCELERATORS = {
    "AdamW": ["AdamW"],
    "skip(clip + AdamW)": ["skip(clip + AdamW)"],
    "AdamW + ema": ["AdamW + ema"],
    "accumulate(clip + AdamW), a mini-step": ["accumulate(clip + AdamW)"],
    "accumulate, `emit=False`": ["accumulate, emit=False"],
    "LARS": ["LARS"],
    "LAMB": ["LAMB"],
    "clip + LAMB": ["clip + LAMB"],
    "AdamW, 8 bits": ["AdamW, 8 bits"],
    "AdamW, 8 bits, `optax.apply_updates`": ["AdamW, 8 bits, optax.apply_updates"],
    "bf16: stochastic(AdamW, 8 bits)": ["bf16: stochastic(AdamW, 8 bits)"],
    "bf16: stochastic(AdamW, 8 bits), `optax.apply_updates`": [
        "bf16: stochastic(AdamW, 8 bits), optax.apply_updates"
    ],
    "bf16: skip(stochastic(clip + AdamW, 8 bits))": [
        "bf16: skip(stochastic(clip + AdamW, 8 bits))"
    ],
    "bf16: skip(accumulate(master(clip + LAMB + ema))), a mini-step": [
        "bf16: skip(accumulate(master(clip + LAMB + ema)))"
    ],
}
NAMES = {"jax": jax, "jnp": jnp, "jgrad": jgrad, "optax": optax}


@pytest.fixture(scope="module")
def started():
    """Names after the first step and the training."""
    with jax.numpy_dtype_promotion("standard"):
        names = run_example(STARTED, 0, {})
        names["first"] = float(names["value"])
        return run_example(STARTED, 1, names)


@pytest.mark.slow
def test_a_first_training(started):
    assert int(started["state"].step) == 201
    assert float(started["value"]) < 0.01 * started["first"]
    text = re.search(r"`jax.tree.map\((.*?)\)` is `(.*?)`", page(STARTED))
    assert str(jax.tree.map(jnp.shape, started["state"].mw)) == text[2]


@pytest.mark.slow
def test_a_schedule_goes_on_from_the_state(started, standard_promotion):
    names = run_example(STARTED, 2, dict(started))
    grads = jgrad.grad(names["loss"])(names["params"])
    _, state = names["adamw"].update(grads, started["state"], names["params"])
    assert int(state.step) == 202
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    state = names["safe"].init(names["params"])
    updates, state = names["safe"].update(bad, state, names["params"])
    assert int(state.skipped) == 1
    assert not any(x.any() for x in jax.tree.leaves(updates))


def test_save_and_resume(started, tmp_path):
    names = run_example(STARTED, 3, dict(started) | {"path": tmp_path / "last"})
    assert_equal((names["params"], names["state"]), (started["params"], started["state"]))


def test_the_same_as_functions(started, standard_promotion):
    """Three steps are those of the pair from a new state."""
    names = run_example(STARTED, 4, dict(started))
    w, state, update = (
        started["params"],
        started["tx"].init(started["params"]),
        started["tx"].update,
    )
    for _ in range(3):
        updates, state = update(jgrad.grad(started["loss"])(w), state, w)
        w = optax.apply_updates(w, updates)
    found = optax.tree.norm(jax.tree.map(jnp.subtract, (names["w"], names["mw"]), (w, state.mw)))
    assert found < 1e-5


@pytest.mark.slow
def test_what_half_precision_loses(capsys):
    """As the comments have it, to three digits."""
    run_example(MEMORY, 2, dict(NAMES))
    printed = [f"{float(x):.3f}" for x in capsys.readouterr().out.split()]
    assert printed == re.findall(r"^print\(.*\)  # (0\.\d{3}),", page(MEMORY), re.MULTILINE)
    assert len(set(printed)) == 3


def test_gradients_of_half_precision_products(standard_promotion):
    names = run_example(MEMORY, 3, dict(NAMES))
    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
    grads = jgrad.grad(names["loss"])(params, x, jnp.zeros((3, 2)))
    assert grads["w"].dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(names["loss"])(params, x, jnp.zeros((3, 2))))
    assert re.search(r":bf16\[3,2\] = dot_general", jaxpr)


def test_both_wrappers_of_bfloat16():
    """4 bytes per half-precision parameter apart; the average is float32."""
    w, bytes_of = {"w": jnp.full((64, 256), 0.5, jnp.bfloat16), "norm": jnp.ones(256)}, {}
    tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(3e-4), jgrad.ema(0.999))
    for wrapper in (jgrad.master_weights, jgrad.stochastic_rounding):
        state = wrapper(tx).init(w)
        bytes_of[wrapper] = sum(x.nbytes for x in jax.tree.leaves(state))
        assert optax.tree.get(state, "average")["w"].dtype == jnp.float32
    step = jnp.int32(0).nbytes  # of `stochastic_rounding`
    copies, rounded = bytes_of.values()
    assert copies - rounded == 4 * w["w"].size - step


@pytest.mark.slow
def test_float16(standard_promotion):
    names = run_example(MEMORY, 3, dict(NAMES))
    names = run_example(MEMORY, 4, names)
    params, x = {"w": jnp.ones((4, 2), jnp.float16)}, jnp.full((3, 4), 0.25)
    state = names["tx"].init(params)
    new, state, value = names["step"](params, state, x, jnp.zeros((3, 2)))
    assert float(value) == 1
    assert new["w"].dtype == jnp.float16
    assert (new["w"] < 1).all()
    same, state, _ = names["step"](new, state, x * 1e30, jnp.zeros((3, 2)))
    assert_equal(same, new)
    assert (int(state.skipped), float(state.loss_scale)) == (1, 2.0**14)


# ---- TPU and GPU -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_whole_step(capsys):
    """One step of eight bits, and what a TPU would make of each leaf."""
    names = run_example(MEMORY, 5, dict(NAMES))
    assert int(names["state"].inner.step) == 1
    assert bool((names["params"]["w"] < 0).all())
    answers = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert answers[".inner.mw['w']"] == answers[".inner.vw['w']"] == "one kernel"
    shown = re.search(r"# (\S+) (XLA: .*) \.\.\.$", page(MEMORY), re.MULTILINE)
    assert answers[shown[1]] == shown[2]


def test_counting_a_step(capsys):
    """Without the compilers it says how to install them; with them, what a step costs."""
    run_example(COMPILED, 0, {})
    out = capsys.readouterr().out
    assert 'pip install ".[accelerators]"' in out or out.startswith("28.0")


def test_figures_of_accelerators():
    """As the tests of programs for TPU and GPU allow: the largest of all models and both forms."""
    shown = {row[0]: row[1:] for row in rows(section(COMPILED, "What each recipe costs"))}
    for name, own in ACCELERATORS.items():
        for cell, target in zip(shown[name], ("h100", "v5e"), strict=True):
            figures = [tuple(map(float, x)) for x in re.findall(r"([\d.]+) / ([\d.]+)", cell)]
            most, temporaries = map(max, zip(*figures, strict=True))
            for recipe in own:
                bounds = [
                    NOT_REACHED.get(
                        (recipe, target, model, form),
                        limit(recipe, target, packed=form == "packed"),
                    )
                    for model in RECIPES[recipe].models
                    for form in ("tree", "packed")
                ]
                assert most <= max(x.bytes for x in bounds)
                assert temporaries <= max(x.temporaries for x in bounds) + 0.05


@pytest.mark.slow
def test_a_change_in_the_middle_of_a_run(standard_promotion, capsys):
    names = run_example(RUNS, 3, dict(NAMES))
    assert capsys.readouterr().out == blocks(RUNS, "text")[0]
    assert (int(names["state"].mini_step), int(names["state"].inner[0].step)) == (2, 1)
    _, state = names["tx"].update(names["grads"], names["state"], names["params"])
    assert int(state.mini_step) == 3
    assert len(page(RUNS).split()) <= 870


@pytest.mark.slow
def test_a_run_that_diverges(standard_promotion):
    """What the page says is in the report; a NaN is counted and skipped."""
    params = {"embed": {"table": jnp.ones((5, 4))}, "head": jnp.ones((4, 2))}
    grads = jax.tree.map(jnp.ones_like, params)
    names = run_example(RUNS, 0, NAMES | {"params": params, "grads": grads})
    for name in re.findall(r"^\| `([a-z_/.]+)`", page(RUNS), re.MULTILINE):
        assert any(key.startswith(name.removesuffix("...")) for key in names["numbers"]), name
    bad = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), grads)
    _, state = names["step"](names["params"], names["state"], bad)
    numbers = jgrad.report(state)
    assert (int(numbers["nonfinite"]), int(numbers["skipped"])) == (2, 1)
    example = run_example(RUNS, 1, NAMES | {"params": params, "grads": grads})
    assert int(jgrad.report(example["state"])["spikes"]) == 0
    example = run_example(RUNS, 2, NAMES | {"norms": [1.0, 2.0, 4.0]})
    example["tx"].update(grads, example["tx"].init(params), params)
