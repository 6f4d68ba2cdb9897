"""Layers in the rows of a packed buffer: of a whole one, and of shards, here mapped over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._packed.rows import PackedLayers
from jgrad._packed.shard import Shard

BLOCKS = (3, 0, 2, 1)  # rows of each layer; two rows behind them are padding
WHOLE = PackedLayers((8, 256), blocks=BLOCKS)
LAYER_OF_ROW = [0, 0, 0, 2, 2, 3, 3, 3]
SHARD = Shard(("i",), 4)
PART = PackedLayers((2, 256), blocks=BLOCKS, shard=SHARD)


def on_each(f):
    """What each of four devices finds."""
    return jax.vmap(lambda _: f(), axis_name="i")(jnp.arange(4))


def test_owners():
    np.testing.assert_array_equal(WHOLE.layer_of_row, LAYER_OF_ROW)
    np.testing.assert_array_equal(on_each(lambda: PART.layer_of_row).reshape(-1), LAYER_OF_ROW)


def test_nonempty():
    """A layer that is elsewhere is not a layer of zeros."""
    assert WHOLE.nonempty.tolist() == [True, False, True, True]
    expected = [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(on_each(lambda: PART.nonempty), expected)


@pytest.mark.slow
def test_numbers_of_layers():
    """Spread over rows, and read again where a layer has rows."""
    numbers = jnp.array([1.0, 2.0, 3.0, 4.0])
    column = on_each(lambda: PART.to_elements(numbers))
    np.testing.assert_array_equal(column.reshape(-1, 1), WHOLE.to_elements(numbers))
    read = on_each(lambda: PART.per_layer(PART.to_elements(numbers)))
    nonempty = on_each(lambda: PART.nonempty)
    np.testing.assert_array_equal(read[nonempty], jnp.broadcast_to(numbers, (4, 4))[nonempty])
    np.testing.assert_array_equal(
        WHOLE.per_layer(WHOLE.to_elements(numbers))[WHOLE.nonempty], [1, 3, 4]
    )
    np.testing.assert_array_equal(PART.per_layer(0.5), [0.5] * 4)


def test_shard():
    x = np.arange(24.0).reshape(8, 3)
    np.testing.assert_array_equal(on_each(lambda: SHARD.slice(x)).reshape(8, 3), x)
