"""One buffer from its leaves, and the leaves from the buffer, as numbers or in 8 bits.

In 8 bits the rows of a buffer are its blocks, so that a leaf has the codes that it has unpacked. A
leaf that is too small for 8 bits by itself is stored in them where its buffer is. Unpacked, it is
an array of float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._packed import splitting
from jgrad._packed.layouts import WIDTH, Span
from jgrad._quantized import encoding
from jgrad._quantized.codec import Codec, codec_of
from jgrad._quantized.encoding import SMALLEST
from jgrad._quantized.geometry import Geometry
from jgrad._trees.forms import Blocks


def join_leaves(spans: Sequence[Span], leaves: Sequence[jax.Array], rows: int) -> jax.Array:
    """The buffer of so many rows; zeros where no leaf is.

    Args:
      spans: of its leaves, from the top down.
      leaves: arrays of one dtype.
      rows: of the buffer.
    """
    return _join(spans, list(map(_to_blocks, spans, leaves)), (rows, WIDTH))


def join_codes(spans: Sequence[Span], leaves: Sequence[Blocks], rows: int) -> Blocks:
    """The buffer in 8 bits of leaves that `recoded` made."""
    codes = [_to_blocks(span, encoding.elements(x)) for span, x in zip(spans, leaves, strict=True)]
    scale = [
        jnp.transpose(x.scale, _order_of_scale(span)).reshape(-1)
        for span, x in zip(spans, leaves, strict=True)
    ]
    geometry = Geometry((rows, WIDTH), (rows, 1))
    parts = _join(spans, codes, geometry.shape), _join(spans, scale, geometry.scales)
    return encoding.of_elements(*parts, geometry, codec_of(leaves[0]))


def split_leaves(spans: Sequence[Span], buffer: jax.Array) -> list[jax.Array]:
    """The leaves of a buffer."""
    return list(map(_from_blocks, spans, _split(spans, buffer)))


def split_codes(
    spans: Sequence[Span], buffer: Blocks, *, as_stored: bool
) -> list[jax.Array | Blocks]:
    """The leaves of a buffer in 8 bits.

    They are Blocks `as_stored`; else those that are too small for it by themselves are float32.
    """
    codec = codec_of(buffer)
    codes, scales = _split(spans, encoding.elements(buffer)), _split(spans, buffer.scale)
    leaves: list[jax.Array | Blocks] = []
    for span, code, column in zip(spans, codes, scales, strict=True):
        geometry, order = _geometry(span), _order_of_scale(span)
        scale = column.reshape([geometry.scales[axis] for axis in order])
        scale = jnp.transpose(scale, list(np.argsort(order)))
        leaf = encoding.of_elements(_from_blocks(span, code), scale, geometry, codec)
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
        pieces.append((span, span.num_blocks))
        end = span.first + span.num_blocks
    return [*pieces, (None, rows - end)] if rows > end else pieces


def _join(spans: Sequence[Span], vectors: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """A vector for each leaf as an array of rows, with zeros in those of no leaf."""
    rows, width = shape
    leaves = iter(vectors)
    pieces = [
        jnp.zeros((count * width,), vectors[0].dtype) if span is None else next(leaves)
        for span, count in _pieces(spans, rows)
    ]
    return splitting.join(pieces).reshape(shape)


def _split(spans: Sequence[Span], x: jax.Array) -> list[jax.Array]:
    """The vector of each leaf, from an array of rows."""
    rows, width = x.shape
    pieces = _pieces(spans, rows)
    vectors = splitting.split(x.reshape(-1), tuple(count * width for _, count in pieces))
    return [y for (span, _), y in zip(pieces, vectors, strict=True) if span is not None]


# Both by operations of `lax`, which are a fraction of those of `jnp` to trace, a thousand times.


def _to_blocks(span: Span, x: jax.Array) -> jax.Array:
    """The leaf as a vector of whole rows, with zeros behind each layer."""
    layers = span.layers
    if layers.stacked:
        x = jax.lax.transpose(x, (*layers.stacked, *layers.within))
    missing = WIDTH * span.blocks_per_layer - layers.layer_size
    if missing:
        x = jax.lax.reshape(x, (layers.num_layers, layers.layer_size))
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0)))
    return jax.lax.reshape(x, (WIDTH * span.num_blocks,))


def _from_blocks(span: Span, x: jax.Array) -> jax.Array:
    """The leaf, from the vector that `_to_blocks` made."""
    layers = span.layers
    if layers.layer_size != WIDTH * span.blocks_per_layer:
        x = jax.lax.reshape(x, (layers.num_layers, WIDTH * span.blocks_per_layer))
        x = jax.lax.slice(x, (0, 0), (layers.num_layers, layers.layer_size))
    axes = (*layers.stacked, *layers.within)
    x = jax.lax.reshape(x, [layers.shape[axis] for axis in axes])
    return jax.lax.transpose(x, np.argsort(axes)) if layers.stacked else x


# ---- in 8 bits ---------------------------------------------------------------------------------


def _geometry(span: Span) -> Geometry:
    """Where the blocks of a leaf are that is not in a buffer."""
    return Geometry.of_leaf(span.layers.shape, span.layers.stacked)


def _order_of_scale(span: Span) -> tuple[int, ...]:
    """The axes of the leaf's scales as its rows have them: those of layers first.

    Scales with an axis for the blocks of a layer are in this order as they are.
    """
    axes = range(len(_geometry(span).scales))
    stacked = span.layers.stacked if len(axes) == len(span.layers.shape) else ()
    return (*stacked, *(axis for axis in axes if axis not in stacked))
