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
from jgrad._quantized.random_bits import ElementKeys, element_numbers
from jgrad._trees.blocks import SIZE, Blocks, Form


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
        """That of an array whose layers are stacked over some axes."""
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
        pairs = zip(self.shape, self.scales, strict=False)
        return tuple(axis for axis, (n, count) in enumerate(pairs) if n == count)

    def form(self, codec: Codec) -> Form:
        """That of codes in these blocks."""
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

    def pieces(self, x: Any) -> list[Any]:
        """An array of this shape, or what broadcasts to it, with blocks along `block_axis`.

        One array of whole blocks if there are no others; else whole blocks and last ones by
        themselves, layer by layer. The axis before is that of blocks.
        """
        if isinstance(x, Blocks):
            pairs = zip(self.pieces(x.codes), self._pieces_of_scale(x.scale), strict=True)
            return [x._replace(codes=codes, scale=scale) for codes, scale in pairs]
        if jnp.ndim(x) == 0 and self.shape:
            return [x] * (1 if self.is_view else len(self._bounds))
        is_column = len(self.scales) == x.ndim and x.shape == (*self.shape[:-1], 1)
        if self.is_view and self.axis is None and is_column:
            return [x.reshape((*x.shape, 1))]  # a number for each row of a buffer
        if x.shape != self.shape:
            x = jnp.broadcast_to(x, self.shape)
        if self.is_view:
            return [x.reshape(self._in_blocks)]
        if self.axis is not None:
            return self._along(x, self.size)
        layers = jnp.transpose(x, self._order).reshape(self._layers, -1)
        return [
            layers[:, a * self.size : b * self.size].reshape(self._layers, b - a, -1)
            for a, b in self._bounds
        ]

    def scale_of_pieces(self, columns: Sequence[jax.Array]) -> jax.Array:
        """The scales, of a column for each piece."""
        axis = columns[0].ndim + self.block_axis - 1
        scale = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=axis)
        return scale.reshape(self.scales)

    def per_element(self, scale: jax.Array) -> jax.Array:
        """The scale of each element; by no concatenation, which XLA would not fuse."""
        if self.axis is None and self.shape and scale.shape == (*self.shape[:-1], 1):
            return scale  # of a buffer: it broadcasts
        if self.is_view:
            column = scale.reshape(_replaced(self._in_blocks, self.block_axis, 1))
            return jnp.broadcast_to(column, self._in_blocks).reshape(self.shape)
        if self.axis is not None:
            count = self.scales[self.axis]
            column = scale.reshape(_replaced(self.scales, self.axis, count, 1))
            each = jnp.broadcast_to(column, _replaced(self.scales, self.axis, count, self.size))
            whole = each.reshape(_replaced(self.shape, self.axis, count * self.size))
            axis = len(self.shape) + self.axis
            return jax.lax.slice_in_dim(whole, 0, self.shape[self.axis], axis=axis)
        blocks = self._bounds[-1][1]
        columns = scale.reshape(self._layers, blocks, 1)
        each = jnp.broadcast_to(columns, (self._layers, blocks, self.size))
        layers = each.reshape(self._layers, -1)
        return self._in_order(layers[:, : self._layer_size])

    def element_numbers(self, keys: ElementKeys) -> jax.Array:
        """The number of each element, layer after layer; of a buffer, in its row."""
        if np.ndim(keys.first):
            return element_numbers(self.shape, within_rows=True)
        return element_numbers(self.shape, within_rows=False, first_axes=self.stacked)

    def sharding_of_scale(self, codes: NamedSharding) -> NamedSharding:
        """That of the codes along axes where each shard has whole blocks."""
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
    def _layers(self) -> int:
        return math.prod(self.shape[axis] for axis in self.stacked)

    @property
    def _layer_size(self) -> int:
        return math.prod(self.shape) // self._layers

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Whole blocks, of a layer or along the axis, and the last one if it is shorter."""
        elements = self._layer_size if self.axis is None else self.shape[self.axis]
        whole, blocks = elements // self.size, -(-elements // self.size)
        return [(a, b) for a, b in ((0, whole), (whole, blocks)) if b > a]

    def _pieces_of_scale(self, scale: jax.Array) -> list[jax.Array]:
        """A column for each of the pieces."""
        if self.is_view:
            return [scale.reshape(_replaced(self._in_blocks, self.block_axis, 1))]
        if self.axis is not None:
            return self._along(scale, 1)
        columns = scale.reshape(self._layers, -1, 1)
        return [columns[:, a:b] for a, b in self._bounds]

    def _along(self, x: jax.Array, each: int) -> list[jax.Array]:
        """The pieces of an array that has so many entries for each block along the axis."""
        assert self.axis is not None
        pieces, axis = [], x.ndim + self.axis
        for a, b in self._bounds:
            piece = jax.lax.slice_in_dim(x, a * each, min(b * each, x.shape[axis]), axis=axis)
            size = piece.shape[axis] // (b - a)
            pieces.append(piece.reshape(_replaced(piece.shape, self.axis, b - a, size)))
        return pieces

    def _in_order(self, layers: jax.Array) -> jax.Array:
        """The array of a row for each layer."""
        in_order = layers.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(in_order, list(np.argsort(self._order))) if self.stacked else in_order


def _replaced(shape: tuple[int, ...], axis: int, *sizes: int) -> tuple[int, ...]:
    """The shape with other sizes in the place of an axis, counted from the last."""
    axis += len(shape)
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def geometry(blocks: Blocks) -> Geometry:
    """That of an array in blocks."""
    return Geometry(blocks.shape, blocks.scale.shape, blocks.form.axis, blocks.form.size)
