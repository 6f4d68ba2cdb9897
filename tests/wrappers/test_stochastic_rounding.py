"""bfloat16 parameters without a copy, rounded stochastically."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params
from tests.support import packed_model as packed
from tests.support.loops import assert_equal, step_of, train

BF16 = jnp.bfloat16
ADAMW = jgrad.adam(1e-3, weight_decay=0.1)
LARGEST = float(jnp.finfo(BF16).max)
X = jnp.ones(3, BF16)


def of_step(seed=0):
    """Adds what it is given, so that the gradient is the step."""
    return jgrad.stochastic_rounding(optax.identity(), seed=seed)


@functools.lru_cache(maxsize=8)
def adder(seed=0):
    tx = of_step(seed)
    return jax.jit(lambda w, u, step=0: tx.update(u, state_at(tx, w, step), w)[0])


def state_at(tx, w, step):
    state = tx.init(w)
    return state._replace(done=jnp.asarray(step, jnp.int32))


def added(w, u, step=0, seed=0):
    """Weights after a step `u`."""
    return optax.apply_updates(w, adder(seed)(w, u, step))


def wide(x):
    return np.asarray(x, np.float64)


def around(x):
    """The bfloat16 numbers below and above, by their size."""
    bits = np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000
    return (b.astype(np.uint32).view(np.float32) for b in (bits, bits + 0x10000))


# ---- edge 14: the rounding ---------------------------------------------------------------------


def test_e46_the_mean_over_steps():
    """Within four standard deviations, for each of 512 weights of all signs and scales."""
    count = 400
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=512) * 2.0 ** rng.integers(-20, 20, 512), BF16)
    u = jnp.asarray(wide(w) * rng.uniform(-0.01, 0.01, 512), jnp.float32)
    new = np.asarray(jnp.asarray(w, jnp.float32) + u)
    found = wide(jax.vmap(lambda step: added(w, u, step))(jnp.arange(count)))
    low, high = around(new)
    assert np.all((found == low) | (found == high))
    share = (new - low.astype(float)) / (high.astype(float) - low)
    deviation = np.sqrt(share * (1 - share) / count) * np.abs(high.astype(float) - low)
    assert np.all(np.abs(found.mean(0) - new) <= 4.5 * deviation + 1e-12 * np.abs(new))
    distance = (found.mean(0) - new) / np.where(deviation > 0, deviation, 1)
    assert abs(distance.mean()) < 4 / np.sqrt(512)
    assert 0.8 < distance.std() < 1.2


def test_e46_exact_numbers_do_not_move():
    """Weights whose new value is a bfloat16 number get it, whatever the bits; so does a step of 0."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(np.concatenate([rng.normal(size=1000), [0.0, -0.0, 1.0, LARGEST]]), BF16)
    for step in range(5):
        assert_equal(added(w, jnp.zeros(w.shape), step), w)
    new = (w[:-1] * jnp.bfloat16(1.25)).astype(BF16)
    u = new.astype(jnp.float32) - w[:-1].astype(jnp.float32)
    np.testing.assert_array_equal(wide(added(w[:-1], u)), wide(new))


def test_e46_what_is_not_finite_stays():
    w = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 1.0, 1.0, 1.0], BF16)
    u = jnp.asarray([-1.001, 1.001, 1.0, jnp.inf, -jnp.inf, jnp.nan])
    expected = [jnp.inf, -jnp.inf, jnp.nan, jnp.inf, -jnp.inf, jnp.nan]
    for step in range(5):
        np.testing.assert_array_equal(wide(added(w, u, step)), expected)
        zero = jnp.zeros(6)
        np.testing.assert_array_equal(wide(added(w, zero, step)), wide(w))


