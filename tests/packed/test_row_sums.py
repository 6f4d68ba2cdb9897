"""Sums of layers over rows, also where they are taken some rows at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._packed.rows import PackedLayers


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("rows", [2, 64, 65, 128, 130, 200])
def test_sums(rows, padding):
    """Of whole turns, and of rows that are left; what is no buffer is there for all rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 256))
    column = rng.uniform(1, 2, size=(rows, 1))
    sizes = [rows // 3, 0, rows - rows // 3 - padding]
    layers = PackedLayers((rows, 256), blocks=tuple(sizes))
    x[sum(sizes) :] = 0  # padding
    f = lambda column, x, factor, none: factor * column * x**2
    arrays = (jnp.asarray(column, float), jnp.asarray(x, float), jnp.asarray(3.0), None)
    found = jax.jit(lambda arrays: layers.sum(f, arrays))(arrays)
    ends = np.cumsum([0, *sizes])
    each = np.sum(3 * column * x**2, axis=1)
    expected = [each[i:j].sum() for i, j in itertools.pairwise(ends)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # a few hundred roundings of 6e-8 / 2
