"""The operations of a kernel on a tile of a leaf: some rows of 256 elements.

As outside of it, bit for bit, by operations that Mosaic has. A scalar stays one until it meets a
tile, and a number for each row is a column.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._fused.graph import Graph, Operation
from jgrad._fused.leaves import CODINGS, FLAG, KEYS, SAME_VALUE
from jgrad._quantized import codes as coding
from jgrad._quantized.codec import BY_DTYPE, Codec
from jgrad._quantized.random_bits import mixed
from jgrad._quantized.regions import DECODE, ENCODE_IF


class Tile(NamedTuple):
    """Where a tile is.

    Attributes:
      shape: rows and elements.
      starts: the number of its first element along each axis of the leaf.
    """

    shape: tuple[int, int]
    starts: tuple[jax.Array, ...]

    def numbers(self, axis: int) -> jax.Array:
        """The number of each element along an axis of the leaf, int32."""
        own = axis - len(self.starts) + 2
        within = jax.lax.broadcasted_iota(jnp.int32, self.shape, own) if own >= 0 else 0
        return jnp.broadcast_to(self.starts[axis] + within, self.shape)


class Keys(NamedTuple):
    """Of random bits.

    Attributes:
      first: a number of uint32 for the tile, or for each of its rows.
      second: another one.
      in_rows: whether elements are counted within rows.
    """

    first: jax.Array
    second: jax.Array
    in_rows: bool


def run(
    operations: Sequence[Operation],
    known: dict[int, Any],
    keys: dict[tuple[int, ...], Keys],
    tile: Tile,
    graph: Graph,
    shape: tuple[int, ...],
) -> None:
    """Computes the operations, and adds what they compute to `known`.

    Args:
      operations: of a kernel.
      known: what the kernel read.
      keys: of random bits.
      tile: where this is.
      graph: which the operations are of.
      shape: of the leaf.
    """

    def read(x: int) -> Any:
        return known[x] if x in known else np.asarray(graph.constants[x], graph.dtype(x))[()]

    for op in operations:
        if op.name == DECODE:
            codes, scale = map(read, op.inputs)
            each = jnp.broadcast_to(scale, tile.shape)
            known[op.outputs[0]] = BY_DTYPE[codes.dtype].decode(codes, each)
        elif op.name in CODINGS:
            old = tuple(map(read, op.inputs[:2])) if op.name == ENCODE_IF else None
            flag = read(op.inputs[FLAG]) if op.name == ENCODE_IF else None
            bits = _random_bits(keys[op.inputs[KEYS]], tile, shape)
            codec = BY_DTYPE[graph.dtype(op.outputs[0])]
            new = _encoded(read(op.inputs[2]), bits, codec, old, flag, tile)
            known |= dict(zip(op.outputs, new, strict=True))
        else:
            known[op.outputs[0]] = _computed(op, list(map(read, op.inputs)), tile)


def _random_bits(keys: Keys, tile: Tile, shape: tuple[int, ...]) -> jax.Array:
    """As `random_bits.random_bits`, of the elements of the tile."""
    axes = [len(shape) - 1] if keys.in_rows else range(len(shape))
    numbers = jnp.zeros(tile.shape, jnp.int32)
    for axis in axes:
        stride = 1 if keys.in_rows else int(np.prod(shape[axis + 1 :], dtype=np.int64))
        numbers = numbers + tile.numbers(axis) * np.uint32(stride % 2**32).astype(np.int32)
    elements = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    first, second = (jnp.broadcast_to(x, tile.shape) for x in keys[:2])
    return mixed(elements + first, second)


def _encoded(
    value: jax.Array,
    bits: jax.Array,
    codec: Codec,
    old: tuple[jax.Array, jax.Array] | None,
    flag: jax.Array | None,
    tile: Tile,
) -> tuple[jax.Array, jax.Array]:
    """As `encoding.encoded`: each row of the tile is a block."""
    largest = jnp.max(coding.magnitude(value), axis=1, keepdims=True)
    scale = coding.scale_of(largest)
    codes = codec.encode(value, jnp.broadcast_to(coding.inverse(scale), tile.shape), bits)
    if old is not None and flag is not None:
        kept = jnp.broadcast_to(flag.astype(jnp.int32), tile.shape) != 0
        new, before = (x.astype(jnp.int32) for x in (codes, old[0]))
        codes = jnp.where(kept, new, before).astype(codes.dtype)
        scale = jnp.where(flag, scale, old[1])
    return codes, scale


def _computed(op: Operation, args: list[jax.Array], tile: Tile) -> jax.Array:
    if op.name == "iota":
        return of_dtype(tile.numbers(op.params["dimension"]), op.params["dtype"])
    if op.name == "broadcast_in_dim" or op.name in SAME_VALUE:
        return args[0]
    if op.name == "bitcast_convert_type":
        return _bits(args[0], np.dtype(op.params["new_dtype"]))
    if op.name == "convert_element_type":
        return of_dtype(args[0], op.params["new_dtype"])
    dtypes = {x.dtype for x in args}
    is_half = np.dtype(jnp.bfloat16) in dtypes
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    full = [_full(x, tile) for x in wide]
    result = _OTHERWISE[op.name](*full) if op.name in _OTHERWISE else op.bind(full)[0]
    return result.astype(jnp.bfloat16) if is_half and result.dtype == jnp.float32 else result


def _full(x: jax.Array, tile: Tile) -> jax.Array:
    if x.shape == tile.shape:
        return x
    if x.dtype == np.bool_:
        return jnp.broadcast_to(x.astype(jnp.int32), tile.shape) != 0
    return jnp.broadcast_to(x, tile.shape)


# Integers of 16 bits are ones of 32 here: no operation is on them but these two conversions.


class _Half(NamedTuple):
    """Integers of 16 bits, in the lower half of integers of 32."""

    bits: jax.Array


def of_dtype(x: Any, dtype: Any) -> Any:
    """The array in a dtype."""
    if np.dtype(dtype) == np.uint16:
        return _Half(x & np.uint32(0xFFFF))
    if np.dtype(dtype) == np.uint32 and x.dtype == np.int32 and x.ndim:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x != 0 if np.dtype(dtype) == np.bool_ else x.astype(dtype)


def _bits(x: Any, dtype: np.dtype) -> jax.Array:
    if isinstance(x, _Half):  # to bfloat16: float32 numbers that it has
        return jax.lax.bitcast_convert_type(x.bits << 16, jnp.float32).astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)


_OTHERWISE: dict[str, Callable[..., jax.Array]] = {
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "sign": lambda x: jnp.where(x > 0, 1, jnp.where(x < 0, -1, x)).astype(x.dtype),
}