def test_e46_the_largest_number_does_not_become_infinite():
    """Towards the largest float32, and from one end to the other."""
    w = jnp.asarray([LARGEST, -LARGEST, LARGEST, 3e38, 0.0, 0.0, -3e38], BF16)
    u = jnp.asarray([1e36, -1e36, 2.0, 3.5e37, 3.4e38, -3.4e38, 3.4e38])
    for step in range(20):
        found = added(w, u, step)
        chex.assert_tree_all_finite(found)
        assert jnp.all(jnp.abs(found[:6].astype(jnp.float32)) >= 3e38)


@pytest.mark.slow
def test_e46_decay_and_step_are_rounded_once():
    """As the sum of both is, in float32: bit for bit the weights of a transformation that adds it."""
    w, (g,) = params(BF16), gradients(1, BF16)
    tx = jgrad.stochastic_rounding(ADAMW)
    updates, _ = jax.jit(tx.update)(g, tx.init(w), w)
    single = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    both, _ = jax.jit(ADAMW.update)(single(g), ADAMW.init(single(w)), single(w))
    identity = of_step()
    expected, _ = jax.jit(identity.update)(both, identity.init(w), w)
    found = [jax.tree.leaves(optax.apply_updates(w, x)) for x in (updates, expected)]
    same = [np.mean(wide(a) == wide(b)) for a, b in zip(*found, strict=True) if a.size]
    assert min(same) > 0.9  # XLA may contract products and sums in one program only


# ---- edge 17: which bits -----------------------------------------------------------------------


def test_e44_weights_seeds_steps_and_leaves_have_bits_of_their_own():
    """A step of half a unit goes up or down, differently for each."""
    w = {"a": jnp.ones(4096, BF16), "b": jnp.ones(4096, BF16)}
    u = jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-8), w)
    rows = [
        wide(x) > 1
        for seed in (0, 1, 2**31 - 1)
        for step in (0, 1, 2, 1000)
        for x in added(w, u, step, seed).values()
    ]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            assert abs(np.mean(a == b) - 0.5) < 5 * 0.5 / np.sqrt(4096)


def test_e44_weights_a_saturated_counter_repeats_its_bits():
    """It stays at the last step, and training goes on."""
    tx, w = of_step(), jnp.ones(100, BF16)
    last = np.iinfo(np.int32).max
    state = tx.init(w)._replace(done=jnp.asarray(last - 1, jnp.int32))
    u = jnp.full(100, 2.0**-8)
    found = []
    for _ in range(3):
        updates, state = tx.update(u, state, w)
        found.append(updates)
        assert int(state.done) == last
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


# ---- edge 11: tree = packed ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("form", ["packed", "pack_small", "pack_small inside", "in part packed"])
def test_e40_weights_packed_is_the_tree(form):
    """Bit for bit, with the steps of Adam."""
    w, grads = packed.normal(0, BF16), packed.gradients(BF16)
    tx = jgrad.stochastic_rounding(ADAMW, seed=3)
    expected, _ = train(tx, w, grads)
    if form.startswith("pack_small"):
        small = functools.partial(jgrad.pack_small, max_size=packed.SMALL)
        inside = jgrad.stochastic_rounding(small(ADAMW), seed=3)
        found, _ = train(inside if "inside" in form else small(tx), w, grads)
    else:
        pack = functools.partial(jgrad.pack, max_size=packed.SMALL if "part" in form else None)
        found, _ = train(tx, pack(w), [pack(g) for g in grads])
        found = jgrad.unpack(found)
    assert_equal(found, expected)


@pytest.mark.slow(always=["1"])
@pytest.mark.bits
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_e40_layers_of_a_packed_leaf(axis):
    """Elements are counted layer after layer, as if the axis of the layers were the first one.

    So bits are those of the tree, or of a tree in which it is; of weights, and of moments.
    """
    rng = np.random.default_rng(0)
    w, g = ({"w": jnp.asarray(rng.normal(size=(64, 70)), BF16)} for _ in range(2))
    tx = jgrad.stochastic_rounding(jgrad.lion(1e-3, moment_dtype=BF16))
    pack = functools.partial(jgrad.pack, layer_axes=axis)
    found = jgrad.unpack(train(tx, pack(w), [pack(g)] * 2))
    first = lambda tree: jax.tree.map(
        lambda x: jnp.moveaxis(x, axis or 0, 0) if x.ndim else x, tree
    )
    expected = train(tx, first(w), [first(g)] * 2)
    assert_equal(first(found), expected)
    if axis == 1:
        assert np.any(found[0]["w"] != train(tx, w, [g] * 2)[0]["w"])


