"""Buffers from leaves and back; vectors in many pieces and back.

In 8 bits, the rows of a buffer are its blocks, so a leaf has the same codes as unpacked. A leaf
that is too small for 8 bits on its own is stored in 8 bits if its buffer is. Unpacked, it becomes a
float32 array.

XLA's CPU backend compiles equal kernels once. But a slice at another offset is another kernel, and
so is everything that it is fused into: a layer that occurs twelve times is compiled twelve times if
its weights are sliced from one buffer, and a thousand slices take half a minute. Vectors are
therefore split inside a branch, across which XLA does not fuse. Many pieces of the same size are
split in two stages: first into groups, and then all groups in the same way.

In eager mode, it isn't worth compiling one program for thousands of pieces, so each piece is a
small program that all pieces of its size share.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._packed.layouts import WIDTH, Span
from jgrad._quantized import encoding
from jgrad._quantized.blocks import Blocks
from jgrad._quantized.codec import Codec
from jgrad._quantized.geometry import Geometry
from jgrad._trees.forms import SMALLEST


def join_leaves(spans: Sequence[Span], leaves: Sequence[jax.Array], rows: int) -> jax.Array:
    """The buffer of so many rows; zeros where no leaf is.

    Args:
      spans: of its leaves, from the top down.
      leaves: arrays of one dtype.
      rows: of the buffer.
    """
    return _join(spans, list(map(_to_rows, spans, leaves)), (rows, WIDTH))


def join_codes(spans: Sequence[Span], leaves: Sequence[Blocks], rows: int) -> Blocks:
    """The buffer in 8 bits of leaves that `recoded` made."""
    codes = [_to_rows(span, x.codes) for span, x in zip(spans, leaves, strict=True)]
    scale = [
        jnp.transpose(x.scale, _order_of_scale(span)).reshape(-1)
        for span, x in zip(spans, leaves, strict=True)
    ]
    geometry = Geometry((rows, WIDTH), (rows, 1))
    parts = _join(spans, codes, geometry.shape), _join(spans, scale, geometry.scales)
    return Blocks(*parts)


def split_leaves(spans: Sequence[Span], buffer: jax.Array) -> list[jax.Array]:
    """The leaves of a buffer."""
    return list(map(_from_rows, spans, _cut(spans, buffer)))


def split_codes(
    spans: Sequence[Span], buffer: Blocks, *, as_stored: bool
) -> list[jax.Array | Blocks]:
    """The leaves of a buffer in 8 bits.

    They are Blocks `as_stored`; else those that are too small for it by themselves are float32.
    """
    codes, scales = _cut(spans, buffer.codes), _cut(spans, buffer.scale)
    leaves: list[jax.Array | Blocks] = []
    for span, code, column in zip(spans, codes, scales, strict=True):
        geometry, order = _geometry(span), _order_of_scale(span)
        scale = column.reshape([geometry.scales[axis] for axis in order])
        scale = jnp.transpose(scale, list(np.argsort(order)))
        leaf = Blocks(_from_rows(span, code), scale)
        leaves.append(leaf if as_stored or span.size >= SMALLEST else encoding.decoded(leaf))
    return leaves


def recoded(span: Span, x: jax.Array | Blocks, codec: Codec) -> Blocks:
    """A leaf in the blocks that are its rows; the same codes if its blocks are those."""
    return encoding.recoded(x, _geometry(span), codec)


# ---- one walk over the rows of a buffer --------------------------------------------------------


def _pieces(spans: Sequence[Span], rows: int) -> list[tuple[Span | None, int]]:
    """What is in a buffer from the top down, and in how many rows: a leaf, or None for padding."""
    pieces: list[tuple[Span | None, int]] = []
    end = 0
    for span in spans:
        if span.first > end:
            pieces.append((None, span.first - end))
        pieces.append((span, span.num_rows))
        end = span.first + span.num_rows
    return [*pieces, (None, rows - end)] if rows > end else pieces


def _join(spans: Sequence[Span], vectors: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """A vector for each leaf as an array of rows, with zeros in those of no leaf."""
    rows, width = shape
    leaves = iter(vectors)
    pieces = [
        jnp.zeros((count * width,), vectors[0].dtype) if span is None else next(leaves)
        for span, count in _pieces(spans, rows)
    ]
    return join(pieces).reshape(shape)


def _cut(spans: Sequence[Span], x: jax.Array) -> list[jax.Array]:
    """The vector of each leaf, from an array of rows."""
    rows, width = x.shape
    pieces = _pieces(spans, rows)
    vectors = split(x.reshape(-1), tuple(count * width for _, count in pieces))
    return [y for (span, _), y in zip(pieces, vectors, strict=True) if span is not None]


# Both use `lax`, which traces in a fraction of the time of `jnp`, a thousand times over.


def _to_rows(span: Span, x: jax.Array) -> jax.Array:
    """The leaf as a vector of whole rows, with zeros behind each layer."""
    layers = span.layers
    if layers.stacked:
        x = jax.lax.transpose(x, (*layers.stacked, *layers.within))
    missing = WIDTH * span.rows_per_layer - layers.layer_size
    if missing:
        x = jax.lax.reshape(x, (layers.num_layers, layers.layer_size))
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0)))
    return jax.lax.reshape(x, (WIDTH * span.num_rows,))


def _from_rows(span: Span, x: jax.Array) -> jax.Array:
    """The leaf, from the vector that `_to_rows` made."""
    layers = span.layers
    if layers.layer_size != WIDTH * span.rows_per_layer:
        x = jax.lax.reshape(x, (layers.num_layers, WIDTH * span.rows_per_layer))
        x = jax.lax.slice(x, (0, 0), (layers.num_layers, layers.layer_size))
    axes = (*layers.stacked, *layers.within)
    x = jax.lax.reshape(x, [layers.shape[axis] for axis in axes])
    return jax.lax.transpose(x, np.argsort(axes)) if layers.stacked else x


# ---- in 8 bits ---------------------------------------------------------------------------------


def _geometry(span: Span) -> Geometry:
    """Where the blocks of a leaf are that is not in a buffer."""
    return Geometry.for_leaf(span.layers.shape, span.layers.stacked)


def _order_of_scale(span: Span) -> tuple[int, ...]:
    """The axes of the leaf's scales as its rows have them: those of layers first.

    Scales with an axis for the blocks of a layer are in this order as they are.
    """
    axes = range(len(_geometry(span).scales))
    stacked = span.layers.stacked if len(axes) == len(span.layers.shape) else ()
    return (*stacked, *(axis for axis in axes if axis not in stacked))


# Pieces of one size up to which one stage compiles as quickly as two; a kernel takes 5 to 10 ms.
_FEW = 8


# Number of pieces from which an eager call processes them one by one, and joins this many at a
# time: 5,000 pieces are split in a second, but by one program in half a minute.
_MANY = 256
_AT_A_TIME = 64


def split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The vector in pieces of these sizes, which add up to its own."""
    if _is_eager(x) and len(sizes) > _MANY > 2 * len(set(sizes)):
        starts = itertools.accumulate(sizes, initial=0)
        ranges = zip(sizes, starts, strict=False)
        return [_piece(x, np.int32(start), size=size) for size, start in ranges]
    return _in_one_program(x, sizes)


