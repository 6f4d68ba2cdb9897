"""Moments in 8 bits, their numbers: at every scale, in the mean, and what is not finite."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._quantized import codec, encoding
from jgrad._quantized.geometry import Geometry
from jgrad._quantized.random_bits import ElementKeys, step_keys
from tests.support.eight_bits import (
    CONSTANT_FREE,
    ELEMENTWISE,
    RATE,
    gradients,
    in_float32,
    model,
    moments,
    mostly,
    normal,
    optimizers,
    slow,
    unpacked,
    value,
)
from tests.support.loops import assert_equal, train

# ---- at every scale ----------------------------------------------------------------------------


@pytest.mark.slow
@mostly("tree")
@optimizers(ELEMENTWISE)
def test_e30_blocks_of_zeros(make, packed):
    """Scale 0 and codes 0; what never had a gradient does not move; a first one of 1e-15 is kept."""
    options = {"epsilon": 0.0} if "epsilon" in inspect.signature(make).parameters else {}
    tx = make(**options)
    w = {"w": jnp.ones((32, 256))}
    g = {"w": normal((32, 256)).at[8:].set(0.0)}
    w, g = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    new, state = train(tx, w, [g] * 3)
    moved = jgrad.unpack(new)["w"]
    np.testing.assert_array_equal(moved[8:], 1.0)
    assert np.all(moved[:8] != 1)
    for x in moments(state):
        assert not np.any(x.codes.reshape(-1, 256)[8:])
        assert not np.any(x.scale.reshape(-1)[8:])
    late = jax.tree.map(lambda x: x.at[8:].set(1e-15), g)
    updates, state = jax.jit(tx.update)(late, state, new)
    for x in moments(state):
        assert np.all(x.codes.reshape(-1, 256)[8:] != 0)
        assert np.all(x.scale.reshape(-1)[8:] > 0)
    exact = in_float32(make)(**options)
    expected, _ = jax.jit(exact.update)(late, train(exact, w, [g] * 3)[1], new)
    found, expected = jgrad.unpack(updates)["w"][8:], jgrad.unpack(expected)["w"][8:]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("outlier", [-1e20, *(pytest.param(x, marks=slow) for x in (1e8, 1e20))])
def test_e31_one_outlier(outlier):
    """Blocks beside it are bit for bit as without it; no element of its own steps further than before."""
    tx, w = CONSTANT_FREE(), {"w": jnp.zeros(8192)}
    rows = normal((300, 8192), spread=0.1)

    def run(rows):
        def body(state, g):
            updates, state = tx.update({"w": g}, state, w)
            return state, updates["w"]

        return jax.lax.scan(body, tx.init(w), rows)

    (state, steps), (usual, expected) = (
        jax.jit(run)(rows.at[10, 600].set(outlier)),
        jax.jit(run)(rows),
    )
    own = slice(512, 768)
    beside = lambda x: np.delete(np.asarray(x), np.arange(512, 768), axis=-1)
    np.testing.assert_array_equal(beside(steps), beside(expected))
    for x, y in zip(moments(state), moments(usual), strict=True):
        np.testing.assert_array_equal(beside(x.codes), beside(y.codes))
        np.testing.assert_array_equal(np.delete(x.scale, 2), np.delete(y.scale, 2))
    chex.assert_tree_all_finite(state)
    assert np.max(np.abs(steps[:, own])) <= 1.05 * np.max(np.abs(expected))


@pytest.mark.slow
def test_e32_a_second_moment_above_zero_is_never_zero():
    """Gradients over 15 decades in each block: steps at most twice the longest of float32."""
    w = {"w": jnp.zeros(8192)}
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(10 ** rng.uniform(-12, 3, 8192), jnp.float32).at[::7].set(0)
    rows = normal((400, 8192), 1, spread=0) * sizes[None]

    def run(tx):
        def body(state, g):
            updates, state = tx.update({"w": g}, state, w)
            return state, updates["w"]

        return jax.jit(lambda: jax.lax.scan(body, tx.init(w), rows))()

    state, steps = run(CONSTANT_FREE())
    exact, expected = run(jgrad.adam(RATE, epsilon=0.0))
    v = np.asarray(exact.vw["w"])
    np.testing.assert_array_equal(np.asarray(state.vw["w"].codes) == 0, v == 0)
    assert np.max(np.abs(steps)) <= 2 * np.max(np.abs(expected))
    never = np.asarray(sizes) == 0
    assert not np.any(np.asarray(state.mw["w"].codes)[never])
    assert not np.any(np.asarray(steps)[:, never])


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [-46, *(pytest.param(x, marks=slow) for x in (-27, 33))])
def test_e34_the_same_at_every_scale(exponent):
    """Gradients of 1e-14, 1e-8 and 1e10: the same codes and steps as at 1, bit for bit."""
    # None so small that its square is not a normal number.
    large = lambda x: jnp.where(jnp.abs(x) < 0.01, 0.01, x)
    w, grads = model(), [jax.tree.map(large, g) for g in gradients(5)]
    factor = 2.0**exponent
    tx = CONSTANT_FREE()
    expected, state = train(tx, w, grads)
    scaled = [jax.tree.map(lambda x: x * factor, g) for g in grads]
    found, other = train(tx, w, scaled)
    chex.assert_trees_all_equal(found, expected)
    for name in w:
        for x, y, power in ((state.mw, other.mw, 1), (state.vw, other.vw, 2)):
            np.testing.assert_array_equal(x[name].codes, y[name].codes)
            np.testing.assert_array_equal(x[name].scale * factor**power, y[name].scale)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "size", [1e-19, 3e38, *(pytest.param(x, marks=slow) for x in (1e-23, 1e-38, 1e-42))]
)
@optimizers(ELEMENTWISE)
def test_e34_at_the_ends_of_float32(make, size):
    """Second moments, or gradients, that are subnormal or too large: finite, no longer than float32's."""
    w = {"w": jnp.zeros(4096)}
    g = {"w": jnp.linspace(-size, size, 4096)}
    longest = []
    for tx in (make(), in_float32(make)()):
        state, steps = tx.init(w), []
        for _ in range(4):
            updates, state = jax.jit(tx.update)(g, state, w)
            chex.assert_tree_all_finite((updates, state))
            steps.append(float(np.max(np.abs(updates["w"]))))
        longest.append(max(steps))
    assert longest[0] <= 1.1 * longest[1]


