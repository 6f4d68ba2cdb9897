"""Layers in the rows of a packed buffer, whole or in shards, here mapped over: sums, and numbers of leaves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._layers import array_spec
from jgrad._packed.layouts import Shard
from jgrad._packed.packed_layers import PackedLayers

ROWS = (3, 0, 2, 1)  # rows of each layer; two rows behind them are padding
WHOLE = PackedLayers((8, 256), rows=ROWS)
LAYER_OF_ROW = [0, 0, 0, 2, 2, 3, 3, 3]
SHARD = Shard(("i",), 4)
PART = PackedLayers((2, 256), rows=ROWS, shard=SHARD)


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


def test_shard():
    x = np.arange(24.0).reshape(8, 3)
    np.testing.assert_array_equal(on_each(lambda: SHARD.slice(x)).reshape(8, 3), x)


# ---- sums, also where they are taken some rows at a time ------------------------------------------


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("rows", [2, 64, 65, 128, 130, 200])
def test_sums(rows, padding):
    """Of whole turns, and of rows that are left; what is no buffer is there for all rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 256))
    column = rng.uniform(1, 2, size=(rows, 1))
    sizes = [rows // 3, 0, rows - rows // 3 - padding]
    layers = PackedLayers((rows, 256), rows=tuple(sizes))
    x[sum(sizes) :] = 0  # padding
    f = lambda column, x, factor, none: factor * column * x**2
    arrays = (jnp.asarray(column, float), jnp.asarray(x, float), jnp.asarray(3.0), None)
    found = jax.jit(lambda arrays: layers.sum(f, arrays))(arrays)
    ends = np.cumsum([0, *sizes])
    each = np.sum(3 * column * x**2, axis=1)
    expected = [each[i:j].sum() for i, j in itertools.pairwise(ends)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # a few hundred roundings of 6e-8 / 2


# ---- options of the leaves of a tree, as options of the buffer that holds them ---------------------

(SPEC,) = array_spec.specs(
    jgrad.pack({"a": jnp.ones(3), "b": jnp.ones((2, 300))})
)  # three rows of b, one of a


@pytest.mark.parametrize("kind", [float, jnp.float32, lambda x: np.full(1, x)])
def test_numbers_that_differ_are_a_column(kind):
    found = SPEC.per_array([kind(2.0), kind(3.0)])
    np.testing.assert_array_equal(found, [[3.0], [3.0], [3.0], [2.0]])


@pytest.mark.parametrize("entries", [[2.0, 2.0], [jnp.float32(2.0)] * 2])
def test_a_number_that_all_share_is_one_number(entries):
    assert np.shape(SPEC.per_array(entries)) == ()


def test_no_number_for_one_is_none_for_all():
    assert SPEC.per_array([2.0, None]) is None