def join(pieces: Sequence[jax.Array]) -> jax.Array:
    """The vector of these pieces."""
    if len(pieces) > _MANY and all(map(_is_eager, pieces)):
        starts = range(0, len(pieces), _AT_A_TIME)
        pieces = [jax.lax.concatenate(pieces[i : i + _AT_A_TIME], 0) for i in starts]
    return jax.lax.concatenate(pieces, 0)


def _is_eager(x: jax.Array) -> bool:
    """An array on one device, or NumPy's, outside of any program."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or len(x.devices()) == 1


@functools.partial(jax.jit, static_argnames="size")
def _piece(x: jax.Array, start: jax.Array, *, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start,), (size,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    groups = _groups(sizes)
    parts = _split_each([x], [[size * count for size, count in groups]])
    if len(groups) < len(sizes):
        parts = _split_each(parts, [[size] * count for size, count in groups])
    return parts


@_split.defjvp
def _split_jvp(
    sizes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """By one plain split: JAX takes long to trace the derivative of a branch."""
    return _split(*primals, sizes), list(jax.lax.split(tangents[0], sizes))


_in_one_program = jax.jit(_split, static_argnums=1)


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """What to split off in the first turn: (size, count) of pieces that stay together."""
    starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    groups = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        step = math.isqrt(end - start) if end - start > _FEW else 1
        groups += [(sizes[start], min(step, end - i)) for i in range(start, end, step)]
    return groups


def _split_each(vectors: list[jax.Array], sizes: list[list[int]]) -> list[jax.Array]:
    """Each vector in pieces of its sizes."""

    def plain(vectors: list[jax.Array]) -> list[jax.Array]:
        return [y for x, parts in zip(vectors, sizes, strict=True) for y in jax.lax.split(x, parts)]

    def nothing(vectors: list[jax.Array]) -> list[jax.Array]:
        # Zeros computed from the vectors, as the pieces are: `shard_map` requires that.
        zero = numerics.zeros_like(_first(vectors))
        pieces = list(itertools.chain(*sizes))
        zeros = {size: jnp.broadcast_to(zero, (size,)) for size in pieces}
        return [zeros[size] for size in pieces]

    def in_branch(vectors: list[jax.Array]) -> list[jax.Array]:
        # The condition is always true, but XLA does not see that.
        number = _first(vectors).real.astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(number, jnp.uint32)
        return jax.lax.cond((bits | 1) > 0, plain, nothing, vectors)

    if not any(x.size for x in vectors) or sum(map(len, sizes)) == len(vectors):
        return plain(vectors)
    # On other devices, the host would wait for the condition.
    return jax.lax.platform_dependent(vectors, cpu=in_branch, default=plain)


def _first(vectors: list[jax.Array]) -> jax.Array:
    """Some element."""
    return next(x for x in vectors if x.size)[0]
