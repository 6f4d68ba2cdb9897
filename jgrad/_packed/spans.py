"""One leaf as blocks of a buffer, and back."""

import math
from typing import NamedTuple

import jax
import numpy as np

from jgrad._layers.layer_axes import LayerAxes


class Span(NamedTuple):
    """The blocks of one leaf.

    Attributes:
      path: of the leaf in its tree.
      dtype: of the leaf when the layout was made.
      layers: its shape, and the axes over which layers are stacked.
      buffer: name of the buffer: that of its dtype, or "leaf 3" for the leaf at index 3 if it stays
        unpacked.
      start: first block in the buffer; None for an unpacked leaf.
      blocks_per_layer: each layer starts on a block of its own.
    """

    path: str
    dtype: np.dtype
    layers: LayerAxes
    buffer: str
    start: int | None
    blocks_per_layer: int

    @property
    def is_unpacked(self) -> bool:
        """Whether the leaf is not packed: its buffer has its own shape."""
        return self.start is None

    @property
    def first(self) -> int:
        """The first block; 0 for an unpacked leaf."""
        return self.start or 0

    def is_alike(self, other: "Span") -> bool:
        """Whether it is the same leaf, in whatever place of the buffer of that name."""
        own, its = ((x.dtype, x.layers, x.buffer) for x in (self, other))
        return own == its

    @property
    def num_blocks(self) -> int:
        """Blocks of the leaf."""
        return self.layers.num_layers * self.blocks_per_layer

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.layers.shape)

    def __str__(self) -> str:
        layers = f", {self.layers.num_layers} layers" if self.layers.stacked else ""
        rows = "" if self.start is None else f"[{self.start}:{self.start + self.num_blocks}] "
        return f"{rows}{self.path or 'the leaf'} {self.layers.shape}{layers}"


# Both by operations of `lax`, which are a fraction of those of `jnp` to trace, a thousand times.


def to_blocks(span: Span, x: jax.Array, width: int) -> jax.Array:
    """The leaf as a vector of shape (num_blocks * width,), with zeros behind each layer."""
    layers = span.layers
    if layers.stacked:
        x = jax.lax.transpose(x, (*layers.stacked, *layers.within))
    missing = width * span.blocks_per_layer - layers.layer_size
    if missing:
        x = jax.lax.reshape(x, (layers.num_layers, layers.layer_size))
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0)))
    return jax.lax.reshape(x, (width * span.num_blocks,))


def from_blocks(span: Span, x: jax.Array, width: int) -> jax.Array:
    """The leaf, from the vector that `to_blocks` made."""
    layers = span.layers
    if layers.layer_size != width * span.blocks_per_layer:
        x = jax.lax.reshape(x, (layers.num_layers, width * span.blocks_per_layer))
        x = jax.lax.slice(x, (0, 0), (layers.num_layers, layers.layer_size))
    axes = (*layers.stacked, *layers.within)
    x = jax.lax.reshape(x, [layers.shape[axis] for axis in axes])
    return jax.lax.transpose(x, np.argsort(axes)) if layers.stacked else x
