"""LARS: decay in the ratio, and ratios of norms that no float holds."""

import jax.numpy as jnp
import numpy as np
import pytest

import jgrad


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
