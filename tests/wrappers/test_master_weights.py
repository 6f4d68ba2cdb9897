"""Float32 copies of half-precision parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import Case, gradients, params
from tests.support.loops import assert_equal, step_of

HALF = ("bfloat16", "float16")
every_dtype = pytest.mark.parametrize("dtype", HALF)


def ulp(x, dtype):
    """The distance to the next number of the dtype, upwards."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(info.tiny))))
    return 2.0**exponent * float(info.eps)


# ---- the copy and the parameters ---------------------------------------------------------------

CASES = [
    Case("momentum", jgrad.gradient_descent, {"momentum": 0.9}, ("mw",)),
    Case("adamw", jgrad.adam, {"weight_decay": 0.1}, ("mw", "vw")),
    Case("lars", jgrad.lars, {"weight_decay": 0.01, "trust_coefficient": 0.1}, ("mw",)),
    Case("lamb", jgrad.lamb, {"weight_decay": 0.1}, ("mw", "vw")),
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.slow
@every_dtype
@every_case
def test_the_copy_is_the_papers(case, dtype):
    """Beside a float64 reference that sees the same rounded gradients; the parameters follow."""
    w = params(dtype)
    grads = gradients(20, dtype)
    tx = jgrad.master_weights(case.tx(1e-3))
    step, state = jax.jit(step_of(tx)), tx.init(w)
    for g, expected in zip(grads, case.trajectory(w, grads, 1e-3), strict=True):
        before = w
        w, state = step(w, state, g)
        for m, e in zip(jax.tree.leaves(state.master), expected, strict=True):
            assert m.dtype == jnp.float32
            np.testing.assert_allclose(m, e, rtol=2e-6, atol=2e-6 * np.max(np.abs(e)))
        rows = (jax.tree.leaves(tree) for tree in (w, state.master, before))
        for p, m, old in zip(*rows, strict=True):
            assert p.dtype == dtype
            p, m, old = (np.asarray(x, np.float64) for x in (p, m, old))
            rounded = np.asarray(jnp.asarray(m, dtype), np.float64)
            small = (rounded * old > 0) & (np.abs(rounded) <= 2 * np.abs(old))
            small &= np.abs(old) <= 2 * np.abs(rounded)
            np.testing.assert_array_equal(p[small], rounded[small])
            assert np.all(np.abs(p - rounded) <= np.maximum(ulp(old, dtype), ulp(rounded, dtype)))


@every_dtype
def test_e07_a_weight_of_one(dtype, standard_promotion):
    """5000 steps of 1e-4: plain, they leave 1; with the copy they lead to 0.5."""
    tx, w = jgrad.gradient_descent(1e-4), jnp.ones(2, dtype)
    plain, _ = train(tx, w, jnp.ones_like, 5000)
    np.testing.assert_array_equal(plain, w)
    found, state = train(jgrad.master_weights(tx), w, jnp.ones_like, 5000)
    np.testing.assert_allclose(state.master, 0.5, rtol=1e-3)
    assert_equal(found, state.master.astype(dtype))


def train(tx, w, gradient, steps):
    """Compiled as one loop."""

    def step(_, carry):
        w, state = carry
        updates, state = tx.update(gradient(w), state, w)
        return optax.apply_updates(w, updates), state

    return jax.jit(lambda w: jax.lax.fori_loop(0, steps, step, (w, tx.init(w))))(w)


def jumps(dtype):
    """Many pairs of weights, old and new, of both signs and many scales."""
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, size=(2, 50_000)) * 2.0 ** rng.integers(-6, 7, size=(2, 50_000))
    return (jnp.asarray(x, dtype) for x in values)


def follow(old, new, dtype):
    """The parameter after a step that takes the copy from `old` to `new`, and after no step."""
    tx = jgrad.master_weights(optax.identity())
    state = tx.init(old)
    updates, state = tx.update(new, state._replace(master=jnp.zeros_like(state.master)), old)
    first = optax.apply_updates(old, updates)
    updates, state = tx.update(jnp.zeros_like(old), state, first)
    np.testing.assert_array_equal(state.master, np.asarray(new, np.float32))
    return first, optax.apply_updates(first, updates)


