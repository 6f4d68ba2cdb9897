"""Each row of docs/from_optax.md that names a test: what optax does, and what jgrad does.

A test that fails because optax has changed is a row of that page that is no longer true.
"""

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


def test_adan_at_other_betas(standard_promotion):
    """From the second step on: beta2 = 0.92 is 1 - 0.08 of the paper, which weighs by 1 - 0.08."""
    a, b, (beta1, beta2, beta3) = 1.0, 3.0, (0.98, 0.92, 0.99)

    def second(weight):
        m = (beta1 * (1 - beta1) * a + (1 - beta1) * b) / (1 - beta1**2)
        d = (1 - beta2) * (b - a) / (1 - beta2**2)
        v = (beta3 * a**2 + (b + weight * (b - a)) ** 2) * (1 - beta3) / (1 - beta3**2)
        return -(m + weight * d) / np.sqrt(v)

    def found(tx):
        w, first, then = (jnp.full(3, x) for x in (0.0, a, b))
        return tx.update(then, tx.update(first, tx.init(w), w)[1], w)[0]

    theirs, ours = found(optax.adan(1.0, eps_root=0.0)), found(jgrad.adan(1.0))
    np.testing.assert_allclose(theirs, second(1 - beta2), rtol=1e-5)
    np.testing.assert_allclose(ours, second(beta2), rtol=1e-5)


def test_a_rate_for_one_call(standard_promotion):
    """optax ignores an extra argument that it does not know."""
    rate = {"learning_rate": 0.5}
    theirs, ours = optax.with_extra_args_support(optax.sgd(0.1)), jgrad.gradient_descent(0.1)
    assert jnp.allclose(theirs.update(G, theirs.init(W), W, **rate)[0]["b"], -0.05)
    assert jnp.allclose(ours.update(G, ours.init(W), W, **rate)[0]["b"], -0.25)


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


def test_a_mini_batch_that_is_not_finite(standard_promotion):
    """In a window of two, with NaN first: the mean is NaN, or that of the other."""
    bad, good = {"b": jnp.full(3, jnp.nan)}, {"b": jnp.full(3, 0.5)}

    def window(tx):
        _, state = tx.update(bad, tx.init(W), W)
        return tx.update(good, state, W)[0]["b"]

    assert jnp.all(jnp.isnan(window(optax.MultiSteps(optax.sgd(0.1), 2))))
    np.testing.assert_allclose(window(jgrad.accumulate(jgrad.gradient_descent(0.1), 2)), -0.05)


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
