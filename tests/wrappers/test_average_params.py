"""The exponential moving average of the parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params
from tests.support.loops import every_step, step_of

X = jnp.ones(3)


def reference(trees, decay):
    """The averages after each step, in float64 NumPy; `decay` is a number or a function."""
    rows = [[np.asarray(x).astype(np.complex128) for x in jax.tree.leaves(t)] for t in trees]
    average, found = rows[0], []
    for done, row in enumerate(rows[1:]):
        beta = decay(done) if callable(decay) else decay
        average = [beta * a + (1 - beta) * w for a, w in zip(average, row, strict=True)]
        found.append(average)
    return found


def assert_reference(states, trees, decay, rtol):
    for state, expected in zip(states, reference(trees, decay), strict=True):
        average = optax.tree.get(state, "average")
        for a, b in zip(jax.tree.leaves(average), expected, strict=True):
            atol = rtol * np.max(np.abs(b))
            np.testing.assert_allclose(np.asarray(a).astype(np.complex128), b, rtol, atol)


# ---- the numbers -------------------------------------------------------------------------------


@pytest.mark.slow(one_in=16)
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-13), ("complex128", 1e-13),
    ("float32", 3e-6), ("bfloat16", 3e-6), ("float16", 3e-6)])  # fmt: skip
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.9999])
def test_reference(dtype, decay, rtol, x64):
    """100 steps: that of the weights as they are stored, in float32 or wider."""
    w, grads = params(dtype), gradients(100, dtype)
    tx = jgrad.average_params(jgrad.gradient_descent(0.01), decay)
    found = every_step(tx, w, grads)
    states = [state for _, state in found]
    assert_reference(states, [w, *(w for w, _ in found)], decay, rtol)
    average, wide = states[-1].average, "float64" if dtype == "float64" else "float32"
    wide = "complex128" if dtype == "complex128" else wide
    assert {x.dtype for x in jax.tree.leaves(average)} == {jnp.dtype(wide)}
    assert int(states[-1].done) == 100


DECAYS = {
    "warm-up": (
        lambda done: jnp.minimum(0.99, (1 + done) / (10 + done)),
        lambda done: min(0.99, (1 + done) / (10 + done)),
    ),
    "schedule": (optax.linear_schedule(0.0, 0.9, 20), lambda done: 0.9 * min(done / 20, 1)),
    "number": (lambda done: 0.9, 0.9),
    "array": (np.float32(0.9), 0.9),
}


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(("decay", "same"), DECAYS.values(), ids=DECAYS)
def test_decay_as_a_function(decay, same, standard_promotion):
    """Of the number of updates done, 0 at the first, in one trace."""
    w, grads = params(), gradients(40)
    chain = jgrad.average_params(jgrad.gradient_descent(0.01), decay)
    tx = chain._replace(update=chex.assert_max_traces(chain.update, n=1))
    found = every_step(tx, w, grads)
    trees = [w, *(w for w, _ in found)]
    assert_reference([state for _, state in found], trees, same, 3e-6)


def test_decay_as_a_traced_number():
    """With `inject_hyperparams`, another decay is no new trace."""
    tx, w, grads = (
        optax.inject_hyperparams(jgrad.average_params)(optax.identity(), decay=0.9),
        params(),
        gradients(6),
    )
    step = jax.jit(chex.assert_max_traces(step_of(tx), n=1))
    state, trees, states = tx.init(w), [w], []
    for i, g in enumerate(grads):
        state.hyperparams["decay"] = jnp.float32(0.9 if i < 3 else 0.25)
        new, state = step(trees[-1], state, jax.tree.map(lambda x: 0.01 * x, g))
        trees.append(new)
        states.append(state)
    assert_reference(states, trees, lambda done: 0.9 if done < 3 else 0.25, 3e-6)


@pytest.mark.parametrize("decay", [0.999, 0.9999, 0.999999])
def test_a_decay_close_to_one(decay):
    """1 - decay has all its digits: of a decay in float32, 0.999999 would leave 5 % of an error."""
    tx = jgrad.average_params(optax.identity(), decay)
    zero = jnp.zeros(())
    _, state = tx.update(jnp.ones(()), tx.init(zero), zero)
    np.testing.assert_allclose(state.average, 1 - decay, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_moves(dtype):
    """An average of decay 0.999 in half precision would stand still; in float32 it arrives."""
    w, tx = jnp.ones(3, dtype), jgrad.average_params(optax.identity(), 0.999)
    state = tx.init(w)._replace(average=jnp.zeros(3))
    body = lambda state, _: (tx.update(jnp.zeros_like(w), state, w)[1], None)
    state, _ = jax.lax.scan(body, state, length=5000)
    np.testing.assert_allclose(state.average, 1 - 0.999**5000, rtol=1e-4)
    assert int(state.done) == 5000


def test_updates_alone_move_the_average(standard_promotion):
    """Neither a mini-batch inside of a window, nor a step that is left out."""
    descent = jgrad.gradient_descent(1.0)
    tx = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.average_params(descent, 0.5), 2))
    grads = [X, X, jnp.nan * X, jnp.nan * X, X, X]
    found = [float(state.inner.inner.average[0]) for _, state in every_step(tx, 0 * X, grads)]
    assert found == [0.0, -0.5, -0.5, -0.5, -0.5, -1.25]
    tx = optax.MultiSteps(jgrad.average_params(descent, 0.5), 2)
    found = [float(x.inner_opt_state.average[0]) for _, x in every_step(tx, 0 * X, [X] * 4)]
    assert found == [0.0, -0.5, -0.5, -1.25]


# ---- leaves, and what passes -------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, "float0", "int"])
def test_leaves_that_are_not_averaged(count):
    """Integers and bools are copied; without an update, the parameter itself is averaged."""
    zeros = {None: None, "float0": np.zeros(3, jax.dtypes.float0), "int": jnp.zeros(3, jnp.int32)}
    w = {"a": X, "b": jnp.full(2, 4.0), "n": jnp.arange(3), "flag": jnp.array(True), "none": None}
    u = {"a": X, "b": None, "n": zeros[count], "flag": None, "none": None}
    tx = jgrad.average_params(optax.identity(), 0.75)
    state = tx.init(w)
    chex.assert_trees_all_equal(state.average, w)
    moved = w | {"n": jnp.arange(3) + 1, "flag": jnp.array(False), "b": jnp.full(2, 8.0)}
    updates, state = tx.update(u, state, moved)
    assert updates is u
    expected = moved | {"a": 1.25 * X, "b": jnp.full(2, 5.0)}
    chex.assert_trees_all_equal(state.average, expected)
    assert {k: x.dtype for k, x in state.average.items() if x is not None} == {
        k: x.dtype for k, x in w.items() if x is not None
    }


# ---- a late start, and without the first parameters ----------------------------------------------


@pytest.mark.parametrize(("start", "debias"), [(0, True), (3, True), (3, False)])
def test_late_start_and_debiased(start, debias, x64, standard_promotion):
    """Up to the start the newest parameters; then their average, or their mean by the weights of that."""
    decay, w, seen = 0.9, jnp.zeros(3, jnp.float64) + 5, []
    tx = jgrad.average_params(jgrad.gradient_descent(1.0), decay, start=start, debias=debias)
    state, expected = tx.init(w), 0
    for i, g in enumerate(np.random.RandomState(0).randn(8, 3)):
        updates, state = jax.jit(tx.update)(jnp.asarray(g), state, w)
        w = optax.apply_updates(w, updates)
        seen = [*seen, np.asarray(w)] if i >= start else []
        if not debias:
            expected = (
                decay * expected + (1 - decay) * np.asarray(w) if i >= start else np.asarray(w)
            )
        elif seen:
            expected = np.average(seen, axis=0, weights=[decay**k for k in range(len(seen))][::-1])
        else:
            continue
        np.testing.assert_allclose(optax.tree.get(state, "average"), expected, rtol=1e-12)


def test_start_and_debias_keep_the_form_of_the_state():
    w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    forms = [
        jax.tree.structure(jgrad.average_params(optax.identity(), 0.9, **options).init(w))
        for options in ({}, {"start": 5}, {"debias": True})
    ]
    assert forms[0] == forms[1] == forms[2]


def test_debiased_where_the_counter_is_full():
    """It saturates, and the average goes on."""
    w = jnp.ones(3)
    tx = jgrad.average_params(optax.identity(), 0.9, debias=True)
    state = jgrad.EmaState(jnp.int32(2**31 - 1), jnp.zeros(3), optax.EmptyState())
    _, state = jax.jit(tx.update)(jnp.zeros(3), state, w)
    np.testing.assert_allclose(state.average, 0.1, rtol=1e-6)
    assert state.done == 2**31 - 1


def test_an_injected_start():
    """A number of the state, which may be changed in a run."""
    w = jnp.ones(3)
    tx = optax.inject_hyperparams(jgrad.average_params)(optax.identity(), 0.9, start=1, debias=True)
    state = tx.init(w)
    for g, expected in ((2.0, 3.0), (3.0, 4.0), (4.0, (5 + 0.9 * 4) / 1.9)):
        _, state = jax.jit(tx.update)(jnp.full(3, g), state, w)
        average = optax.tree.get(state, "average")
        np.testing.assert_allclose(average, expected, rtol=1e-6)
