"""The node of an array in 8 bits, which is a leaf for this library."""

from typing import Any, NamedTuple

import jax


class Blocks(NamedTuple):
    """An array in blocks of 256 elements: a code for each element, a scale for each block.

        element = decode(code) scale

    An 8-bit moment in an `OptState`. The field names are a file format: checkpoints hold them.
    `jgrad.unquantized(state)` makes arrays of them.

    Attributes:
      codes: of the array's shape; int8 for a first moment, uint8 for a second one.
      scale: float32, a power of two for each block, and 0 for a block of zeros. Its shape is
        (..., n / 256) where the last axis n is a multiple of 256; else (blocks,) of the flattened
        array, or where layers are stacked (..., blocks), with the size of each stacked axis and 1
        for each other one.

    Example:
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> state = tx.init({"w": jnp.ones((64, 256)), "b": jnp.zeros(256)})
      >>> codes, scale = state.mw["w"]
      >>> codes.dtype.name, codes.shape, scale.shape
      ('int8', (64, 256), (64, 1))
      >>> state.mw["b"].dtype.name  # below 4096 elements
      'float32'
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        """That of the codes."""
        return self.codes.dtype


Blocks.__module__ = "jgrad"  # where users import it from, and what a pickle names


def is_blocks(x: Any) -> bool:
    """Whether it is an array in 8 bits."""
    return isinstance(x, Blocks)
