"""Where blocks are: beside NumPy's, for leaves of many shapes; bytes; NaN; zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._quantized import codec, encoding
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.geometry import Geometry, geometry
from jgrad._quantized.random_bits import ElementKeys, leaf_keys, step_keys
from tests.reference import eight_bits

# (shape, axes over which layers are stacked)
SHAPES = [
    ((1,), ()),
    ((255,), ()),
    ((256,), ()),
    ((257,), ()),
    ((4095,), ()),
    ((4096,), ()),
    ((4097,), ()),
    ((3, 512), ()),
    ((3, 512), (0,)),
    ((3, 512), (1,)),
    ((7, 300), ()),
    ((7, 300), (0,)),
    ((7, 300), (1,)),
    ((7, 300), (0, 1)),
    ((2, 3, 100), (1,)),
    ((4, 3, 2, 65), (0, 2)),
    ((4, 3, 2, 65), (1, 3)),
    ((5, 16, 16), (0,)),
    ((16, 5, 16), (1,)),
    ((16, 16, 5), (2,)),
]
QUICK = [
    ((257,), ()),
    ((3, 512), (1,)),
    ((7, 300), (0,)),
    ((4, 3, 2, 65), (1, 3)),
    ((5, 16, 16), (0,)),
]
every_shape = pytest.mark.parametrize(
    ("shape", "stacked"),
    [pytest.param(*x, id=str(x), marks=() if x in QUICK else pytest.mark.slow) for x in SHAPES],
)
decoded = jax.jit(encoding.decoded)
both = pytest.mark.parametrize("second", [False, True], ids=["first", "second"])


@functools.partial(jax.jit, static_argnames=("stacked", "second"))
def encoded(x, stacked, *, second):
    own = Geometry.for_leaf(x.shape, stacked)
    keys = ElementKeys(leaf_keys(0, 1, [0])[0], np.zeros((), np.uint32))
    rounding = Rounding(step_keys(jnp.int32(1)), keys)
    return encoding.encoded(lambda x: x, [x], own, codec.for_moments(second=second), rounding)


def numbers(shape, *, second, seed=0):
    rng = np.random.default_rng(seed)
    x = np.float32(rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape)))
    return np.abs(x) if second else x


def maxima(x, stacked):
    """The largest magnitude of each block, by NumPy."""
    blocks = eight_bits.blocks_of(x.shape, stacked)
    found = np.zeros(int(blocks.max()) + 1 if blocks.size else 0)
    np.maximum.at(found, blocks.ravel(), np.abs(x).ravel())
    return found, blocks


@pytest.mark.slow(one_in=3)
@every_shape
@both
def test_blocks_and_codes(shape, stacked, second):
    """A scale for each block as NumPy has it, and each element at a neighbour on its grid."""
    x = numbers(shape, second=second)
    found = encoded(x, stacked, second=second)
    assert found.codes.shape == x.shape
    assert geometry(found).is_right
    largest, blocks = maxima(x, stacked)
    scale = np.array([eight_bits.scale_of([m]) for m in largest])
    np.testing.assert_array_equal(np.ravel(found.scale), scale)
    each = scale[blocks] if blocks.size else np.zeros(shape)
    loaded = np.asarray(decoded(found))
    np.testing.assert_array_equal(loaded, eight_bits.decode(found.codes, each))
    step = np.maximum(0.125 * np.abs(x), 1.25 * 2.0 ** (-30 if second else -14) * each)
    assert np.all(np.abs(loaded - x) <= step)
    assert np.all(loaded * x >= 0)


@pytest.mark.slow(always=["((5, 16, 16), (0,))"])
@every_shape
def test_zeros(shape, stacked):
    """Codes 0 and scale 0, of the shapes that the first step writes."""
    for second in (False, True):
        x = jnp.zeros(shape)
        found = encoding.zeros(x, stacked, codec.for_moments(second=second))
        after = jax.eval_shape(functools.partial(encoded, stacked=stacked, second=second), x)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
            lambda x: (x.shape, x.dtype), after
        )
        assert not any(np.any(y) for y in found)


@pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])
def test_bytes_of_states(packed):
    """Of leaves of 4096 elements or more: 2.04 per parameter, of momentum 1.02; 4 below on a tree."""
    tree = {"a": jnp.zeros((64, 64)), "b": jnp.zeros(4097), "c": jnp.zeros((8, 16, 512))}
    params = jgrad.pack(tree) if packed else tree
    count = sum(x.size for x in jax.tree.leaves(tree))
    for make, limit in (
        (lambda: jgrad.adam(0.1, moment_dtype="8bit"), 2.04),
        (lambda: jgrad.lamb(0.1, moment_dtype="8bit"), 2.04),
        (lambda: jgrad.lars(0.1, momentum=0.9, moment_dtype="8bit"), 1.02),
        (lambda: jgrad.gradient_descent(0.1, momentum=0.9, moment_dtype="8bit"), 1.02),
    ):
        state = jax.eval_shape(make().init, params)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.mw, state.vw)))
        assert held <= limit * count
