"""One leaf as blocks of 256 elements, and back."""

import math
from typing import NamedTuple

import jax
import numpy as np

from jgrad._layers.layer_axes import Place

BLOCK = 256


class Run(NamedTuple):
    """Where one leaf lies.

    Attributes:
      path: of the leaf in its tree.
      dtype: of the leaf when the layout was made.
      place: its shape, and the axes over which layers are stacked.
      buffer: name of the buffer: that of the dtype, or "leaf 3" for a leaf that stays as it is.
      start: first block in the buffer; None for a leaf that stays as it is.
      per_layer: blocks of each layer.
    """

    path: str
    dtype: np.dtype
    place: Place
    buffer: str
    start: int | None
    per_layer: int

    @property
    def is_whole(self) -> bool:
        """Whether the leaf stays as it is."""
        return self.start is None

    @property
    def blocks(self) -> int:
        """Blocks of the leaf."""
        return self.place.layers * self.per_layer

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.place.shape)

    def __str__(self) -> str:
        layers = f", {self.place.layers} layers" if self.place.stacked else ""
        rows = "" if self.start is None else f"[{self.start}:{self.start + self.blocks}] "
        return f"{rows}{self.path or 'the leaf'} {self.place.shape}{layers}"


def padded(run: Run, x: jax.Array) -> jax.Array:
    """The leaf as a vector, with zeros behind each layer."""
    # By operations of `lax`, which are a fraction of those of `jnp` to trace, a thousand times.
    place = run.place
    if place.stacked:
        x = jax.lax.transpose(x, (*place.stacked, *place.within))
    missing = BLOCK * run.per_layer - place.layer_size
    if missing:
        x = jax.lax.reshape(x, (place.layers, place.layer_size))
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0)))
    return jax.lax.reshape(x, (BLOCK * run.blocks,))


def leaf(run: Run, x: jax.Array) -> jax.Array:
    """The leaf from its blocks."""
    place = run.place
    if place.layer_size != BLOCK * run.per_layer:
        x = jax.lax.reshape(x, (place.layers, BLOCK * run.per_layer))
        x = jax.lax.slice(x, (0, 0), (place.layers, place.layer_size))
    axes = (*place.stacked, *place.within)
    x = jax.lax.reshape(x, [place.shape[axis] for axis in axes])
    return jax.lax.transpose(x, np.argsort(axes)) if place.stacked else x
