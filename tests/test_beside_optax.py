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
from tests.cases import MASK, gradients, params

W = {"b": jnp.ones(3)}
G = {"b": jnp.full(3, 0.5)}


def one_update(tx, w, g):
    return tx.update(g, tx.init(w), w)[0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (optax.sgd(0.05, momentum=0.9), jgrad.gradient_descent(0.05, momentum=0.9)),
        (optax.sgd(0.05, 0.9, True), jgrad.gradient_descent(0.05, momentum=0.9, nesterov=True)),
        (optax.adam(0.05), jgrad.adam(0.05, epsilon=1e-8, bias_correction="moments")),
        (
            optax.adamw(0.05, weight_decay=0.1, mask=MASK),
            jgrad.adam(
                0.05,
                epsilon=1e-8,
                bias_correction="moments",
                weight_decay=0.1,
                weight_decay_mask=MASK,
            ),
        ),
        (optax.lars(0.05), jgrad.lars(0.05)),
        (
            optax.lamb(0.05, weight_decay=0.1, mask=MASK),
            jgrad.lamb(
                0.05,
                epsilon=1e-6,
                bias_correction="moments",
                weight_decay=0.1,
                weight_decay_mask=MASK,
                max_trust_ratio=1e30,
            ),
        ),
    ],
    ids=["momentum", "nesterov", "adam", "adamw", "lars", "lamb"],
)
def test_same_options_same_numbers(theirs, ours, standard_promotion):
    """Twenty steps agree to single precision, where both are right."""

    def train(tx):
        @jax.jit
        def step(w, state, g):
            updates, state = tx.update(g, state, w)
            return optax.apply_updates(w, updates), state

        w = params()
        state = tx.init(w)
        for g in gradients(20):
            w, state = step(w, state, g)
        return w

    chex.assert_trees_all_close(train(ours), train(theirs), rtol=1e-5, atol=1e-5)


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