# ---- in the mean -------------------------------------------------------------------------------


def _second_moments(beta2, rows):
    """v of 8192 weights after gradients, a row for each step, of which each broadcasts."""
    tx, w = jgrad.adam(RATE, beta2=beta2, moment_dtype="8bit"), {"w": jnp.zeros(8192)}

    @jax.jit
    def run(rows):
        def body(state, g):
            return tx.update({"w": jnp.tile(g, 32)}, state, w)[1], None

        return jax.lax.scan(body, tx.init(w), rows)[0]

    return value(run(rows).vw["w"]).reshape(32, 256).astype(float)


@pytest.mark.parametrize(
    ("beta2", "steps"), [(0.9999, 2000), pytest.param(0.999999, 2000, marks=slow)]
)
def test_e35_large_betas(beta2, steps):
    """v follows in the mean, from gradients that rise and fall; each weight within 35%."""
    scale = np.where(np.arange(steps) < steps // 4, 0.3, 1.0)[:, None]
    sizes = np.exp(np.random.default_rng(0).normal(size=256))
    rows = jnp.asarray(scale * sizes, jnp.float32)
    v = _second_moments(beta2, rows)
    expected = np.zeros(256)
    for g in np.asarray(rows, float):
        expected = beta2 * expected + (1 - beta2) * g**2
    ratio = v / expected
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(ratio.size)
    assert ratio.std() < 0.35


@pytest.mark.slow
@mostly("packed")
def test_e35_betas_of_zero(packed):
    """m = g and v = g^2, to a neighbour on the grid."""
    w, (g,) = model(), gradients(1)
    tx = jgrad.adam(RATE, beta1=0.0, beta2=0.0, epsilon=0.0, moment_dtype="8bit")
    exact = jgrad.adam(RATE, beta1=0.0, beta2=0.0, epsilon=0.0)
    forms = (jgrad.pack(w), jgrad.pack(g)) if packed else (w, g)
    found, state = train(tx, forms[0], [forms[1]] * 2)
    expected, _ = train(exact, w, [g] * 2)
    chex.assert_trees_all_close(jgrad.unpack(found), expected, rtol=1e-6)
    mw, vw = (
        jgrad.unpack(jax.tree.map(value, x, is_leaf=lambda x: isinstance(x, jgrad.Blocks)))
        for x in (state.mw, state.vw)
    )
    for name in w:
        g0 = np.asarray(g[name])
        floor = 2**-13 * np.max(np.abs(g0))
        np.testing.assert_allclose(mw[name], g0, rtol=1 / 8, atol=floor)
        np.testing.assert_allclose(vw[name], g0**2, rtol=1 / 8, atol=2**-29 * np.max(g0**2))


@pytest.mark.slow
def test_e36_no_gradient_beside_a_busy_neighbour():
    """For 10,000 steps: v decays as beta2^t in the mean, down to the floor."""
    start, steps = 50, 10_000
    busy = np.arange(256) % 2 == 0
    rows = np.ones((start + steps, 256), np.float32)
    rows[start:, ~busy] = 0
    v = _second_moments(0.999, jnp.asarray(rows))
    idle, expected = v[:, ~busy], (1 - 0.999**start) * 0.999**steps
    assert abs(idle.mean() / expected - 1) < 4 * idle.std() / idle.mean() / np.sqrt(idle.size)
    assert idle.min() < expected < idle.max()
    moved, expected = v[:, busy], 1 - 0.999 ** (start + steps)
    assert abs(moved.mean() - expected) < 4 * moved.std() / np.sqrt(moved.size)


def _stored(rule, old, steps, *, stochastic):
    """A moment after steps of a rule of one array, rounded as transformations do, or to the nearest."""
    own = Geometry.of_leaf(old.shape)
    keys = ElementKeys(np.array([1, 2], np.uint32), np.zeros((), np.uint32))

    @jax.jit
    def run(old):
        def body(moment, step):
            rounding = encoding.Rounding(step_keys(step), keys) if stochastic else None
            return encoding.encoded(rule, [moment], own, moment.form.codec, rounding), None

        return jax.lax.scan(body, old, jnp.arange(steps))[0]

    return value(run(old)).astype(float)


@pytest.mark.slow
def test_e36_to_the_nearest_nothing_decays():
    """What rounding to the nearest does, and why this library does not: v stays, for ever."""
    start = encoding.encoded(
        lambda x: x, [jnp.ones(4096)], Geometry.of_leaf((4096,)), codec.UNSIGNED
    )
    keep = lambda x: 0.999 * encoding.decoded(x)
    np.testing.assert_array_equal(_stored(keep, start, 2000, stochastic=False), 1.0)
    found = _stored(keep, start, 2000, stochastic=True)
    assert abs(found.mean() / 0.999**2000 - 1) < 0.1


@pytest.mark.parametrize(("beta", "low", "high"), [(0.9, 0.6, 0.82), (0.99, 0.05, 0.3)])
def test_e35_first_moments_reach_a_constant_gradient(beta, low, high):
    """In the mean, from 0 and whatever their size; to the nearest they stick below it."""
    g = jnp.asarray(np.linspace(1, 2, 4096), jnp.float32)
    rule = lambda x: beta * encoding.decoded(x) + (1 - beta) * g.reshape(x.codes.shape)
    start = encoding.zeros(jnp.zeros(4096), (), codec.of_moments(second=False))
    exact = np.asarray(g, float) * (1 - beta**1000)
    found = _stored(rule, start, 1000, stochastic=True) / exact
    assert abs(found.mean() - 1) < 4 * found.std() / 64 + 1e-3
    stuck = _stored(rule, start, 1000, stochastic=False) / exact
    assert low < stuck.min() < stuck.max() < high


# ---- what is not finite ------------------------------------------------------------------------


@pytest.mark.slow(always=["nan-adam-tree"])
@mostly("tree")
@optimizers(ELEMENTWISE)
@pytest.mark.parametrize("bad", [jnp.nan, pytest.param(-jnp.inf, marks=slow)])
def test_e33_not_finite_in_one_block(make, packed, bad):
    """The scales of that block say so, and no others; `skip_nonfinite` restores codes and scales."""
    w, (a, b, c) = model(), gradients(3)
    broken = b | {"c": b["c"].at[69, 89].set(bad)}  # in the last block, which is shorter
    if packed:
        w, a, broken, c = map(jgrad.pack, (w, a, broken, c))
    _, state = train(make(), w, [a, broken])
    scales = [unpacked(x, "scale") for x in (state.mw, state.vw) if x is not None]
    for i, scale in enumerate(scales):
        wrong = {name: np.flatnonzero(~np.isfinite(np.ravel(x))) for name, x in scale.items()}
        assert wrong["a"].size == 0
        # A second moment counts an infinite gradient as the largest one whose square is finite.
        hidden = i == 1 and not jnp.isnan(bad)
        first = 70 * 90 if hidden else 70 * 90 // 256 * 256
        np.testing.assert_array_equal(wrong["c"], np.arange(first, 70 * 90))
    tx = jgrad.skip_nonfinite(make())
    expected, other = train(tx, w, [a, c])
    found, state = train(tx, w, [broken, a, broken, c, broken])
    assert_equal(found, expected)
    assert_equal(state.inner, other.inner)
    assert int(state.skipped) == 3
