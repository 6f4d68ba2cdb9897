"""The parts of arrays that hold matrices, and the parts that hold other elements.

Muon orthogonalizes matrices and leaves all other elements to Adam. A leaf is one or the other. A
packed buffer has runs of rows of both.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._inputs.inputs import Parameters
from jgrad._layers.layer_axes import LayerAxes
from jgrad._muon.matrix_axes import MatrixAxes, Part
from jgrad._muon.second_moments import second_span
from jgrad._packed.array_spec import ArraySpec
from jgrad._packed.layouts import RowOrder, Segment, Span
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import replicated, sharded_as


@dataclasses.dataclass(frozen=True)
class Rows(Part):
    """Rows of a packed buffer, with elements of one kind.

    Attributes:
      matrices: where the matrices are in the items of the rows, stacked along a first axis.
      rows: the first, and the one behind the last.
      second_rows: the rows of their second moments in the buffer of those.
      is_padding: rows behind the last leaf.
    """

    rows: tuple[int, int]
    second_rows: tuple[int, int] = (0, 0)
    is_padding: bool = False

    def to_matrices(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        assert self.matrices is not None
        shape = self.matrices.per_output if per_output else self.matrices.shape
        return super().to_matrices(_to_items(x, shape), per_output=per_output)

    def from_matrices(
        self, x: jax.Array, like: jax.Array, *, per_output: bool = False
    ) -> jax.Array:
        x = super().from_matrices(x, like, per_output=per_output)
        return _from_items(x, like.shape)


def of_arrays(
    specs: Sequence[ArraySpec], axes: Sequence[MatrixAxes | None], *, per_output: bool
) -> list[Part]:
    """The parts of all arrays, in order.

    Args:
      specs: what the arrays stand for.
      axes: for each leaf of the unpacked tree, where its matrices are; None for other elements.
      per_output: whether matrices have second moments: one number per output.
    """
    found = []
    for i, spec in enumerate(specs):
        own = [axes[j] for j in spec.positions]
        if spec.is_unpacked or all(x is None for x in own):
            found.append(Part(i, own[0]))
        elif spec.local_row_order is not None:
            found += _of_segments(i, spec, spec.local_row_order, own, per_output)
        else:
            found += _of_buffer(i, spec, own, per_output)
    return found


def split(
    parts: Sequence[Part], specs: Sequence[ArraySpec], arrays: Sequence[Any], *, second: bool
) -> list[Any]:
    """The parts of arrays, or of their second moments.

    Buffers are cut into parts, so that those whose types say that rows are sharded are gathered.
    """
    ordered = [_by_segment(*pair) for pair in zip(specs, arrays, strict=True)]
    return [_of_part(part, ordered[part.array], second=second) for part in parts]


def split_numbers(
    parts: Sequence[Part], specs: Sequence[ArraySpec], numbers: Sequence[Any]
) -> list[Any]:
    """For each part its numbers, of those of each array: one, or one for each row."""
    columns = [x if np.ndim(x) else None for x in numbers]
    cut = split(parts, specs, columns, second=False)
    return [numbers[part.array] if x is None else x for part, x in zip(parts, cut, strict=True)]


def _of_part(part: Part, x: Any, *, second: bool) -> Any:
    if x is None or not isinstance(part, Rows):
        return x
    return None if part.is_padding else _sliced(x, part.second_rows if second else part.rows)


def join(
    parts: Sequence[Part],
    specs: Sequence[ArraySpec],
    values: Sequence[Any],
    like: Sequence[Any],
    *,
    second: bool,
) -> list[Any]:
    """The arrays from their parts, sharded as those that they stand for."""
    arrays = (_joined_seconds if second else _joined)(parts, values)
    return [_by_share(*row) for row in zip(specs, arrays, like, strict=True)]


def _by_segment(spec: ArraySpec, x: Any) -> Any:
    """An array with rows in the order in which parts count them: matrices of a shape together."""
    if x is None or spec.is_unpacked:
        return x
    return replicated(x) if spec.local_row_order is None else spec.local_row_order.to_leaf_order(x)


def _by_share(spec: ArraySpec, x: Any, old: Any) -> Any:
    """The array with rows in the order of the buffer."""
    if x is None or spec.is_unpacked:
        return x
    x = x if spec.local_row_order is None else spec.local_row_order.to_shard_order(x)
    return sharded_as(x, old.codes if isinstance(old, Blocks) else old)


def _joined(parts: Sequence[Part], values: Sequence[Any]) -> list[Any]:
    """The arrays, from their parts; None where nothing is known of an array."""
    whole = []
    for _, group in itertools.groupby(zip(parts, values, strict=True), lambda pair: pair[0].array):
        own = list(group)
        known = [x for _, x in own if x is not None]
        if len(own) == 1 or not known:
            whole.append(own[0][1])
            continue
        real = np.result_type(*(x.dtype for x in known))
        width = known[0].shape[1:]
        pieces = []
        for part, x in own:
            if x is None:
                assert isinstance(part, Rows)
                x = jnp.zeros((part.rows[1] - part.rows[0], *width), real)
            pieces.append(x.astype(real))
        whole.append(jax.lax.concatenate(pieces, 0))
    return whole


def _joined_seconds(parts: Sequence[Part], values: Sequence[Any]) -> list[Any]:
    """The second moments of arrays, from those of their parts; None where there are none."""
    whole = []
    for _, group in itertools.groupby(zip(parts, values, strict=True), lambda pair: pair[0].array):
        known = [x for _, x in group if x is not None]
        whole.append(jax.lax.concatenate(known, 0) if len(known) > 1 else (*known, None)[0])
    return whole


def check_whole(inputs: Parameters, axes: Sequence[MatrixAxes | None]) -> None:
    """No matrix is in the rows of two devices; and leaves that were packed as equals are equal."""
    chosen = ArgLeaves.from_tree(inputs.function, "matrices", inputs.shapes)
    for spec in inputs.specs:
        i = min((i for i in spec.positions if axes[i] is not None), default=None)
        if i is None or spec.is_unpacked:
            continue
        devices = 1 if spec.shard is None else spec.shard.devices
        if devices > 1 and (spec.row_order is None or spec.row_order.shards % devices):
            problem = (
                f"a matrix in a buffer of which each of {devices} devices has some rows, expected "
                f"whole matrices on each: `pack(params, matrices=..., multiple_of={devices})`"
            )
            chosen.fail(i, ValueError, problem)
        if spec.row_order is not None:
            _check_segments(spec, spec.row_order, axes, chosen)


def _check_segments(
    spec: ArraySpec, row_order: RowOrder, axes: Sequence[MatrixAxes | None], chosen: ArgLeaves
) -> None:
    for segment, members in _members(spec, row_order):
        items = [_of_item(axes[spec.positions[j]], spec.spans[j]) for j in members]
        for j, item in zip(members, items, strict=True):
            i = spec.positions[j]
            if (item is None) == bool(segment.capacity):
                packed = "a matrix" if segment.capacity else "an ordinary leaf"
                problem = f"{item is not None}, but it was packed as {packed}"
                remedy = "expected the `matrices` with which `pack` was called"
                chosen.fail(i, ValueError, f"{problem}, {remedy}")
            if item != items[0]:
                other = spec.spans[members[0]].path
                outputs = {x.outputs for x in (item, items[0]) if x is not None}
                what = "`split`" if len(outputs) == 1 else "place of outputs"
                problem = f"another {what} than in {other}, of equal shape"
                remedy = "expected the same, as they share a part of the buffer"
                chosen.fail(i, ValueError, f"{problem}, {remedy}")


def _members(spec: ArraySpec, row_order: RowOrder) -> list[tuple[Segment, list[int]]]:
    """The spans of each segment."""
    bounds = [*row_order.starts, spec.shape[0]]
    return [
        (segment, [j for j, span in enumerate(spec.spans) if start <= span.first < end])
        for segment, start, end in zip(row_order.segments, bounds, bounds[1:], strict=False)
    ]


# ---- runs of rows ------------------------------------------------------------------------------


def _of_buffer(
    array: int, spec: ArraySpec, axes: Sequence[MatrixAxes | None], per_output: bool
) -> list[Part]:
    """Leaves that are alike follow each other, so that they are items of one part."""
    found: list[Part] = []
    row = second = 0
    pairs = list(zip(spec.spans, axes, strict=True))
    for _, group in itertools.groupby(pairs, lambda pair: (pair[1], pair[1] and pair[0].layers)):
        spans = list(group)
        (first, own), count = spans[0], len(spans)
        rows = (row, row + sum(span.num_blocks for span, _ in spans))
        row = rows[1]
        kept = rows[1] - rows[0]
        matrices = None
        if own is not None:
            matrices = _of_items(own, first.layers, count * first.layers.num_layers)
            new = second_span(first, own, per_output, 0, spec.width)
            kept = 0 if new is None else count * new.num_blocks
        found.append(Rows(array, matrices, rows, (second, second + kept)))
        second += kept
    if row < spec.shape[0]:
        found.append(Rows(array, None, (row, spec.shape[0]), is_padding=True))
    return found


def _of_segments(
    array: int,
    spec: ArraySpec,
    row_order: RowOrder,
    axes: Sequence[MatrixAxes | None],
    per_output: bool,
) -> list[Part]:
    """A part for each segment, of the shards that this device has."""
    assert spec.row_order is not None
    found: list[Part] = []
    row = second = 0
    for segment, own_spans in _members(spec, spec.row_order):
        rows = row_order.shards * segment.rows
        own = None if not own_spans else axes[own_spans[0]]
        matrices, kept = None, rows
        if own is not None:
            span, count = spec.spans[own_spans[0]], row_order.shards * segment.capacity
            matrices = _of_items(own, span.layers, count)
            new = second_span(span, own, per_output, 0, spec.width)
            kept = 0 if new is None else count * new.blocks_per_layer
        found.append(Rows(array, matrices, (row, row + rows), (second, second + kept)))
        row, second = row + rows, second + kept
    return found


def _of_item(axes: MatrixAxes | None, span: Span) -> MatrixAxes | None:
    return None if axes is None else _of_items(axes, span.layers, 1)


def _of_items(axes: MatrixAxes, layers: LayerAxes, count: int) -> MatrixAxes:
    """The matrices of leaves or layers that are stacked along a first axis."""
    place = {axis: 1 + i for i, axis in enumerate(layers.within)}
    return dataclasses.replace(
        axes,
        shape=(count, *(axes.shape[axis] for axis in layers.within)),
        stacked=(0, *(place[axis] for axis in axes.stacked if axis in place)),
        outputs=tuple(place[axis] for axis in axes.outputs),
    )


def _sliced(x: jax.Array, rows: tuple[int, int]) -> jax.Array:
    if rows == (0, x.shape[0]):
        return x
    return jax.lax.slice_in_dim(x, *rows)


def _to_items(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Items of a shape, the first axis counting them, without the padding behind each."""
    size = math.prod(shape[1:])
    x = x.reshape(shape[0], -1)
    return (x if x.shape[1] == size else x[:, :size]).reshape(shape)


def _from_items(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Rows, from what `_to_items` made of them."""
    x = x.reshape(x.shape[0], -1)
    missing = math.prod(shape) // x.shape[0] - x.shape[1]
    if missing:
        x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (0, missing, 0)))
    return x.reshape(shape)
