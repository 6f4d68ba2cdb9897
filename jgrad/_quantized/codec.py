"""Codecs, which encode numbers in few bits: the 8-bit ones, and which moments use which.

A code consists of the upper bits of a float32 number, with its exponent counted from the smallest
one in use. Encoding is therefore integer arithmetic on bits, without tables, searches or rounded
divisions. If a block has the scale s, its largest magnitude is in [s, 2 s):

    unsigned, uint8:  0, and 255 numbers from 1.125 2^-30 s to 3.75 s
    signed, int8:     0, and 127 numbers of each sign from 1.125 2^-14 s to 3.75 s

Neighbours are 6 to 12% apart. A number in between is rounded up or down at random, so that the mean
is right; with rounding to nearest, a decay of 0.1% would never happen. An unsigned number above 0
becomes at least the smallest nonzero number, because a second moment of 0 would make the next step
too long. A signed number below the smallest one becomes 0. Numbers below the smallest normal
float32 count as 0.

Decoded numbers are encoded as themselves, because s only changes by powers of two.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._quantized.blocks import Blocks

_DROPPED = 20  # bits of a float32 below the three of the mantissa that are kept
_ONE = 127 << 3  # the upper bits of 1.0
_UNSIGNED_ZERO = _ONE - (30 << 3)  # those of 2^-30, of which the code would be 0
_SIGNED_ZERO = _ONE - (14 << 3)
_SIGN_REMOVED, _INFINITY = 0x7FFFFFFF, 0x7F800000
_LARGEST_SCALE = (127 + 126) << 23  # 2^126: 3.75 times that is still a float32 number

HALF = 1 << 31  # instead of random bits: rounds to the nearest


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of float32 numbers as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def magnitude(x: jax.Array) -> jax.Array:
    """|x| as int32: in the same order, with NaN above infinity, so that a maximum sees NaN.

    On XLA's CPU backend the maximum of floating numbers does not.
    """
    return bits_of(x) & _SIGN_REMOVED


@jax.custom_jvp
def scale_of(largest: jax.Array) -> jax.Array:
    """The power of two for a block whose largest magnitude has these bits; itself if not finite.

    A magnitude in the last eighth below a power of two may be rounded up to it, and has its scale.
    So a block that was rounded, and is encoded again, changes no value.
    """
    exponent = (largest + ((1 << _DROPPED) - 1)) & _INFINITY
    finite = jnp.minimum(exponent, _LARGEST_SCALE)
    return _from_bits(_select(largest >= _INFINITY, largest, finite))


@jax.custom_jvp
def encode_unsigned(x: jax.Array, inverse: jax.Array, random: jax.Array) -> jax.Array:
    """Codes of numbers that are not negative: uint8."""
    code = _rounded(bits_of(x * inverse), random) - _UNSIGNED_ZERO
    tiny = jnp.finfo(jnp.float32).tiny
    return _select(x < tiny, jnp.int32(0), _clamped(1, code, 255)).astype(jnp.uint8)


@jax.custom_jvp
def encode_signed(x: jax.Array, inverse: jax.Array, random: jax.Array) -> jax.Array:
    """Codes of numbers of any sign: int8."""
    code = _rounded(magnitude(x * inverse), random) - _SIGNED_ZERO
    code = _clamped(0, code, 127)
    return _select(x < 0, -code, code).astype(jnp.int8)


def decode_unsigned(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The numbers, float32; none is finite in a block whose scale is not."""
    code, zero = codes.astype(jnp.int32), jnp.zeros((), jnp.float32)
    return _select(code == 0, zero, _from_bits((code + _UNSIGNED_ZERO) << _DROPPED)) * scale


def decode_signed(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """The numbers, float32; none is finite in a block whose scale is not."""
    code, zero = codes.astype(jnp.int32), jnp.zeros((), jnp.float32)
    size = jnp.abs(code)
    size_of_code = _select(size == 0, zero, _from_bits((size + _SIGNED_ZERO) << _DROPPED))
    return _select(code < 0, -size_of_code, size_of_code) * scale


def inverse(scale: jax.Array) -> jax.Array:
    """1 / scale, exact; what is encoded is multiplied by it."""
    return _from_bits((254 << 23) - bits_of(scale))


def _select(which: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.where` without a nested `jit`, of which each would be a call for XLA to copy inline."""
    shape = which.shape
    return jax.lax.select(which, jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape))


def _clamped(low: int, code: jax.Array, high: int) -> jax.Array:
    """In int32, since Python's numbers are int64 under `jax_enable_x64`."""
    return jax.lax.clamp(jnp.int32(low), code, jnp.int32(high))


def _rounded(bits: jax.Array, random: jax.Array) -> jax.Array:
    """The upper bits of numbers, one more with the probability of what is dropped."""
    return (bits + (random >> (32 - _DROPPED)).astype(jnp.int32)) >> _DROPPED


def _no_slope(*_: object) -> NoReturn:
    raise TypeError(
        "jgrad: no derivative goes through moments stored in 8 bits; differentiate a recipe "
        "without `moment_dtype='8bit'`, or apply `jax.lax.stop_gradient` to what is stored."
    )


for _function in (scale_of, encode_unsigned, encode_signed):
    _function.defjvp(_no_slope)


@dataclasses.dataclass(frozen=True)
class Codec:
    """Numbers as codes, element by element.

        codes = encode(x, 1 / scale, random),  x ~ decode(codes, scale)

    The scale s is a power of two for each block, whose largest magnitude is in [s, 2 s), and at
    most 1.875 s; 0 for a block of zeros; and itself where it is not finite.

    Attributes:
      dtype: of the codes, by which files and users say which codec it is.
      encode: codes of numbers, with 32 random bits for each. Zeros have code 0.
      decode: numbers of codes, float32.
    """

    dtype: np.dtype
    encode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    decode: Callable[[jax.Array, jax.Array], jax.Array]


SIGNED = Codec(np.dtype(np.int8), encode_signed, decode_signed)
UNSIGNED = Codec(np.dtype(np.uint8), encode_unsigned, decode_unsigned)
BY_DTYPE = {codec.dtype: codec for codec in (SIGNED, UNSIGNED)}


def for_moments(*, second: bool) -> Codec:
    """That of first or of second moments."""
    return UNSIGNED if second else SIGNED


def codec_of(x: Blocks) -> Any:
    """The codec of an array in 8 bits; None for codes of another dtype, which readers refuse."""
    return BY_DTYPE.get(getattr(x, "dtype", np.dtype(float)))
