"""Each row of the README's comparison: what optax does, and what jgrad does.

A test that fails because optax has changed is a row of the README that is no longer true.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad

W = {"b": jnp.ones(3)}
G = {"b": jnp.full(3, 0.5)}

# What jgrad does here is tested in other files, too.
pytestmark = pytest.mark.slow


def one_update(tx, w, g):
    return tx.update(g, tx.init(w), w)[0]


def test_a_gradient_of_another_shape(standard_promotion):
    """(3, 1) for (3,): the parameter becomes a matrix, or an error names the leaf."""
    g = {"b": jnp.ones((3, 1))}
    with jax.numpy_rank_promotion("allow"):
        grown = optax.apply_updates(W, one_update(optax.sgd(0.1), W, g))
    assert grown["b"].shape == (3, 3)
    with pytest.raises(ValueError, match=r"\['b'\]: shape \(3, 1\), expected \(3,\)"):
        one_update(jgrad.gradient_descent(0.1), W, g)


def test_numbers_out_of_range():
    optax.adam(0.1, b1=1.5)
    with pytest.raises(ValueError, match=r"`beta1`: 1.5, expected a number in \[0, 1\)"):
        jgrad.adam(0.1, beta1=1.5)


def test_the_state_when_a_rate_becomes_a_schedule():
    def same(make):
        trees = [jax.tree.structure(make(r).init(W)) for r in (0.1, lambda done: 0.1)]
        return trees[0] == trees[1]

    assert not same(optax.adam)
    assert same(jgrad.adam)


def test_moments_of_bfloat16_parameters(standard_promotion):
    """Second moments of 1 under zero gradients: those in bfloat16 never shrink."""
    w = {"b": jnp.ones(3, jnp.bfloat16)}
    zero = jax.tree.map(jnp.zeros_like, w)

    state = optax.adam(0.1).init(w)
    state = (state[0]._replace(nu=jax.tree.map(jnp.ones_like, state[0].nu)), *state[1:])
    state = optax.adam(0.1).update(zero, state, w)[1]
    assert state[0].nu["b"].dtype == jnp.bfloat16
    assert jnp.all(state[0].nu["b"] == 1)

    state = jgrad.adam(0.1).init(w)
    state = state._replace(vw=jax.tree.map(jnp.ones_like, state.vw))
    state = jgrad.adam(0.1).update(zero, state, w)[1]
    np.testing.assert_allclose(state.vw["b"], 0.999, rtol=1e-6)


def test_lars_with_decay(standard_promotion):
    """The paper's local rate has |g| + decay |w| below the line, and not |g + decay w|."""
    w, g, decay = np.array([3.0, 4.0]), np.array([0.0, 2.0]), 0.5
    d = g + decay * w
    paper = 0.001 * 5 / (2 + decay * 5) * d
    other = 0.001 * 5 / np.linalg.norm(d) * d
    args = {"b": jnp.asarray(w, jnp.float32)}, {"b": jnp.asarray(g, jnp.float32)}
    theirs = one_update(optax.lars(1.0, weight_decay=decay), *args)["b"]
    np.testing.assert_allclose(theirs, -other, rtol=1e-6)
    ours = one_update(jgrad.lars(1.0, weight_decay=decay), *args)["b"]
    np.testing.assert_allclose(ours, -paper, rtol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "ours", "ratio"),
    [
        (optax.lars(1.0), jgrad.lars(1.0), 0.001),
        (optax.lamb(1.0), jgrad.lamb(1.0, max_trust_ratio=1e30), 1.0),
    ],
    ids=["lars", "lamb"],
)
@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_trust_ratios_at_every_scale(theirs, ours, ratio, scale, standard_promotion):
    """Steps in proportion to the weights; squares of these weights are inf, or 0."""
    w, g = {"b": jnp.full(3, scale)}, {"b": jnp.ones(3)}
    found = one_update(theirs, w, g)["b"]
    assert not np.allclose(found, -ratio * scale, rtol=1e-3, atol=0)
    np.testing.assert_allclose(one_update(ours, w, g)["b"], -ratio * scale, rtol=1e-5)


def test_slope_of_the_update_at_zero_gradients(standard_promotion):
    def slope(tx):
        return jax.grad(lambda g: jnp.sum(one_update(tx, W, {"b": g})["b"]))(jnp.zeros(3))

    assert jnp.all(jnp.isnan(slope(optax.adam(0.1))))
    assert jnp.all(jnp.isfinite(slope(jgrad.adam(0.1))))


