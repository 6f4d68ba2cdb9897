"""An array as blocks of 256 elements that share a scale, and back.

A block lies along the last axis where that is a multiple of 256, so that a sharded array and its
scales are sharded alike. Else the array is flattened. Blocks do not straddle layers: where axes are
stacked, each layer starts on a block, and its last block may be shorter. The shape of the scales
tells which of these an array is.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._quantized import codes as coding
from jgrad._quantized.random_bits import ElementKeys, element_numbers, random_bits
from jgrad._trees import checks
from jgrad._trees.blocks import Blocks, is_blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import is_sharded, on_automatic_axes

SIZE = 256  # elements of a block; those of a packed buffer have as many

# Elements of a global array from which it is stored in 8 bits: below, nothing is gained.
SMALLEST = 4096

# XLA's CPU backend writes out what a maximum over rows is taken of, 4 bytes per element. A maximum
# over an axis that is not the last is a loop that computes what it reads: so of a block as 8 rows
# of 32. The step of Adam takes 1.2 times that of float32 so, 1.6 with 4 rows, 1.9 with 16.
_PARTS = 8


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
    def of_leaf(cls, shape: tuple[int, ...], stacked: Sequence[int] = ()) -> "Geometry":
        """That of an array whose layers are stacked over some axes."""
        last = len(shape) - 1
        if shape and shape[last] % SIZE == 0 and last not in stacked:
            return cls(shape, (*shape[:last], shape[last] // SIZE))
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
        pairs = zip(self.shape, self.scales, strict=False)
        return tuple(axis for axis, (n, count) in enumerate(pairs) if n == count)

    @property
    def is_right(self) -> bool:
        """Whether the scales are those of such an array."""
        return self == Geometry.of_leaf(self.shape, self.stacked)

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

    def pieces(self, x: Any) -> list[Any]:
        """An array of this shape, or what broadcasts to it, as arrays whose last axis is a block.

        One array of whole blocks, of the shape of the scales and 256, if there are no others; else
        whole blocks and last ones by themselves, layer by layer.
        """
        if is_blocks(x):
            pairs = zip(self.pieces(x.codes), self._pieces_of_scale(x.scale), strict=True)
            return [Blocks(codes, scale) for codes, scale in pairs]
        if jnp.ndim(x) == 0 and self.shape:
            return [x] * (1 if self.is_view else len(self._bounds))
        if self.is_view and len(self.scales) == x.ndim and x.shape == (*self.shape[:-1], 1):
            return [x.reshape((*x.shape, 1))]  # a number for each row of a buffer
        if x.shape != self.shape:
            x = jnp.broadcast_to(x, self.shape)
        if self.is_view:
            return [x.reshape((*self.scales, SIZE))]
        layers = jnp.transpose(x, self._order).reshape(self._layers, -1)
        return [
            layers[:, a * SIZE : b * SIZE].reshape(self._layers, b - a, -1) for a, b in self._bounds
        ]

    def scale_of_pieces(self, columns: Sequence[jax.Array]) -> jax.Array:
        """The scales, of a column for each piece."""
        scale = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)
        return scale.reshape(self.scales)

    def per_element(self, scale: jax.Array) -> jax.Array:
        """The scale of each element; by no concatenation, which XLA would not fuse."""
        if self.shape and scale.shape == (*self.shape[:-1], 1):
            return scale  # of a buffer: it broadcasts
        if self.is_view:
            column = scale.reshape((*self.scales, 1))
            return jnp.broadcast_to(column, (*self.scales, SIZE)).reshape(self.shape)
        blocks = self._bounds[-1][1]
        columns = scale.reshape(self._layers, blocks, 1)
        layers = jnp.broadcast_to(columns, (self._layers, blocks, SIZE)).reshape(self._layers, -1)
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
            keep = [True] * (len(parts) - 1) + [shard[-1] % SIZE == 0]
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
    def _layers(self) -> int:
        return math.prod(self.shape[axis] for axis in self.stacked)

    @property
    def _layer_size(self) -> int:
        return math.prod(self.shape) // self._layers

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Whole blocks of a layer, and the last one if it is shorter."""
        whole, blocks = self._layer_size // SIZE, -(-self._layer_size // SIZE)
        return [(a, b) for a, b in ((0, whole), (whole, blocks)) if b > a]

    def _pieces_of_scale(self, scale: jax.Array) -> list[jax.Array]:
        """A column for each of the pieces."""
        if self.is_view:
            return [scale.reshape((*self.scales, 1))]
        columns = scale.reshape(self._layers, -1, 1)
        return [columns[:, a:b] for a, b in self._bounds]

    def _in_order(self, layers: jax.Array) -> jax.Array:
        """The array of a row for each layer."""
        in_order = layers.reshape([self.shape[axis] for axis in self._order])
        return jnp.transpose(in_order, list(np.argsort(self._order))) if self.stacked else in_order


def geometry(blocks: Blocks) -> Geometry:
    """That of an array in 8 bits."""
    return Geometry(blocks.codes.shape, blocks.scale.shape)


