"""The layout for a tree: which leaves are packed, in which order, and where each starts."""

import collections
import math
from collections.abc import Sequence

import jax
import numpy as np

from jgrad._layers import layer_axes as axes_of
from jgrad._layers.layer_axes import Axes
from jgrad._packed.layouts import APART, WIDTH, Layout, RowOrder, Segment, Span
from jgrad._quantized.encoding import SMALLEST
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


def layout_of(
    function: str,
    tree: PyTree,
    layer_axes: PyTree = None,
    multiple_of: int = 1,
    max_size: int | None = None,
    matrices: Sequence[bool] | None = None,
    *,
    small_apart: bool = False,
    others: bool = False,
) -> tuple[Layout, list[jax.Array | None]]:
    """The layout for a tree of floating arrays, and its leaves; with `others`, for any arrays.

    Leaves of more than `max_size` elements stay unpacked, and so do others than floating ones. The
    layers of leaves with True in `matrices` are whole in each of `multiple_of` shards. With
    `small_apart`, leaves that are too small for 8 bits share no buffer with larger ones.
    """
    arg = ArgLeaves.from_tree(function, "tree", tree).with_arrays()
    for i, x in enumerate(arg.leaves):
        if not (x is None or checks.is_inexact(x) or (others and checks.is_numeric(x))):
            arg.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = axes_of.read_layer_axes(function, layer_axes)
    stacked = ArgLeaves.from_prefix(function, "layer_axes", axes, "tree", tree)
    not_sharded = arg._replace(name="mesh_axes", leaves=[Axes()] * len(arg.leaves))
    layers = axes_of.of_leaves(not_sharded, stacked, arg)

    spans: list[Span | None] = [None] * len(arg.leaves)
    packed: list[tuple[int, Span]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (x, path, leaf_layers) in enumerate(zip(arg.leaves, arg.paths(), layers, strict=True)):
        if x is None:
            continue
        large = max_size is not None and math.prod(x.shape) > max_size
        if large or not checks.is_inexact(x):
            name = f"leaf {i}"  # not the path: two leaves may have one
            spans[i] = Span(path, np.dtype(x.dtype), leaf_layers, name, None, 0)
            shapes[name] = x.shape
            continue
        blocks_per_layer = -(-leaf_layers.layer_size // WIDTH)
        is_apart = small_apart and math.prod(x.shape) < SMALLEST
        name = x.dtype.name + APART * is_apart
        packed.append((i, Span(path, np.dtype(x.dtype), leaf_layers, name, 0, blocks_per_layer)))
    # Leaves that are alike are neighbours: XLA compiles equal pieces of work once.
    packed.sort(key=lambda member: (member[1].layers.shape, member[1].layers.stacked))
    buffers: dict[str, list[tuple[int, Span]]] = {}
    for member in packed:
        buffers.setdefault(member[1].buffer, []).append(member)
    row_orders: dict[str, RowOrder] = {}
    for name, members in buffers.items():
        chosen = [matrices is not None and multiple_of > 1 and matrices[i] for i, _ in members]
        starts, row_order = _assign_rows([span for _, span in members], chosen, multiple_of)
        if any(chosen):
            _check_padding(arg, members, chosen, row_order)
            row_orders[name] = row_order
        for start, (i, span) in zip(starts, members, strict=True):
            spans[i] = span._replace(start=start)
        shapes[name] = (row_order.num_rows, WIDTH)
    layout = Layout(
        trees.flatten(tree)[1],
        tuple(spans),
        tuple(sorted(shapes.items())),
        _row_orders=tuple(sorted(row_orders.items())),
    )
    return layout, list(arg.leaves)


def _assign_rows(
    spans: Sequence[Span], chosen: Sequence[bool], shards: int
) -> tuple[list[int], RowOrder]:
    """The first row of each span, and the order of rows; layers of chosen spans stay whole.

    Without chosen ones there is one segment, in which leaves follow each other.
    """
    alike: dict[tuple[bool, tuple[int, ...], int], list[int]] = {}
    for i, (span, is_matrix) in enumerate(zip(spans, chosen, strict=True)):
        kind = (True, _layer_shape(span), span.blocks_per_layer) if is_matrix else (False, (), 1)
        alike.setdefault(kind, []).append(i)
    starts, segments, start = [0] * len(spans), [], 0
    for is_matrix, shape, blocks in sorted(alike, key=lambda kind: not kind[0]):  # matrices first
        row = start
        for i in alike[is_matrix, shape, blocks]:
            starts[i] = row
            row += spans[i].num_blocks
        capacity = -(-(row - start) // (blocks * shards)) if blocks else 0
        segments.append(Segment(capacity * blocks, capacity if is_matrix else 0))
        start += shards * capacity * blocks
    return starts, RowOrder(shards, tuple(segments))


def _check_padding(
    arg: ArgLeaves, members: list[tuple[int, Span]], chosen: list[bool], row_order: RowOrder
) -> None:
    """No more than half of such a buffer is padding: some shape has too few matrices."""
    shards, num_rows = row_order.shards, row_order.num_rows
    used = sum(span.num_blocks for _, span in members)
    if 2 * used >= num_rows:
        return
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    first: dict[tuple[int, ...], tuple[int, Span]] = {}
    for (i, span), is_matrix in zip(members, chosen, strict=True):
        if is_matrix:
            counts[_layer_shape(span)] += span.layers.num_layers
            first.setdefault(_layer_shape(span), (i, span))
    shape = max(counts, key=lambda x: (-counts[x] % shards) * first[x][1].blocks_per_layer)
    count = counts[shape]
    problem = (
        f"{'1 matrix' if count == 1 else f'{count} matrices'} of shape {shape} for "
        f"{shards} shards: {100 * (num_rows - used) // num_rows}% of the buffer would be "
        "padding, expected at most half; shard over a smaller mesh axis, with a smaller "
        "`multiple_of`"
    )
    arg.fail(first[shape][0], ValueError, problem)


def _layer_shape(span: Span) -> tuple[int, ...]:
    """The shape of a layer of the leaf."""
    return tuple(span.layers.shape[axis] for axis in span.layers.within)