def test_integer_leaves(standard_promotion):
    w, g = W | {"n": jnp.arange(2)}, G | {"n": np.zeros(2, jax.dtypes.float0)}
    with pytest.raises(TypeError):
        one_update(optax.adam(0.1), w, g)
    new = optax.apply_updates(w, one_update(jgrad.adam(0.1), w, g))
    assert new["n"].dtype == jnp.int32
    assert new["n"].tolist() == [0, 1]


def test_strict_dtype_promotion():
    """The suite's own setting."""
    for tx in (optax.adam(0.1), optax.lamb(0.1)):
        with pytest.raises(Exception, match="implicit dtype promotion"):
            one_update(tx, W, G)
    for tx in (jgrad.adam(0.1), jgrad.lamb(0.1)):
        chex.assert_tree_all_finite(one_update(tx, W, G))


def test_a_rate_for_one_call(standard_promotion):
    """optax ignores an extra argument that it does not know."""
    rate = {"learning_rate": 0.5}
    theirs, ours = optax.with_extra_args_support(optax.sgd(0.1)), jgrad.gradient_descent(0.1)
    assert jnp.allclose(theirs.update(G, theirs.init(W), W, **rate)[0]["b"], -0.05)
    assert jnp.allclose(ours.update(G, ours.init(W), W, **rate)[0]["b"], -0.25)


def test_small_gradients_in_float16(standard_promotion):
    """An epsilon of 1e-8 is 0 in float16."""
    w, g = {"b": jnp.ones(3, jnp.float16)}, {"b": jnp.full(3, 1e-4, jnp.float16)}
    assert not np.any(np.isfinite(one_update(optax.adam(0.1), w, g)["b"]))
    np.testing.assert_allclose(
        one_update(jgrad.adam(0.1, epsilon=1e-8), w, g)["b"], -0.1, rtol=1e-2
    )


def test_one_gradient_of_1e20(standard_promotion):
    """Its square is infinite: the second moment stays so, and holds its weight for ever."""

    def moved(tx):
        w, state = W, tx.init(W)
        for value in (1e20, 1.0, 1.0, 1.0):
            updates, state = tx.update({"b": jnp.full(3, value)}, state, w)
            w = optax.apply_updates(w, updates)
        second = optax.tree.get(state, "nu" if optax.tree.get(state, "vw") is None else "vw")
        return w["b"], second["b"]

    w, second = moved(optax.adam(0.1))
    assert jnp.all(w == 1)
    assert jnp.all(jnp.isinf(second))
    w, second = moved(jgrad.adam(0.1))
    assert jnp.all(w < 0.9)
    assert jnp.all(jnp.isfinite(second))


def test_bias_correction_near_one(standard_promotion):
    """beta2 = 0.999999 at the first step, where sqrt(1 - beta2) / sqrt(1 - beta2^1) is 1."""
    theirs = one_update(optax.scale_by_adam(b1=0.0, b2=0.999999, eps=0.0), W, G)["b"]
    ours = one_update(jgrad.scale_by_adam(beta1=0.0, beta2=0.999999, epsilon=0.0), W, G)["b"]
    assert np.all(np.abs(np.asarray(theirs) - 1) > 1e-3)
    np.testing.assert_allclose(ours, 1, rtol=1e-6)


def test_state_of_bfloat16_parameters_with_float32_gradients(standard_promotion):
    """optax's first moment changes its dtype at the first step."""
    w, g = {"b": jnp.ones(3, jnp.bfloat16)}, {"b": jnp.ones(3)}
    for tx, same in ((optax.adam(0.1), False), (jgrad.adam(0.1), True)):
        state = tx.init(w)
        new = jax.eval_shape(tx.update, g, state, w)[1]
        dtypes = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (state, new)]
        assert (dtypes[0] == dtypes[1]) == same


def test_small_steps_of_bfloat16_parameters(standard_promotion):
    """500 steps of 1e-3 from 1, which has 2^-8 to the number below."""
    w, g = {"b": jnp.ones(3, jnp.bfloat16)}, {"b": jnp.ones(3, jnp.bfloat16)}

    def train(tx):
        def body(carry, _):
            updates, state = tx.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (w, tx.init(w)), length=500)[0][0]["b"]

    assert jnp.all(train(optax.sgd(1e-3)) == 1)
    found = train(jgrad.master_weights(jgrad.gradient_descent(1e-3)))
    np.testing.assert_allclose(np.asarray(found, float), 0.5, rtol=4e-3)


