"""A tile inside a kernel, some rows of 256 elements: its random bits, and how it is encoded.

Bit for bit as outside of kernels, but only with operations that Mosaic supports.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._quantized import codec as coding
from jgrad._quantized.blocks import Blocks
from jgrad._quantized.codec import Codec
from jgrad._quantized.random_bits import Part, mixed


class Tile(NamedTuple):
    """Where a tile is.

    Attributes:
      shape: rows and elements.
      starts: the number of its first element along each axis of the leaf.
      leaf: the shape of the leaf.
    """

    shape: tuple[int, int]
    starts: tuple[jax.Array, ...]
    leaf: tuple[int, ...]

    def numbers(self, axis: int) -> jax.Array:
        """The number of each element along an axis of the leaf, int32."""
        within: jax.Array | int = 0
        if (here := axis - len(self.starts) + 2) >= 0:
            within = jax.lax.broadcasted_iota(jnp.int32, self.shape, here)
        return jnp.broadcast_to(self.starts[axis] + within, self.shape)


class TileRounding(NamedTuple):
    """How the elements of a tile are rounded; a `Rounding` inside a kernel.

    Attributes:
      first: a number of uint32 for the tile, or for each of its rows.
      second: another one.
      part: which part of its leaf the array is, if it is one; `first` has its first element.
      in_rows: whether elements are counted within rows.
      tile: where this is.
    """

    first: jax.Array
    second: jax.Array
    part: Part | None
    in_rows: bool
    tile: Tile

    def bits(self, _: jax.Array) -> jax.Array:
        """Random bits, as `random_bits.random_bits` has them for these elements."""
        leaf, shape = self.tile.leaf, self.tile.shape
        numbers = jnp.zeros(shape, jnp.int32)
        whole = Part((1,) * len(leaf), ()) if self.part is None else self.part
        for axis in [len(leaf) - 1] if self.in_rows else range(len(leaf)):
            factor = np.uint32(whole.strides(leaf)[axis] % 2**32).astype(np.int32)
            numbers = numbers + self.tile.numbers(axis) * factor
        elements = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
        first, second = (jnp.broadcast_to(x, shape) for x in (self.first, self.second))
        return mixed(elements + first, second)

    @staticmethod
    def to_bfloat16(bits: jax.Array) -> jax.Array:
        """The numbers of float32 with these bits, which bfloat16 has: no integers of 16 bits."""
        return jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32).astype(
            jnp.bfloat16
        )


def encoded_tile(
    exact: jax.Array,
    bits: jax.Array,
    codec: Codec,
    old: Blocks,
    flag: jax.Array | None,
    tile: Tile,
) -> tuple[jax.Array, jax.Array]:
    """As `encoding.encoded`, where each row of the tile is a block; old codes where a flag is 0."""
    scale = coding.scale_of(jnp.max(coding.magnitude(exact), axis=1, keepdims=True))
    codes = codec.encode(exact, jnp.broadcast_to(coding.inverse(scale), tile.shape), bits)
    if flag is not None:
        is_kept = jnp.broadcast_to(flag.astype(jnp.int32), tile.shape) != 0
        new, before = (x.astype(jnp.int32) for x in (codes, old.codes))
        codes = jnp.where(is_kept, new, before).astype(codes.dtype)
        scale = jnp.where(flag, scale, old.scale)
    return codes, scale
