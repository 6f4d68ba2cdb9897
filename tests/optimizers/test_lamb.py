"""LAMB: clamps of the trust ratio, and leaves without one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad


@pytest.mark.slow(one_in=6)
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
