"""`Blocks`, an array in 8 bits."""

from typing import NamedTuple

import numpy as np

from jgrad._trees.checks import in_short
from jgrad._trees.protocols import Leaf

SIZE = 256  # elements of a block; each row of a packed buffer is one
# In host memory, four codes are a word: the dtypes of words, and of their codes.
CODES = {np.dtype(np.int32): np.dtype(np.int8), np.dtype(np.uint32): np.dtype(np.uint8)}
IN_WORD = 4


def axis_of_words(codes: Leaf, scale: Leaf) -> int | None:
    """Along which axis four codes are a word, as the scales show it; None where none are."""
    if getattr(codes, "dtype", None) not in CODES or len(codes.shape) != len(scale.shape):
        return None
    pairs = list(zip(codes.shape, scale.shape, strict=True))[:-1]
    axes = [k for k, (n, rows) in enumerate(pairs) if n != rows]
    is_one = len(axes) == 1 and pairs[axes[0]][0] * IN_WORD == pairs[axes[0]][1]
    return axes[0] if is_one else None


class Blocks(NamedTuple):
    """An 8-bit array, with a code for each element and a scale for each block of 256.

        element = decode(code) scale

    Moments have this form if you choose `moment_dtype="8bit"`. Field names are part of the
    checkpoint format. `jgrad.carry_over` converts them to ordinary arrays.

    Attributes:
      codes: in the shape of the array; int8 for a first moment, uint8 for a second one. What
        `offload` puts in host memory has four of them in a word, int32 or uint32, along an axis of
        rows, and `jgrad.unpack` has them as codes again.
      scale: in float32, a power of two for each block, or 0 if the block is all zeros. If the last
        axis n is a multiple of 256, its shape is (..., n / 256). Otherwise it is (blocks,) for the
        flattened array or, with stacked layers, (..., blocks), with the size of each stacked axis
        and 1 for each other one.

    Example:
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> state = tx.init({"w": jnp.ones((64, 256)), "b": jnp.zeros(256)})
      >>> codes, scale = state.mw["w"]
      >>> codes.dtype.name, codes.shape, scale.shape
      ('int8', (64, 256), (64, 1))
      >>> state.mw["b"].dtype.name  # below 4096 elements
      'float32'
    """

    codes: Leaf  # arrays, or whatever JAX and its users put in their place
    scale: Leaf

    def __repr__(self) -> str:
        # Only kinds and shapes: nobody reads codes, and printed states have many of them.
        return f"Blocks({', '.join(map(in_short, self))})"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        shape: tuple[int, ...] = self.codes.shape
        return shape if axis_of_words(*self) is None else (*self.scale.shape[:-1], shape[-1])

    @property
    def dtype(self) -> np.dtype:
        """That of the codes."""
        return self.codes.dtype if axis_of_words(*self) is None else CODES[self.codes.dtype]


Blocks.__module__ = "jgrad"  # where users import it from, and what a pickle names