def check(arg: ArgLeaves, i: int, x: Blocks, dtype: Any = None) -> None:
    """A leaf that is written as here, so that others are not read as wrong numbers.

    Args:
      arg: the argument.
      i: which of its leaves.
      x: the leaf.
      dtype: int8 for a first moment, uint8 for a second one; None for either.
    """
    codes, scale = x
    either = (jnp.int8, jnp.uint8) if dtype is None else (dtype,)
    if not (checks.is_array(codes) and any(codes.dtype == one for one in either)):
        expected = " or ".join(np.dtype(one).name for one in either)
        arg.fail(i, TypeError, f"{checks.describe(codes)} as `codes`, expected {expected}")
    if not checks.is_array(scale) or scale.dtype != jnp.float32:
        arg.fail(i, TypeError, f"{checks.describe(scale)} as `scale`, expected float32")
    if not geometry(x).is_right:
        expected = f"a number for each block of {SIZE} elements of `codes`, of shape {codes.shape}"
        arg.fail(i, ValueError, f"`scale` of shape {scale.shape}, expected {expected}")


def decoded(blocks: Blocks) -> jax.Array:
    """The array, float32."""
    codes, scale = blocks
    if scale.ndim == codes.ndim and scale.shape[-1] == 1:
        return coding.decode(codes, scale)  # a buffer, or a piece
    own = geometry(blocks)

    def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
        return coding.decode(codes, own.per_element(scale))

    if not is_sharded(codes):
        return decode(codes, scale)
    return on_automatic_axes(decode, jax.typeof(codes).sharding, codes, scale)


def zeros(x: jax.Array, stacked: Sequence[int], *, second: bool) -> Blocks:
    """Zeros for an array of zeros, sharded as it is."""
    own = Geometry.of_leaf(x.shape, stacked)

    def blocks(x: jax.Array) -> Blocks:
        columns = [piece[..., :1] for piece in own.pieces(x)]
        return Blocks(x.astype(jnp.uint8 if second else jnp.int8), own.scale_of_pieces(columns))

    return _placed(blocks, own, x)


def recoded(x: Any, own: Geometry, dtype: Any) -> Blocks:
    """An array, or one in other blocks, in these; to the nearest, which changes no decoded one."""
    if is_blocks(x) and x.scale.shape == own.scales:
        return x
    if 0 in own.shape:
        return Blocks(jnp.zeros(own.shape, dtype), jnp.zeros(own.scales, jnp.float32))
    return encoded(lambda value: value, [decoded(x) if is_blocks(x) else x], own, dtype)


class Rounding(NamedTuple):
    """How codes are rounded.

    Attributes:
      of_step: see `random_bits.step_keys`.
      keys: of the array.
    """

    of_step: jax.Array
    keys: ElementKeys


def encoded(
    compute: Callable[..., jax.Array],
    arguments: Sequence[Any],
    own: Geometry,
    dtype: Any,
    rounding: Rounding | None = None,
    value: jax.Array | None = None,
) -> Blocks:
    """What an elementwise function makes of its arguments, in blocks.

    Args:
      compute: a function to float32 of arrays that broadcast to one shape, some in 8 bits.
      arguments: its arguments.
      own: where blocks are.
      dtype: int8 for a first moment, uint8 for a second one.
      rounding: for random bits; None to round to the nearest.
      value: what the function makes, if it is known: half the operations for XLA to compare.
    """
    encode = coding.encode_second if dtype == jnp.uint8 else coding.encode_first

    def blocks(
        rounding: Rounding | None, value: jax.Array | None, *arguments: jax.Array | Blocks
    ) -> Blocks:
        rows = zip(*(own.pieces(x) for x in arguments), strict=True)
        scale = coding.scale_of(own.scale_of_pieces([_largest(compute, row) for row in rows]))
        random = jnp.asarray(coding.HALF, jnp.uint32)
        if rounding is not None:
            random = random_bits(*rounding, own.element_numbers(rounding.keys))
        value = compute(*arguments) if value is None else value
        return Blocks(encode(value, own.per_element(coding.inverse(scale)), random), scale)

    return _placed(blocks, own, rounding, value, *arguments)


def _placed(make: Callable[..., Blocks], own: Geometry, *args: Any) -> Blocks:
    """`make(*args)`, sharded as the one among its arguments that has the shape of the array."""
    given = jax.tree.leaves(args, is_leaf=is_blocks)
    like = next(x for x in given if x.shape == own.shape)
    codes = like.codes if is_blocks(like) else like
    if not is_sharded(codes):
        return make(*args)
    place = jax.typeof(codes).sharding
    of_scale = jax.typeof(like.scale).sharding if is_blocks(like) else own.sharding_of_scale(place)
    shardings: Any = (place, of_scale)
    return on_automatic_axes(make, Blocks(*shardings), *args)


def _largest(compute: Callable[..., jax.Array], row: Sequence[Any]) -> jax.Array:
    """The bits of the largest magnitude of each block, as a column."""
    width = max(x.shape[-1] for x in row if x.shape)
    parts = _PARTS if width % _PARTS == 0 else 1

    def in_parts(x: Any) -> Any:
        if is_blocks(x):
            return Blocks(in_parts(x.codes), x.scale[..., None])
        if jnp.ndim(x) == 0:
            return x
        return x.reshape((*x.shape[:-1], *((parts, -1) if x.shape[-1] == width else (1, 1))))

    # Computed from arrays that XLA does not know to be the arguments, since what several kernels
    # read is written.
    others = jax.lax.optimization_barrier([in_parts(x) for x in row])
    largest = jnp.max(coding.magnitude(compute(*others)), axis=-2)
    return jnp.max(jax.lax.optimization_barrier(largest), axis=-1, keepdims=True)
