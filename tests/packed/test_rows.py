"""Layers in the rows of a packed buffer: of a whole one, and of shares, here mapped over."""

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._packed.rows import Rows, Share

BLOCKS = (3, 0, 2, 1)  # rows of each layer; two rows behind them are padding
WHOLE = Rows((8, 256), blocks=BLOCKS)
OWNERS = [0, 0, 0, 2, 2, 3, 3, 3]
SHARE = Share(("i",), 4)
PART = Rows((2, 256), blocks=BLOCKS, share=SHARE)


def on_each(f):
    """What each of four devices finds."""
    return jax.vmap(lambda _: f(), axis_name="i")(jnp.arange(4))


def test_owners():
    np.testing.assert_array_equal(WHOLE.owners, OWNERS)
    np.testing.assert_array_equal(on_each(lambda: PART.owners).reshape(-1), OWNERS)


def test_filled():
    """A layer that is elsewhere is not a layer of zeros."""
    assert WHOLE.filled.tolist() == [True, False, True, True]
    expected = [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(on_each(lambda: PART.filled), expected)


def test_numbers_of_layers():
    """Spread over rows, and read again where a layer has rows."""
    numbers = jnp.array([1.0, 2.0, 3.0, 4.0])
    column = on_each(lambda: PART.spread(numbers))
    np.testing.assert_array_equal(column.reshape(-1, 1), WHOLE.spread(numbers))
    read = on_each(lambda: PART.collect(PART.spread(numbers)))
    filled = on_each(lambda: PART.filled)
    np.testing.assert_array_equal(read[filled], jnp.broadcast_to(numbers, (4, 4))[filled])
    np.testing.assert_array_equal(WHOLE.collect(WHOLE.spread(numbers))[WHOLE.filled], [1, 3, 4])
    np.testing.assert_array_equal(PART.collect(0.5), [0.5] * 4)


def test_share():
    x = np.arange(24.0).reshape(8, 3)
    np.testing.assert_array_equal(on_each(lambda: SHARE.of(x)).reshape(8, 3), x)
