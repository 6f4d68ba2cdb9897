"""States with other numbers in each array, without a step; and what a file keeps of them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

import jgrad


def filled(shapes, seed):
    """A state of these shapes; no two counters are likely to be equal, and padding is zero."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(rng.integers(99))
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return jnp.asarray(rng.integers(2, size=x.shape), bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 99, x.shape), x.dtype)
        return jnp.asarray(2.0 ** rng.integers(-9, 9, x.shape), x.dtype)

    state = jax.tree.map(fill, shapes)
    return jgrad.pack(jgrad.unpack(state), like=state)


def as_file(node):
    """What orbax restores without a target: dictionaries and lists, and nothing for None."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        node = node._asdict()
    elif isinstance(node, jgrad.Packed):
        node = {"buffers": node.buffers}
    if isinstance(node, Mapping):
        return {key: as_file(x) for key, x in node.items() if x is not None}
    return list(map(as_file, node)) if isinstance(node, tuple | list) else node


def assert_same_bits(found, expected):
    """Equal in structure and dtypes, and bit for bit; of keys, their data."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_array_equal(x, y)
