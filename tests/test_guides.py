"""The guides that a newcomer reads: their examples run in order, and do what the text says."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.support.loops import assert_equal
from tests.test_docs import page, run_example

STARTED, HALF = "docs/getting_started.md", "docs/half_precision.md"
NAMES = {"jax": jax, "jnp": jnp, "jgrad": jgrad, "optax": optax}


@pytest.fixture(scope="module")
def started():
    """Names after the first step and the training."""
    with jax.numpy_dtype_promotion("standard"):
        names = run_example(STARTED, 0, {})
        names["first"] = float(names["value"])
        return run_example(STARTED, 1, names)


def test_a_first_training(started):
    assert int(started["state"].step) == 201
    assert float(started["value"]) < 0.01 * started["first"]
    text = re.search(r"`jax.tree.map\((.*?)\)` is `(.*?)`", page(STARTED))
    assert str(jax.tree.map(jnp.shape, started["state"].mw)) == text[2]


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


def test_what_half_precision_loses(capsys):
    """As the comments have it, to three digits."""
    run_example(HALF, 0, dict(NAMES))
    printed = [f"{float(x):.3f}" for x in capsys.readouterr().out.split()]
    assert printed == re.findall(r"^print\(.*\)  # (0\.\d{3}),", page(HALF), re.MULTILINE)
    assert len(set(printed)) == 3


def test_gradients_of_half_precision_products(standard_promotion):
    names = run_example(HALF, 1, dict(NAMES))
    params, x = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))
    grads = jgrad.grad(names["loss"])(params, x, jnp.zeros((3, 2)))
    assert grads["w"].dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(names["loss"])(params, x, jnp.zeros((3, 2))))
    assert re.search(r":bf16\[3,2\] = dot_general", jaxpr)


def test_both_wrappers_of_bfloat16():
    """4 bytes per half-precision parameter apart; the average is float32."""
    names = run_example(HALF, 2, dict(NAMES))
    w, bytes_of = names["params"], {}
    for name in ("copies", "rounded"):
        state = names[name].init(w)
        bytes_of[name] = sum(x.nbytes for x in jax.tree.leaves(state))
        assert optax.tree.get(state, "average")["w"].dtype == jnp.float32
    step = jnp.int32(0).nbytes  # of `stochastic_rounding`
    assert bytes_of["copies"] - bytes_of["rounded"] == 4 * w["w"].size - step


def test_float16(standard_promotion):
    names = run_example(HALF, 1, dict(NAMES))
    names = run_example(HALF, 3, names)
    params, x = {"w": jnp.ones((4, 2), jnp.float16)}, jnp.full((3, 4), 0.25)
    state = names["tx"].init(params)
    new, state, value = names["step"](params, state, x, jnp.zeros((3, 2)))
    assert float(value) == 1
    assert new["w"].dtype == jnp.float16
    assert (new["w"] < 1).all()
    same, state, _ = names["step"](new, state, x * 1e30, jnp.zeros((3, 2)))
    assert_equal(same, new)
    assert (int(state.skipped), float(state.loss_scale)) == (1, 2.0**14)


def test_figures_of_half_precision():
    there = page("docs/memory.md") + page("docs/benchmarks.md")
    figures = set(re.findall(r"\b\d+\.\d\d\b", page(HALF)))
    assert {"6.03", "1.20", "0.15"} <= figures
    assert figures - {"0.99"} <= set(re.findall(r"\b\d+\.\d\d\b", there))
