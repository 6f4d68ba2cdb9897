"""Which elements of an array share a scale, and everything that is reshaped for it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._quantized.codec import Codec, form_of
from jgrad._trees.forms import SIZE, Blocks, Form


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the blocks of an array are.

    Attributes:
      shape: of the array.
      scales: shape of the scales.
      axis: along which blocks lie, as in `Form`.
      size: elements of a block.
    """

    shape: tuple[int, ...]
    scales: tuple[int, ...]
    axis: int | None = None
    size: int = SIZE

    @classmethod
    def of_leaf(
        cls,
        shape: tuple[int, ...],
        stacked: Sequence[int] = (),
        axis: int | None = None,
        size: int = SIZE,
    ) -> "Geometry":
        """Where the blocks are of an array whose layers are stacked over some axes."""
        last = len(shape) - 1
        if axis is not None:
            if len(shape) + axis in stacked:
                raise ValueError(f"blocks along axis {axis} of {shape} would straddle layers")
            return cls(shape, _replaced(shape, axis, -(-shape[axis] // size)), axis, size)
        if shape and shape[last] % size == 0 and last not in stacked:
            return cls(shape, (*shape[:last], shape[last] // size), axis, size)
        if not stacked:
            return cls(shape, (-(-math.prod(shape) // size),), axis, size)
        ones = [n if axis in stacked else 1 for axis, n in enumerate(shape)]
        layer_size = math.prod(n for axis, n in enumerate(shape) if axis not in stacked)
        return cls(shape, (*ones, -(-layer_size // size)), None, size)

    @functools.cached_property
    def stacked(self) -> tuple[int, ...]:
        """The axes over which layers are stacked, as far as blocks have to know."""
        if len(self.scales) != len(self.shape) + 1:
            return ()
        sizes = zip(self.shape, self.scales, strict=False)
        return tuple(axis for axis, (n, count) in enumerate(sizes) if n == count)

    def form(self, codec: Codec) -> Form:
        """The form of codes in these blocks."""
        padding = -self.shape[-1] % codec.per_byte if self.shape else 0
        return form_of(codec, self.axis, self.size, padding)

    @property
    def is_right(self) -> bool:
        """Whether the scales are those of such an array."""
        if self.axis is not None and len(self.shape) + self.axis < 0:
            return False
        return self == Geometry.of_leaf(self.shape, self.stacked, self.axis, self.size)

    @property
    def block_axis(self) -> int:
        """The axis of `pieces` that is a block, counted from the last."""
        return -1 if self.axis is None else self.axis

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes with the stacked ones first."""
        if not self.stacked:
            return tuple(range(len(self.shape)))
        rest = (axis for axis in range(len(self.shape)) if axis not in self.stacked)
        return (*self.stacked, *rest)

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether all blocks are whole, and a reshape makes them."""
        in_order = self._order == tuple(range(len(self.shape)))
        return in_order and math.prod(self.scales) * self.size == math.prod(self.shape)

    @functools.cached_property
    def _in_blocks(self) -> tuple[int, ...]:
        """The shape of the array where `is_view`, each block an axis of its own."""
        if self.axis is None:
            return (*self.scales, self.size)
        return _replaced(self.shape, self.axis, self.scales[self.axis], self.size)

    @property
    def _lined_up(self) -> tuple[int, ...]:
        """The shape in which blocks lie along `block_axis`: of the array, or a row for a layer."""
        if self.axis is not None:
            return self.shape
        layers = math.prod(self.shape[axis] for axis in self.stacked)
        return layers, math.prod(self.shape) // layers

    def pieces(self, x: Any) -> list[Any]:
        """An array of this shape, or what broadcasts to it, with blocks along `block_axis`.

        One array of whole blocks if there are no others; else whole blocks and last ones by
        themselves, layer by layer. The axis before is that of blocks.
        """
        if isinstance(x, Blocks):
            scales = [self._column(x.scale)]
            if not self.is_view:
                scales = [_between(scales[0], self.block_axis - 1, *ends) for ends in self._bounds]
            both = zip(self.pieces(x.codes), scales, strict=True)
            return [x._replace(codes=codes, scale=scale) for codes, scale in both]
        if jnp.ndim(x) == 0 and self.shape:
            return [x] * (1 if self.is_view else len(self._bounds))
        is_column = len(self.scales) == x.ndim and x.shape == (*self.shape[:-1], 1)
        if self.is_view and self.axis is None and is_column:
            return [x.reshape((*x.shape, 1))]  # a number for each row of a buffer
        if x.shape != self.shape:
            x = jnp.broadcast_to(x, self.shape)
        if self.is_view:
            return [x.reshape(self._in_blocks)]
        if self.axis is None:
            x = jnp.transpose(x, self._order).reshape(self._lined_up)
        pieces = []
        for a, b in self._bounds:
            piece = _between(x, self.block_axis, a * self.size, b * self.size)
            size = piece.shape[self.block_axis] // (b - a)
            pieces.append(piece.reshape(_replaced(piece.shape, self.block_axis, b - a, size)))
        return pieces

    def scale_of_pieces(self, columns: Sequence[jax.Array]) -> jax.Array:
        """The scales, of a column for each piece."""
        axis = columns[0].ndim + self.block_axis - 1
        scale = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=axis)
        return scale.reshape(self.scales)

    def per_element(self, scale: jax.Array) -> jax.Array:
        """The scale of each element; by no concatenation, which XLA would not fuse."""
        if self.axis is None and self.shape and scale.shape == (*self.shape[:-1], 1):
            return scale  # of a buffer: it broadcasts
        column, axis = self._column(scale), self.block_axis
        blocks = jnp.broadcast_to(column, _replaced(column.shape, axis, self.size))
        if self.is_view:
            return blocks.reshape(self.shape)
        whole = blocks.reshape(_replaced(self._lined_up, axis, self._bounds[-1][1] * self.size))
        elements = _between(whole, axis, 0, self._lined_up[axis])
        if self.axis is not None:
            return elements
        layers_first = elements.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(layers_first, list(np.argsort(self._order)))

    def sharding_of_scale(self, codes: NamedSharding) -> NamedSharding:
        """The sharding of codes, along axes where each shard has whole blocks."""
        parts = [*codes.spec, *[None] * (len(self.shape) - len(codes.spec))]
        shard = codes.shard_shape(self.shape)
        if len(self.scales) == len(self.shape):
            keep = [True] * len(parts)
            keep[self.block_axis] = shard[self.block_axis] % self.size == 0
        elif len(self.scales) == 1:
            whole = not any(parts[1:]) and math.prod(shard) % self.size == 0
            parts, keep = parts[:1], [whole and math.prod(self.shape) % self.size == 0]
        else:
            keep = [*(axis in self.stacked for axis in range(len(parts))), True]
            parts = [*parts, None]
        spec = [part if use else None for part, use in zip(parts, keep, strict=True)]
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(codes.mesh, PartitionSpec(*spec), memory_kind=codes.memory_kind)

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Whole blocks, of a layer or along the axis, and the last one if it is shorter."""
        elements = self._lined_up[self.block_axis]
        whole, blocks = elements // self.size, -(-elements // self.size)
        return [(a, b) for a, b in ((0, whole), (whole, blocks)) if b > a]

    def _column(self, scale: jax.Array) -> jax.Array:
        """The scales beside the blocks that have them, with size 1 along `block_axis`."""
        if self.is_view:
            return scale.reshape(_replaced(self._in_blocks, self.block_axis, 1))
        blocks = self._bounds[-1][1]
        return scale.reshape(_replaced(self._lined_up, self.block_axis, blocks, 1))


def _replaced(shape: tuple[int, ...], axis: int, *sizes: int) -> tuple[int, ...]:
    """The shape with other sizes instead of that of an axis, counted from the last."""
    axis += len(shape)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def _between(x: jax.Array, axis: int, start: int, end: int) -> jax.Array:
    """The entries from `start` to `end` along an axis, counted from the last."""
    return x[(..., slice(start, end), *[slice(None)] * (-axis - 1))]


def geometry(blocks: Blocks) -> Geometry:
    """Where the blocks are of an array in 8 bits."""
    return Geometry(blocks.shape, blocks.scale.shape, blocks.form.axis, blocks.form.size)