def test_layers_stacked_for_scan(standard_promotion):
    """Two layers of scales 10 and 0.001: one ratio for both, or one for each."""
    scale = jnp.array([[10.0], [0.001]])
    w, g = {"s": scale * jnp.ones((2, 4))}, {"s": jnp.ones((2, 4))}
    theirs = one_update(optax.lamb(1.0, eps=0.0), w, g)["s"]
    ours = one_update(jgrad.lamb(1.0, epsilon=0.0, layer_axes=0), w, g)["s"]
    np.testing.assert_allclose(theirs, -np.sqrt(50.0), rtol=1e-3)
    np.testing.assert_allclose(ours, -scale * np.ones((1, 4)), rtol=1e-5)


def test_layers_shard_over_a_mesh_axis(standard_promotion):
    """A leaf in two parts, here by `vmap`, of norms 10 and 0.001; so under shard_map and pmap."""
    parts, g = jnp.array([[10.0], [0.001]]), jnp.ones((2, 1))
    whole = np.linalg.norm(parts) / np.linalg.norm(g)

    def update(tx):
        own = lambda w, g: tx.update(g, tx.init(w), w)[0]
        return jax.vmap(own, axis_name="data")(parts, g)

    np.testing.assert_allclose(update(optax.lamb(1.0, eps=0.0)), -parts, rtol=1e-3)
    ours = update(jgrad.lamb(1.0, epsilon=0.0, mesh_axes="data"))
    np.testing.assert_allclose(ours, -whole, rtol=1e-5)


def test_clipping_of_float16_gradients(standard_promotion):
    """100 gradients of 300 have a norm of 3000 and a sum of squares of 9e6; float16 ends at 65504."""
    g = {"b": jnp.full(100, 300, jnp.float16)}
    theirs = optax.clip_by_global_norm(30.0).update(g, optax.EmptyState())[0]["b"]
    ours = jgrad.clip_by_global_norm(30.0).update(g, optax.EmptyState())[0]["b"]
    assert jnp.all(theirs == 0)
    np.testing.assert_allclose(ours, 3.0, rtol=1e-3)


def test_clipping_to_zero_of_zero(standard_promotion):
    g = {"b": jnp.zeros(3)}
    assert jnp.all(jnp.isnan(optax.clip_by_global_norm(0.0).update(g, optax.EmptyState())[0]["b"]))
    assert jnp.all(jgrad.clip_by_global_norm(0.0).update(g, optax.EmptyState())[0]["b"] == 0)


def test_a_mini_batch_that_is_not_finite(standard_promotion):
    """In a window of two, with NaN first: the mean is NaN, or that of the other."""
    bad, good = {"b": jnp.full(3, jnp.nan)}, {"b": jnp.full(3, 0.5)}

    def window(tx):
        _, state = tx.update(bad, tx.init(W), W)
        return tx.update(good, state, W)[0]["b"]

    assert jnp.all(jnp.isnan(window(optax.MultiSteps(optax.sgd(0.1), 2))))
    np.testing.assert_allclose(window(jgrad.accumulate(jgrad.gradient_descent(0.1), 2)), -0.05)


def test_accumulation_in_double_precision(standard_promotion, x64):
    """The mean of three: optax multiplies by a float32 third."""
    g = [{"b": jnp.asarray([1.1, -2.3, 0.7]) * i} for i in (1, 2, 4)]
    expected = -np.array([1.1, -2.3, 0.7]) * 7 / 3

    def error(tx):
        w = {"b": jnp.zeros(3)}
        state = tx.init(w)
        for x in g:
            updates, state = tx.update(x, state, w)
        assert updates["b"].dtype == jnp.float64
        return np.max(np.abs(updates["b"] / expected - 1))

    assert error(optax.MultiSteps(optax.sgd(1.0), 3)) > 1e-9
    assert error(jgrad.accumulate(jgrad.gradient_descent(1.0), 3)) < 1e-15


def test_many_steps_that_are_not_finite(standard_promotion):
    """optax gives up after as many as it is told, and writes NaN."""
    bad = {"b": jnp.full(3, jnp.nan)}

    def train(tx):
        w, state = W, tx.init(W)
        for _ in range(5):
            updates, state = tx.update(bad, state, w)
            w = optax.apply_updates(w, updates)
        return w["b"]

    assert jnp.all(jnp.isnan(train(optax.apply_if_finite(optax.sgd(0.1), 3))))
    assert jnp.all(train(jgrad.skip_nonfinite(jgrad.gradient_descent(0.1))) == 1)
