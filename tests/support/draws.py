"""Trees of normal numbers."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(shapes, seed=0, dtype=jnp.float32):
    """A tree of arrays, of one of shapes."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype)
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
