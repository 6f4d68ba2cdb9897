"""Buffers in 8 bits: their rows are the blocks, so that a leaf has the codes that it has unpacked.

A leaf that is too small for 8 bits by itself is stored in them where its buffer is. Unpacked, it is
an array of float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._packed import spans, splitting
from jgrad._packed.spans import Span
from jgrad._quantized import encoding
from jgrad._quantized.codec import Codec, codec_of
from jgrad._quantized.encoding import SMALLEST
from jgrad._quantized.geometry import Geometry
from jgrad._trees import checks
from jgrad._trees.blocks import SIZE, Blocks
from jgrad._trees.checks import ArgLeaves


def split(buffer: Blocks, rows: tuple[int, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The codes and the scales of so many rows, one behind the other."""
    codes = splitting.split(encoding.elements(buffer).reshape(-1), tuple(n * SIZE for n in rows))
    return codes, splitting.split(buffer.scale.reshape(-1), rows)


def join(pairs: Sequence[tuple[Span, Blocks]], rows: int) -> Blocks:
    """The buffer of leaves that `recoded` made, with so many rows; zeros where no leaf is."""
    codec = codec_of(pairs[0][1])
    codes: list[jax.Array] = []
    scale: list[jax.Array] = []
    row = 0
    for span, x in pairs:
        codes += _zeros((span.first - row) * SIZE, codec.dtype)
        codes.append(spans.to_blocks(span, encoding.elements(x), SIZE))
        scale += _zeros(span.first - row, x.scale.dtype)
        scale.append(_rows_of_scale(span, x.scale))
        row = span.first + span.num_blocks
    codes += _zeros((rows - row) * SIZE, codec.dtype)
    scale += _zeros(rows - row, scale[0].dtype)
    geometry = Geometry((rows, SIZE), (rows, 1))
    joined = (
        splitting.join(codes).reshape(geometry.shape),
        splitting.join(scale).reshape(geometry.scales),
    )
    return encoding.of_elements(*joined, geometry, codec)


def _zeros(count: int, dtype: Any) -> list[jax.Array]:
    return [jnp.zeros((count,), dtype)] if count else []


def recoded(span: Span, x: Any, codec: Codec) -> Blocks:
    """A leaf in the blocks that are its rows; the same codes if its blocks are those."""
    return encoding.recoded(x, _geometry(span), codec)


def check_recodable(arg: ArgLeaves, i: int, codec: Codec) -> None:
    """A leaf for a buffer in 8 bits: numbers, or codes of the same codec."""
    x = arg.leaves[i]
    is_right = (
        codec_of(x) == codec if isinstance(x, Blocks) else getattr(x, "dtype", None) == jnp.float32
    )
    if not is_right:
        expected = f"an array of float32, or Blocks with codes of {codec.kind}"
        arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")


def _geometry(span: Span) -> Geometry:
    return Geometry.of_leaf(span.layers.shape, span.layers.stacked)


def leaf(span: Span, codes: jax.Array, scale: jax.Array, codec: Codec) -> Blocks:
    """The leaf of its rows."""
    geometry = _geometry(span)
    parts = spans.from_blocks(span, codes, SIZE), _scale_of_rows(span, scale)
    return encoding.of_elements(*parts, geometry, codec)


def by_itself(span: Span, x: Blocks) -> Any:
    """The leaf as it is unpacked: in 8 bits if it is large enough for them by itself."""
    return x if span.size >= SMALLEST else encoding.decoded(x)


def _order(span: Span) -> tuple[int, ...] | None:
    """The axes of the scales, those of layers first; None where they are in order."""
    stacked = span.layers.stacked
    if not stacked or len(_geometry(span).scales) != len(span.layers.shape):
        return None
    return (*stacked, *span.layers.within)


def _scale_of_rows(span: Span, rows: jax.Array) -> jax.Array:
    geometry, order = _geometry(span), _order(span)
    if order is None:
        return rows.reshape(geometry.scales)
    layers = rows.reshape([geometry.scales[axis] for axis in order])
    return jnp.transpose(layers, list(np.argsort(order)))


def _rows_of_scale(span: Span, scale: jax.Array) -> jax.Array:
    order = _order(span)
    return (scale if order is None else jnp.transpose(scale, order)).reshape(-1)
