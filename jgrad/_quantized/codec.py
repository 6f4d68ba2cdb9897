"""Codecs: numbers as codes of some bits, and which moments take which of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._quantized import codes as coding
from jgrad._trees.forms import SIZE, Blocks, Form


@dataclasses.dataclass(frozen=True)
class Codec:
    """Numbers as codes, element by element.

        codes = encode(x, 1 / scale, random),  x ~ decode(codes, scale)

    The scale s is a power of two for each block, whose largest magnitude is in [s, 2 s), and at
    most 1.875 s; 0 for a block of zeros; and itself where it is not finite.

    Attributes:
      name: as messages say it.
      bits: of a code, 8 or a number that divides it: a byte holds as many codes as fit.
      signed: whether there are codes for negative numbers.
      encode: codes of numbers, with 32 random bits for each; of 8 bits in `dtype`, of fewer uint8
        in the lowest bits. Zeros have code 0.
      decode: numbers of codes, float32.
    """

    name: str
    bits: int
    signed: bool
    encode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    decode: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array that holds the codes."""
        return np.dtype(np.int8 if self.signed and self.bits == 8 else np.uint8)

    @property
    def per_byte(self) -> int:
        """Codes that a byte holds."""
        return 8 // self.bits

    @property
    def is_named_by_dtype(self) -> bool:
        """Whether files say which codec it is by the dtype of the codes."""
        return BY_DTYPE.get(self.dtype) == self

    @property
    def kind(self) -> str:
        """What messages call its codes."""
        return self.dtype.name if self.is_named_by_dtype else self.name

    def to_bytes(self, codes: jax.Array) -> jax.Array:
        """A code for each element as they are stored, along the last axis."""
        if self.per_byte == 1:
            return codes
        missing = -codes.shape[-1] % self.per_byte
        codes = jnp.pad(codes, ((0, 0),) * (codes.ndim - 1) + ((0, missing),))
        parts = codes.reshape((*codes.shape[:-1], -1, self.per_byte))
        whole = parts[..., 0]
        for i in range(1, self.per_byte):
            whole = whole | (parts[..., i] << (i * self.bits))
        return whole

    def from_bytes(self, stored: jax.Array, padding: int) -> jax.Array:
        """The codes of elements, of which the last bytes have some too many."""
        if self.per_byte == 1:
            return stored
        shifts = [i * self.bits for i in range(self.per_byte)]
        parts = jnp.stack([(stored >> n) & (2**self.bits - 1) for n in shifts], axis=-1)
        codes = parts.reshape((*stored.shape[:-1], -1))
        return codes[..., : codes.shape[-1] - padding]


SIGNED = Codec("signed 8 bits", 8, True, coding.encode_signed, coding.decode_signed)
UNSIGNED = Codec("unsigned 8 bits", 8, False, coding.encode_unsigned, coding.decode_unsigned)

# All that files of 0.6 and before hold, which say it by the dtype of the codes alone.
BY_DTYPE = {codec.dtype: codec for codec in (SIGNED, UNSIGNED)}


@functools.cache  # JAX compares structures at each call, and one object with itself at once
def form_of(codec: Codec, axis: int | None, size: int, padding: int) -> Form:
    """The one object of a form."""
    return Form(codec, axis, size, padding)


def of_moments(*, second: bool) -> Form:
    """The codec of first or of second moments, and where their blocks lie."""
    return form_of(UNSIGNED if second else SIGNED, None, SIZE, 0)


def codec_of(x: Blocks) -> Any:
    """The codec of an array in 8 bits: its own, else the one that the dtype of the codes names.

    None for codes of a dtype that names none, which whoever reads a state refuses.
    """
    return x.form.codec or BY_DTYPE.get(getattr(x.codes, "dtype", np.dtype(float)))
