"""Second moments for some elements alone: their shapes, and where they are in packed buffers.

Matrices of Muon have none, or one number per output. The buffer of second moments of a packed tree
has the rows of all other leaves, in the order of the parameters.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jgrad._layers.layer_axes import LayerAxes
from jgrad._muon.matrix_axes import MatrixAxes, second_shape
from jgrad._packed import layouts, packing
from jgrad._packed.layouts import RowOrder, Segment, Span
from jgrad._packed.packing import Packed
from jgrad._trees import checks
from jgrad._trees.trees import PyTree


def second_shapes(tree: PyTree, axes: Sequence[MatrixAxes | None], *, per_output: bool) -> PyTree:
    """The shape of the second moments of each array; None where it has none.

    They are those of all elements that are in no matrix; with `per_output`, one number per output
    of a matrix, too.
    """
    count = 0

    def of_node(x: Any) -> Any:
        nonlocal count
        first = count
        if packing.is_packed(x):
            count += len(layouts.spans(x.layout))
            return _second_packed(x, axes[first:count], per_output)
        count += 1
        return second_shape(x, axes[first], per_output=per_output)

    return jax.tree.map(of_node, tree, is_leaf=lambda x: x is None or packing.is_packed(x))


def _second_packed(x: Packed, axes: Sequence[MatrixAxes | None], per_output: bool) -> Packed:
    layout = x.layout
    runs, buffers, shapes = list(layouts.spans(layout)), dict(x.buffers), dict(layout.shapes)
    row_orders: dict[str, RowOrder] = {}
    for name, buffer in x.buffers.items():
        own = layouts.within(layout, name)
        if not checks.is_inexact(buffer) or all(axes[i] is None for i, _ in own):
            buffers[name] = second_shape(buffer, None, per_output=per_output)
            continue
        if not per_output and all(axes[i] is not None for i, _ in own):
            buffers[name] = None
            continue
        if own[0][1].is_unpacked:
            ((i, span),) = own
            runs[i] = new = second_span(span, axes[i], per_output, 0, layout.width)
            assert new is not None
            shapes[name] = new.layers.shape
        elif (row_order := layouts.row_order(layout, name)) is not None:
            rows, new_order = _second_row_order(
                runs, own, axes, per_output, row_order, layout.width
            )
            shapes[name] = (rows, layout.width)
            row_orders[name] = new_order
        else:
            row = 0
            for i, span in own:
                runs[i] = new = second_span(span, axes[i], per_output, row, layout.width)
                row += 0 if new is None else new.num_blocks
            shapes[name] = (row, layout.width)
        local = shapes[name]
        if (shard := layouts.shard(layout)) is not None and not own[0][1].is_unpacked:
            local = (shard.num_rows(local[0]), *local[1:])
        buffers[name] = jax.ShapeDtypeStruct(local, buffer.dtype)
    return Packed(buffers, layouts.with_places(layout, runs, shapes, row_orders))


def _second_row_order(
    runs: list[Span | None],
    own: Sequence[tuple[int, Span]],
    axes: Sequence[MatrixAxes | None],
    per_output: bool,
    row_order: RowOrder,
    width: int,
) -> tuple[int, RowOrder]:
    """The rows and their order in a buffer of second moments; its spans are written to `runs`."""
    segments: list[Segment] = []
    start = 0
    bounds = [*row_order.starts, row_order.shards * row_order.rows_per_shard]
    for segment, first, end in zip(row_order.segments, bounds, bounds[1:], strict=False):
        rows = 0 if segment.capacity else segment.rows
        for i, span in own:
            if not first <= span.first < end:
                continue
            new = second_span(span, axes[i], per_output, 0, width)
            if new is not None and segment.capacity:
                item = (span.first - first) // span.blocks_per_layer
                new = new._replace(start=start + item * new.blocks_per_layer)
                rows = segment.capacity * new.blocks_per_layer
            elif new is not None:
                new = new._replace(start=start + span.first - first)
            runs[i] = new
        if rows:
            segments.append(Segment(rows, segment.capacity))
        start += row_order.shards * rows
    return start, RowOrder(row_order.shards, tuple(segments))


def second_span(
    span: Span, axes: MatrixAxes | None, per_output: bool, row: int, width: int
) -> Span | None:
    """Where the second moments of a leaf are, behind those before them."""
    start = None if span.is_unpacked else row
    if axes is None:
        return span._replace(start=start)
    if not per_output:
        return None
    layers = LayerAxes(axes.per_output, span.layers.stacked)
    blocks = 0 if span.is_unpacked else -(-layers.layer_size // width)
    return span._replace(layers=layers, start=start, blocks_per_layer=blocks)
