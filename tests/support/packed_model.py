"""A small model for the tests of packed trees, with gradients and options of each leaf.

XLA may round differently in loops over fewer elements than a vector has, so leaves here have more.
"""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {"layer": {"w": (24, 20), "b": (64,)}, "rest": [(3, 16, 10), (32,), (300,)]}
STEPS = 6
SMALL = 300  # elements: two leaves of SHAPES are larger

RATES = {"layer": 0.1, "rest": [0.01, 0.2, 0.0]}
PER_ELEMENT = {"layer": {"w": jnp.linspace(0, 1, 20)[None], "b": 0.1}, "rest": 0.1}
DECAYS = {"layer": {"w": 0.1, "b": 0.0}, "rest": [0.2, 0.0, 0.1]}


def normal(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(10.0 ** rng.uniform(-3, 1) * rng.normal(size=shape), dtype)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def gradients(dtype=jnp.float32):
    """With a layer whose gradient is zero in each third step."""
    found = [normal(i + 1, dtype) for i in range(STEPS)]
    for g in found[::3]:
        g["layer"]["b"] = jnp.zeros_like(g["layer"]["b"])
    return found


def assert_close(found, expected, tolerance=1e-6):
    """By the size of each leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * np.max(np.abs(b), initial=0)
        )