# ---- what it is for ----------------------------------------------------------------------------


def test_e07_small_steps_in_the_mean():
    """5000 steps of -1e-5 from 1 lead to 0.95, where rounding to the nearest stays at 1."""
    w, g = jnp.ones(4096, BF16), jnp.ones(4096, BF16)

    def after(tx):
        body = lambda carry, _: (step_of(tx)(*carry, g), None)
        loop = lambda *carry: jax.lax.scan(body, carry, length=5000)[0][0]
        return wide(jax.jit(loop)(w, tx.init(w)))

    np.testing.assert_array_equal(after(jgrad.gradient_descent(1e-5)), 1)
    found = after(jgrad.stochastic_rounding(jgrad.gradient_descent(1e-5)))
    # Each step moves a weight by 2^-8 with probability 1e-5 * 2^8.
    deviation = np.sqrt(5000 * 1e-5 * 2.0**-8)
    assert abs(found.mean() - 0.95) < 4 * deviation / np.sqrt(4096)
    assert 0.9 < found.std() / deviation < 1.1


def test_a_weight_that_jumps():
    """Up, down or to the other sign: within one unit of the larger from one of both neighbours."""
    count = 100
    rng = np.random.default_rng(0)
    draw = lambda: rng.uniform(-1, 1, 2000) * 2.0 ** rng.integers(-6, 7, 2000)
    w, u = jnp.asarray(draw(), BF16), jnp.asarray(draw(), jnp.float32)
    new = np.asarray(w.astype(jnp.float32) + u)
    found = wide(jax.vmap(lambda step: added(w, u, step))(jnp.arange(count)))
    neighbours = np.stack([x.astype(float) for x in around(new)])
    larger = np.maximum(np.abs(wide(w)), np.max(np.abs(neighbours), axis=0))
    unit = 2.0 ** (np.floor(np.log2(larger)) - 7)
    assert np.all(np.min(np.abs(found[:, None] - neighbours), axis=1) <= unit)
    error = (found.mean(0) - new) / unit
    assert np.max(np.abs(error)) < 1 + 5 / np.sqrt(count)
    assert abs(np.mean(error)) < 0.02


def test_the_average_inside_is_of_unrounded_weights():
    tx = jgrad.stochastic_rounding(jgrad.average_params(jgrad.gradient_descent(1e-5), 0.0))
    updates, state = tx.update(X, tx.init(X), X)
    np.testing.assert_allclose(optax.tree.get(state, "average"), 1 - 1e-5, rtol=1e-7)
    assert updates.dtype == BF16


# ---- under JAX's transformations ---------------------------------------------------------------


def test_slopes_are_those_of_the_step():
    """As if nothing were rounded: 1, also for a step that moves no weight."""
    tx, w = of_step(), jnp.ones(64, BF16)
    state = tx.init(w)
    total = lambda u: jnp.sum(tx.update(u, state, w)[0].astype(jnp.float32))
    np.testing.assert_array_equal(jax.grad(total)(jnp.full(64, 1e-6)), 1)


def test_leaves_of_one_shape_share_their_trace():
    """The program of a hundred leaves is traced with few calls of the rule."""
    w = [jnp.ones((8, 8), BF16) for _ in range(64)]
    tx = of_step()
    text = str(jax.make_jaxpr(tx.update)(w, jax.eval_shape(tx.init, w), w))
    assert text.count("name=_together") <= 64 // 16 + 1
