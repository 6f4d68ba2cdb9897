"""Another codec, of 4 bits, and blocks along another axis, by the same functions as those of 8 bits.

Neither is public. What they take is a `Codec` and a `Form`, as here, and a word for users in
`_inputs/state.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import jgrad
from jgrad._quantized import codec, encoding
from jgrad._quantized.codec import SIGNED, UNSIGNED, Codec
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.geometry import Geometry, geometry
from jgrad._quantized.random_bits import ElementKeys, leaf_keys, step_keys
from jgrad._trees.forms import Form
from tests.reference import eight_bits
from tests.support.errors import assert_error

# ---- a codec of 4 bits ---------------------------------------------------------------------------

STEP = 0.25  # the largest magnitude of a block is at most 1.875 times its scale: within half a step


def _encode(x, inverse, random):
    """-7 to 7, in the lowest four bits."""
    uniform = (random >> 8).astype(jnp.float32) * 2.0**-24
    code = jnp.clip(jnp.floor(x * inverse / STEP + uniform), -7, 7).astype(jnp.int32)
    return (code & 15).astype(jnp.uint8)


def _decode(codes, scale):
    code = codes.astype(jnp.int32)
    return (code - 16 * (code >= 8).astype(jnp.int32)).astype(jnp.float32) * STEP * scale


FOUR = Codec("4 bits", 4, True, _encode, _decode)
SHAPES = [
    ((512, 16), ()),
    ((16, 512), ()),
    ((70, 51), ()),
    ((4097,), ()),
    ((3, 512), (0,)),
    ((300, 7), (1,)),
    ((4, 3, 2, 65), (1, 3)),
]


def numbers(shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def rounding(step):
    keys = ElementKeys(leaf_keys(0, 1, [0])[0], np.zeros((), np.uint32))
    return Rounding(step_keys(jnp.asarray(step, jnp.int32)), keys)


@functools.partial(jax.jit, static_argnames=("own", "which"))
def encoded(x, own, which, step=None):
    found = None if step is None else rounding(step)
    return encoding.encoded(lambda x: x, [x], own, which, found)


decoded = jax.jit(encoding.decoded)


@pytest.mark.parametrize(("shape", "stacked"), SHAPES, ids=str)
def test_two_codes_in_a_byte(shape, stacked):
    """Half the bytes, the shape of the array, scales of 256 elements, and numbers within half a step."""
    x = numbers(shape)
    found = encoded(x, Geometry.of_leaf(shape, stacked), FOUR)
    assert (found.codes.dtype, found.shape) == (jnp.uint8, shape)
    assert found.codes.shape == (*shape[:-1], -(-shape[-1] // 2))
    assert geometry(found).is_right
    blocks = eight_bits.blocks_of(shape, stacked)
    largest = np.zeros(blocks.max() + 1)
    np.maximum.at(largest, blocks.ravel(), np.abs(x).ravel())
    scale = np.array([eight_bits.scale_of([m]) for m in largest])
    np.testing.assert_array_equal(np.ravel(found.scale), scale)
    loaded = np.asarray(decoded(found))
    assert np.all(np.abs(loaded - x) <= 0.5 * STEP * scale[blocks])
    codes = loaded / scale[blocks] / STEP
    assert set(range(-5, 6)) <= set(np.unique(codes)) <= set(range(-7, 8))
    again = encoded(loaded, Geometry.of_leaf(shape, stacked), FOUR)
    np.testing.assert_array_equal(decoded(again), loaded)


def test_four_bits_are_rounded_stochastically():
    """In the mean the numbers, within five standard deviations; the same step rounds alike."""
    x, own = numbers((4099,)), Geometry.of_leaf((4099,))
    steps = 400
    draws = [np.asarray(decoded(encoded(x, own, FOUR, t))) for t in range(steps)]
    one = encoded(x, own, FOUR, 1)
    np.testing.assert_array_equal(decoded(one), draws[1])
    gap = STEP * np.asarray(own.per_element(one.scale))
    between = np.abs(x) <= 7 * gap  # others are off by half a step at most, and always have code 7
    off = np.abs(np.mean(draws, axis=0) - x)
    # A share of 400 draws is one of p to within 5 standard deviations and one draw.
    share = np.abs(x) / gap % 1
    assert np.all((off <= gap * (5 * np.sqrt(share * (1 - share) / steps) + 5 / steps))[between])
    assert np.all(np.isin(np.ptp(draws, axis=0), [0, *np.unique(gap)]))
    assert np.mean(np.ptp(draws, axis=0) > 0) > 0.9


W = {"a": jnp.ones((16, 512)), "c": jnp.ones((70, 91)), "s": jnp.ones((5, 900)), "b": jnp.ones(10)}


def momentum():
    return jgrad.gradient_descent(0.1, momentum=0.9, moment_dtype="8bit")


def as_first_moments(monkeypatch, form):
    """First moments in this form, wherever one place says which they are."""
    usual = codec.of_moments
    choose = lambda *, second: usual(second=True) if second else form
    monkeypatch.setattr(codec, "of_moments", choose)


# ---- another axis --------------------------------------------------------------------------------

ALONG = [
    ((512, 24), -2),
    ((300, 24), -2),
    ((100, 24), -2),
    ((3, 513, 5), -2),
    ((600, 2, 9), -3),
    ((4, 700), -1),
]


@pytest.mark.slow(one_in=8)
@pytest.mark.parametrize("which", [SIGNED, UNSIGNED, FOUR], ids=["signed", "unsigned", "4 bits"])
@pytest.mark.parametrize(("shape", "axis"), ALONG, ids=str)
def test_blocks_along_another_axis(shape, axis, which):
    """Those of the last axis, once the array is turned: codes and scales bit for bit."""
    x = np.abs(numbers(shape)) if which is UNSIGNED else numbers(shape)
    found = encoded(x, Geometry.of_leaf(shape, axis=axis), which)
    count = -(-shape[axis] // 256)
    assert found.scale.shape == (*shape[:axis], count, *shape[len(shape) + axis + 1 :])
    assert found.form == Form(which, axis, padding=found.form.padding)
    assert geometry(found).is_right
    turned = np.moveaxis(x, axis, -1)
    rows = turned.reshape(-1, shape[axis])
    for i in range(count):
        part = rows[:, 256 * i : 256 * (i + 1)]
        own = encoded(part, Geometry.of_leaf(part.shape, (0,)), which)  # a block for each row
        block = np.moveaxis(np.asarray(found.scale), axis, -1).reshape(-1, count)[:, i]
        np.testing.assert_array_equal(np.ravel(own.scale), block)
        each = np.moveaxis(np.asarray(decoded(found)), axis, -1).reshape(rows.shape)
        np.testing.assert_array_equal(decoded(own), each[:, 256 * i : 256 * (i + 1)])


def test_layers_and_packed_rows_have_no_other_axis(monkeypatch):
    """A block there would straddle layers, or leaves."""
    with pytest.raises(ValueError, match=r"blocks along axis -2 of \(3, 4\) would straddle layers"):
        Geometry.of_leaf((3, 4), (0,), axis=-2)
    as_first_moments(monkeypatch, Form(SIGNED, axis=-2))
    packed = jgrad.pack(W)
    rows = dict(packed.layout.shapes)["float32"][0]
    message = f"unpack: `tree`: `scale` of shape (1, 256) in the buffer 'float32', expected a number for each row, of shape ({rows}, 1)."
    assert_error(ValueError, message, lambda: jgrad.unpack(momentum().init(packed)))


SCALES = [
    ((1024, 64), -2, P("a"), P("a")),
    ((512, 64), -2, P("a"), P()),
    ((512, 64), -2, P(None, "b"), P(None, "b")),
    ((1024, 64), -2, P("a", "b"), P("a", "b")),
    ((512, 64), -2, P("a", "b"), P(None, "b")),
    ((64, 1024), -1, P(None, "b"), P(None, "b")),
]


@pytest.mark.parametrize(("shape", "axis", "spec", "expected"), SCALES, ids=str)
def test_scales_are_sharded_as_codes(shape, axis, spec, expected):
    """Along the axis of blocks only where a shard has whole ones."""
    place = NamedSharding(AbstractMesh((4, 2), ("a", "b")), spec)
    assert Geometry.of_leaf(shape, axis=axis).sharding_of_scale(place).spec == expected
