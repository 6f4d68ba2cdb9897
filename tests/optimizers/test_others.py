"""Gradient descent, LARS and LAMB where their steps are easily wrong: roundings, ratios and clamps."""

import math

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import jgrad

# ---- gradient descent: the rate times the gradient, rounded once -----------------------------------


def test_only_what_is_stored_is_rounded():
    """bfloat16 weights take the nearest value to the exact step."""
    w = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
    found = jgrad.gradient_descent_update(w, jnp.ones(3, jnp.bfloat16), 0.123456)
    chex.assert_trees_all_equal(found, (jnp.array([1.0, 2, 3]) - 0.123456).astype(jnp.bfloat16))


numbers = hnp.arrays(np.float32, 3, elements=st.floats(-8, 8, width=32))


@given(w=numbers, g=numbers, rate=st.floats(-2, 2, width=32))
def test_descent_is_linear_in_the_rate(w, g, rate):
    """To the rounding of w - rate g, computed in double precision."""
    found = jgrad.gradient_descent_update(jnp.asarray(w), jnp.asarray(g), rate)
    expected = np.asarray(w, np.float64) - rate * np.asarray(g, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-6)


# ---- LARS: decay in the ratio, and ratios of norms that no float holds -----------------------------


def test_e13_lars_where_decay_cancels_the_gradient():
    """g = -decay w but for a hundredth: the paper's ratio is 200 times smaller than optax's."""
    rng = np.random.default_rng(0)
    w, decay = rng.normal(size=50), 0.1
    d = 0.01 * decay * w
    g = d - decay * w
    norm = np.linalg.norm
    ratios = {
        "paper": 0.001 * norm(w) / (norm(g) + decay * norm(w)),
        "decayed_gradient": 0.001 * norm(w) / norm(d),
    }
    assert ratios["decayed_gradient"] / ratios["paper"] > 190
    w, g = (jnp.asarray(x, jnp.float32) for x in (w, g))
    for rule, ratio in ratios.items():
        rate = 100 / ratio
        tx = jgrad.lars(rate, weight_decay=decay, rule=rule)
        updates, _ = tx.update(g, tx.init(w), w)
        np.testing.assert_allclose(updates, -100 * d, rtol=2e-3, atol=1e-5)
        options = {"trust_coefficient": 0.001, "decay_lambda": decay, "rule": rule}
        found = jgrad.lars_update(w, g, rate, **options)
        np.testing.assert_allclose(found - w, -100 * d, rtol=2e-3, atol=1e-5)
    found = jgrad.lars_update(0 * w, g, 1.0, decay_lambda=decay, rule="decayed_gradient")
    np.testing.assert_allclose(found, -g)  # a norm of zero: ratio 1


@pytest.mark.parametrize(
    ("w", "g"), [(1e20, 1e-20), (1e-25, 1e20), (1e30, 1e-30), (1e-30, 1e30), (1e-3, 1e-37)]
)
def test_lars_where_the_ratio_of_norms_is_no_float(w, g):
    """The step, rate |w| / |g| g, is."""
    w = jnp.full(3, w, jnp.float32)
    step = w - jgrad.lars_update(w, jnp.full(3, g, jnp.float32), 0.5)
    np.testing.assert_allclose(step, 0.5 * w, rtol=1e-6)


# ---- LAMB: clamps of the trust ratio, and leaves without one ---------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("smallest", [0.0, 0.01])
@pytest.mark.parametrize("largest", [0.3, 10.0, None])
def test_e27_clamps_and_exclusions_of_lamb(smallest, largest):
    """DeepSpeed's clamps, its BERT recipe's 0.3, apex's none; leaves left out keep a ratio of 1."""
    sizes = {"tiny": 1e-4, "small": 0.2, "large": 5.0, "huge": 1e4, "out": 1e4}
    w = {name: jnp.full(7, size) for name, size in sizes.items()}
    g = jax.tree.map(jnp.ones_like, w)
    mask = {name: name != "out" for name in w}
    options = {"min_trust_ratio": smallest, "max_trust_ratio": largest, "epsilon": 0.0}
    tx = jgrad.lamb(1.0, trust_ratio_mask=mask, **options)
    updates, _ = tx.update(g, tx.init(w), w)
    zeros = jax.tree.map(jnp.zeros_like, w)
    functional, _, _ = jgrad.lamb_update(w, g, 1.0, zeros, zeros, 1, **options)
    pieces = optax.chain(
        jgrad.scale_by_adam(epsilon=0.0),
        jgrad.scale_by_trust_ratio(
            min_trust_ratio=smallest, max_trust_ratio=largest, trust_ratio_mask=mask
        ),
    )
    direction, _ = pieces.update(g, pieces.init(w), w)
    for name, size in sizes.items():
        ratio = min(max(size, smallest), math.inf if largest is None else largest)
        own = 1.0 if name == "out" else ratio
        np.testing.assert_allclose(updates[name], -own, rtol=1e-5)
        np.testing.assert_allclose(direction[name], own, rtol=1e-5)
        # Its step is the difference of two weights, so right to a unit in the last place of those.
        np.testing.assert_allclose(functional[name], size - ratio, rtol=1e-5, atol=1e-6 * size)