@pytest.mark.slow(one_in=4)
@every_dtype
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_parameters_are_the_rounded_copy(dtype, shift):
    """Bit for bit where a weight goes to half of itself at least, and to the double at most."""
    old, _ = jumps(dtype)
    rng = np.random.default_rng(1)
    factor = rng.uniform(0.5 + shift / 2, 2 - shift, size=old.shape)
    new = jnp.asarray(np.asarray(old, np.float32) * factor, jnp.float32)
    first, second = follow(old, new, dtype)
    assert_equal(first, new.astype(dtype))
    assert_equal(second, first)


@every_dtype
def test_a_weight_that_jumps(dtype):
    """Up, down or to the other sign: within a unit in the last place of the larger, once."""
    old, new = jumps(dtype)
    first, second = follow(old, new, dtype)
    assert_equal(second, new)
    a, b, found = (np.asarray(x, np.float64) for x in (old, new, first))
    assert np.any(found != b)
    assert np.all(np.abs(found - b) <= np.maximum(ulp(a, dtype), ulp(b, dtype)))


def test_a_sign_changed_at_the_top_of_float16():
    """From -60000 to 60000 is further than float16 reaches."""
    old, new = jnp.asarray([-60000.0], jnp.float16), jnp.asarray([60000.0], jnp.float16)
    first, second = follow(old, new, jnp.float16)
    assert_equal(second, new)
    chex.assert_tree_all_finite(first)


# ---- mixed trees, and dtypes -------------------------------------------------------------------


HALVES = [
    pytest.param(jgrad.master_weights, "bfloat16", marks=pytest.mark.bits),
    (jgrad.master_weights, "float16"),
    pytest.param(jgrad.stochastic_rounding, "bfloat16", marks=pytest.mark.bits),
]


@pytest.mark.slow(always=["stochastic_rounding-bfloat16-momentum"])
@every_case
@pytest.mark.parametrize(("wrap", "dtype"), HALVES)
def test_other_leaves_are_those_of_the_plain_transformation(wrap, dtype, case):
    """Float32 and complex beside half precision, bit for bit; integers and None stay."""
    rng = np.random.default_rng(0)

    def tree():
        leaf = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        z = jax.lax.complex(leaf(2), leaf(2))
        return {"a": leaf(3), "b": leaf(4, 3).astype(dtype), "c": leaf(2, 2), "z": z}

    more = {"n": jnp.arange(3), "none": None, "lost": jnp.ones(2, dtype)}
    tx, w = case.tx(), tree() | more
    safe = wrap(tx)
    found, state = (w, w), (tx.init(w), safe.init(w))
    for _ in range(5):
        g = tree() | {"n": np.zeros(3, jax.dtypes.float0), "none": None, "lost": None}
        pairs = zip((tx, safe), found, state, strict=True)
        found, state = zip(*(step_of(t)(p, s, g) for t, p, s in pairs), strict=True)
    keys = ("a", "c", "z", "n", "none", "lost")
    assert_equal({k: found[1][k] for k in keys}, {k: found[0][k] for k in keys})
    assert_equal(state[1].inner.mw["a"], state[0].mw["a"])
    assert state[1].inner.mw["b"].dtype == jnp.float32
    assert found[1]["b"].dtype == dtype
    assert not jnp.array_equal(found[1]["b"], w["b"])
    if wrap is jgrad.master_weights:
        shapes = {k: x.shape for k, x in state[1].master.items() if x is not None}
        assert shapes == {"b": (4, 3), "lost": (2,)}
        b, master = (np.asarray(x["b"], float) for x in (found[1], state[1].master))
        np.testing.assert_allclose(b, master, atol=float(jnp.finfo(dtype).eps))


def test_a_copy_beyond_the_largest_number():
    """Infinite at once, so that it can be skipped: later, the copy would stay where it is."""
    tx = jgrad.master_weights(jgrad.gradient_descent(1.0))
    w = jnp.ones(3, jnp.float16)
    updates, _ = tx.update(jnp.full(3, -69999.0), tx.init(w), w)
    assert jnp.all(updates == jnp.inf)
    safe = jgrad.skip_nonfinite(tx)
    state = safe.init(w)
    for g in (-69999.0, 2.0):
        updates, state = safe.update(jnp.full(3, g), state, w)
        w = w + updates
    np.testing.assert_array_equal(w, -jnp.ones(3))
    assert int(state.skipped) == 1
