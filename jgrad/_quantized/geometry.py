"""Which elements of an array share a scale, and the reshapes that this takes."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._quantized.blocks import SIZE, Blocks
from jgrad._trees.protocols import Leaf


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the blocks of an array are.

    Attributes:
      shape: of the array.
      scales: shape of the scales.
    """

    shape: tuple[int, ...]
    scales: tuple[int, ...]

    @classmethod
    def for_leaf(cls, shape: tuple[int, ...], stacked: Sequence[int] = ()) -> "Geometry":
        """Where the blocks are of an array whose layers are stacked over some axes."""
        if shape and shape[-1] % SIZE == 0 and len(shape) - 1 not in stacked:
            return cls(shape, (*shape[:-1], shape[-1] // SIZE))
        if not stacked:
            return cls(shape, (-(-math.prod(shape) // SIZE),))
        ones = [n if axis in stacked else 1 for axis, n in enumerate(shape)]
        layer_size = math.prod(n for axis, n in enumerate(shape) if axis not in stacked)
        return cls(shape, (*ones, -(-layer_size // SIZE)))

    @functools.cached_property
    def stacked(self) -> tuple[int, ...]:
        """The axes over which layers are stacked, as far as blocks have to know."""
        if len(self.scales) != len(self.shape) + 1:
            return ()
        sizes = zip(self.shape, self.scales, strict=False)
        return tuple(axis for axis, (n, count) in enumerate(sizes) if n == count)

    @property
    def is_right(self) -> bool:
        """Whether the scales are those of such an array."""
        return self == Geometry.for_leaf(self.shape, self.stacked)

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes with the stacked ones first."""
        rest = (axis for axis in range(len(self.shape)) if axis not in self.stacked)
        return (*self.stacked, *rest)

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether all blocks are whole, and a reshape makes them."""
        in_order = self._order == tuple(range(len(self.shape)))
        return in_order and math.prod(self.scales) * SIZE == math.prod(self.shape)

    @property
    def _lined_up(self) -> tuple[int, int]:
        """The shape in which blocks lie along the last axis: a row for each layer."""
        layers = math.prod(self.shape[axis] for axis in self.stacked)
        return layers, math.prod(self.shape) // layers

    def pieces(self, x: Leaf) -> list[Leaf]:
        """An array of this shape, or what broadcasts to it, with blocks along the last axis.

        One array of whole blocks if there are no others; else whole blocks and last ones by
        themselves, layer by layer. The axis before is that of blocks.
        """
        if isinstance(x, Blocks):
            scales = [self._column(x.scale)]
            if not self.is_view:
                scales = [scales[0][..., a:b, :] for a, b in self._bounds]
            return list(map(Blocks, self.pieces(x.codes), scales))
        if jnp.ndim(x) == 0 and self.shape:
            return [x] * (1 if self.is_view else len(self._bounds))
        is_column = len(self.scales) == x.ndim and x.shape == (*self.shape[:-1], 1)
        if self.is_view and is_column:
            return [x.reshape((*x.shape, 1))]  # a number for each row of a buffer
        if x.shape != self.shape:
            x = jnp.broadcast_to(x, self.shape)
        if self.is_view:
            return [x.reshape((*self.scales, SIZE))]
        x = jnp.transpose(x, self._order).reshape(self._lined_up)
        pieces = ((x[..., a * SIZE : b * SIZE], b - a) for a, b in self._bounds)
        return [y.reshape((len(y), count, y.shape[1] // count)) for y, count in pieces]

    def scale_of_pieces(self, columns: Sequence[jax.Array]) -> jax.Array:
        """The scales, of a column for each piece."""
        scale = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-2)
        return scale.reshape(self.scales)

    def per_element(self, scale: jax.Array) -> jax.Array:
        """The scale of each element; by no concatenation, which XLA would not fuse."""
        if self.shape and scale.shape == (*self.shape[:-1], 1):
            return scale  # of a buffer: it broadcasts
        column = self._column(scale)
        blocks = jnp.broadcast_to(column, (*column.shape[:-1], SIZE))
        if self.is_view:
            return blocks.reshape(self.shape)
        layers, size = self._lined_up
        elements = blocks.reshape((layers, self._bounds[-1][1] * SIZE))[..., :size]
        layers_first = elements.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(layers_first, list(np.argsort(self._order)))

    def sharding_of_scale(self, codes: NamedSharding) -> NamedSharding:
        """The sharding of codes, along axes where each shard has whole blocks."""
        parts = [*codes.spec, *[None] * (len(self.shape) - len(codes.spec))]
        shard = codes.shard_shape(self.shape)
        if len(self.scales) == len(self.shape):
            keep = [True] * len(parts)
            keep[-1] = shard[-1] % SIZE == 0
        elif len(self.scales) == 1:
            whole = not any(parts[1:]) and math.prod(shard) % SIZE == 0
            parts, keep = parts[:1], [whole and math.prod(self.shape) % SIZE == 0]
        else:
            keep = [*(axis in self.stacked for axis in range(len(parts))), True]
            parts = [*parts, None]
        spec = [part if use else None for part, use in zip(parts, keep, strict=True)]
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(codes.mesh, PartitionSpec(*spec), memory_kind=codes.memory_kind)

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Whole blocks of a layer, and the last one if it is shorter."""
        elements = self._lined_up[1]
        whole, blocks = elements // SIZE, -(-elements // SIZE)
        return [(a, b) for a, b in ((0, whole), (whole, blocks)) if b > a]

    def _column(self, scale: jax.Array) -> jax.Array:
        """The scales beside the blocks that have them, with a last axis of size 1."""
        blocks = self.scales if self.is_view else (self._lined_up[0], self._bounds[-1][1])
        return scale.reshape((*blocks, 1))


def geometry(blocks: Blocks) -> Geometry:
    """Where the blocks are of an array in 8 bits."""
    return Geometry(blocks.shape, blocks.scale.shape)


def in_rows(x: Blocks) -> bool:
    """Whether an array has its blocks along its rows, as most arrays have them."""
    codes, scale = x
    *lead, last = codes.shape or (0,)
    return bool(lead and last % SIZE == 0 and scale.shape == (*lead, last // SIZE))
