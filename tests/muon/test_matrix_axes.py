"""Which axes of a leaf make a matrix, there and back."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._layers.matrix_axes import MatrixAxes
from tests.reference.optimizers import as_matrices


def every_place(rank):
    """Each axis a layer, an output or an input; at least one of the last two each."""
    for kinds in itertools.product("loi", repeat=rank):
        if "o" in kinds and "i" in kinds:
            yield tuple(tuple(i for i, k in enumerate(kinds) if k == kind) for kind in "lo")


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2, 5, 3), (3, 2, 2, 2)])
def test_wide_matrices(shape):
    """The matrices of the reference, transposed where they are tall; and the array again."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for stacked, outputs in every_place(len(shape)):
        axes = MatrixAxes(shape, stacked, outputs)
        expected = as_matrices(x, outputs, stacked)
        assert (axes.count, *axes.sizes) == expected.shape
        found = axes.as_wide.of(jnp.asarray(x))
        assert found.shape == (axes.count, *sorted(axes.sizes))
        if axes.sizes[0] == axes.sizes[1]:  # either way
            as_is = np.array_equal(found, expected)
            assert as_is or np.array_equal(found, expected.transpose(0, 2, 1))
        else:
            tall = axes.sizes[0] > axes.sizes[1]
            np.testing.assert_array_equal(found, expected.transpose(0, 2, 1) if tall else expected)
        np.testing.assert_array_equal(axes.as_wide.back(found), x)
        assert np.broadcast_shapes(axes.per_output, shape) == shape
        assert np.prod(axes.per_output) == axes.count * axes.sizes[0]
