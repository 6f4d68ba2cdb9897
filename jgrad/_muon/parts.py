"""The arrays of an update in parts: those that hold matrices, and those that hold other elements.

Muon orthogonalizes matrices and leaves all other elements to Adam. A leaf is one or the other. A
packed buffer has runs of rows of both. Matrices have no second moments, or one number per output,
so that the buffer of second moments has other rows: those of all other leaves, in their order.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import rounded
from jgrad._inputs.matrix_axes import Array, MatrixAxes, View
from jgrad._inputs.moment import Moment, in_full_precision
from jgrad._layers.layer_axes import LayerAxes
from jgrad._packed import layouts, packing
from jgrad._packed.array_spec import ArraySpec
from jgrad._packed.layouts import RowOrder, Segment, Span
from jgrad._packed.packing import Packed
from jgrad._trees import checks, trees
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import replicated, sharded_as
from jgrad._trees.trees import PyTree

# Lists with an entry for each leaf of the unpacked tree, for each array of the tree, and for each
# part of these arrays. Without packed buffers all three have the same entries.
T = TypeVar("T")
PerLeaf: TypeAlias = list[T]
PerArray: TypeAlias = list[T]
PerPart: TypeAlias = list[T]
Matrices = PerLeaf[MatrixAxes | None]  # where those of each leaf are
Specs = Sequence[ArraySpec]  # what each array stands for


@dataclasses.dataclass(frozen=True)
class Part:
    """What a method computes with at once: an array; of a packed buffer, some rows.

    Attributes:
      array: which array.
      matrices: where the matrices are; None for other elements. In rows they are stacked along a
        first axis.
      rows: of a buffer, the first and the one behind the last; None for an array.
      second_rows: the rows of their second moments in the buffer of those.
      width: elements of a row.
      is_padding: whether it is the rows behind the last leaf.
    """

    array: int
    matrices: MatrixAxes | None
    rows: tuple[int, int] | None = None
    second_rows: tuple[int, int] = (0, 0)
    width: int = 0
    is_padding: bool = False

    @property
    def axes(self) -> MatrixAxes:
        """Where the matrices are, of a part that holds some."""
        assert self.matrices is not None
        return self.matrices

    def to_matrices(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """An array of whole matrices from this part, or from its numbers per output."""
        if self.rows is not None:
            x = self._items(per_output).of(x)
        return self.axes.gathered(x, per_output=per_output)

    def from_matrices(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """This part, from what `to_matrices` made of it."""
        x = self.axes.local_part(x, per_output=per_output)
        return x if self.rows is None else self._items(per_output).back(x)

    def _items(self, per_output: bool) -> View:
        """Rows as the items in them, without the padding behind each."""
        shape = self.axes.per_output if per_output else self.axes.shape
        rows = _length(self.second_rows if per_output else self.rows)
        padded = rows * self.width // shape[0]
        padding = padded - math.prod(shape[1:])
        return View((rows, self.width), (shape[0], padded), (0, 1), shape, padding)


class Parts:
    """All parts of the arrays of an update, in order, and the ways there and back."""

    def __init__(self, inputs: Inputs, matrices: Matrices, *, per_output: bool) -> None:
        """Of matrices with one second moment for each output, or with none."""
        self._inputs = inputs
        self.all: PerPart[Part] = []
        for i, spec in enumerate(inputs.specs):
            axes = [matrices[j] for j in spec.positions]
            if spec.is_unpacked or all(x is None for x in axes):
                self.all.append(Part(i, axes[0]))
            else:
                self.all += _of_buffer(i, spec, axes, per_output)

    def map(
        self, f: Callable[..., jax.Array], values: PerPart[Array], *, per_output: bool = False
    ) -> PerPart[Array]:
        """`Part.to_matrices` of each value, or `Part.from_matrices`; None for None."""
        pairs = zip(self.all, values, strict=True)
        return [None if x is None else f(part, x, per_output=per_output) for part, x in pairs]

    def split(self, arrays: PerArray[Array], seconds: Specs | None = None) -> PerPart[Array]:
        """The parts of arrays, or of second moments, of which `seconds` says what they stand for.

        Buffers are cut into parts, so that those whose types say that rows are sharded are
        gathered.
        """
        if not self._inputs.has_buffers:
            return arrays
        pairs = zip(seconds or self._inputs.specs, arrays, strict=True)
        ordered = [_by_segment(spec, x) for spec, x in pairs]
        second = seconds is not None
        return [_of_part(part, ordered[part.array], second=second) for part in self.all]

    def join(
        self,
        values: PerPart[Array],
        like: PerArray[jax.Array | Blocks],
        seconds: Specs | None = None,
    ) -> PerArray[Array]:
        """The arrays from their parts, sharded as those that they stand for."""
        if not self._inputs.has_buffers:
            return values
        arrays = _joined(self.all, values, second=seconds is not None)
        columns = zip(seconds or self._inputs.specs, arrays, like, strict=True)
        return [_by_share(spec, x, old) for spec, x, old in columns]

    def numbers(self, x: Any) -> Any:
        """Numbers of each array as those of each part; one for all, and tuples of both, likewise.

        Those of an array are one, or one for each of its rows.
        """
        if isinstance(x, tuple):
            return type(x)(*map(self.numbers, x))
        if not (self._inputs.has_buffers and isinstance(x, list)):
            return x
        columns = self.split([number if np.ndim(number) else None for number in x])
        pairs = zip(self.all, columns, strict=True)
        return [x[part.array] if column is None else column for part, column in pairs]

    def moment(self, moment: Moment, *, second: bool = False) -> Moment:
        """A moment to compute with: that of each part.

        Without buffers it is the moment itself, which is written in the form that the state has.
        """
        if not self._inputs.has_buffers:
            return moment
        old = self.split(in_full_precision(moment.old), moment.specs if second else None)
        return Moment(old, commit=self._inputs.commit, has_form=True)

    def stored(self, moment: Moment, *new: list[Any], second: bool = False) -> list[Any]:
        """The new moment as the state has it, from those that were written of some parts each."""
        written = new[0]
        for moments in new[1:]:
            written = [y if x is None else x for x, y in zip(written, moments, strict=True)]
        if self._inputs.has_buffers:
            seconds = moment.specs if second else None
            written = rounded(moment, self.join(written, moment.old, seconds))
        return written


# ---- arrays as parts, and back -----------------------------------------------------------------


def _by_segment(spec: ArraySpec, x: Array) -> Array:
    """An array with rows in the order in which parts count them: matrices of a shape together."""
    if x is None or spec.is_unpacked:
        return x
    return replicated(x) if spec.local_row_order is None else spec.local_row_order.to_leaf_order(x)


def _by_share(spec: ArraySpec, x: Array, old: jax.Array | Blocks) -> Array:
    """The array with rows in the order of the buffer."""
    if x is None or spec.is_unpacked:
        return x
    x = x if spec.local_row_order is None else spec.local_row_order.to_shard_order(x)
    return sharded_as(x, old.codes if isinstance(old, Blocks) else old)


def _of_part(part: Part, x: Array, *, second: bool) -> Array:
    if x is None or part.rows is None:
        return x
    rows = part.second_rows if second else part.rows
    if part.is_padding or rows == (0, x.shape[0]):
        return None if part.is_padding else x
    return jax.lax.slice_in_dim(x, *rows)


def _joined(parts: PerPart[Part], values: PerPart[Array], *, second: bool) -> PerArray[Array]:
    """The arrays, from their parts; None where nothing is known of an array.

    Rows of which nothing is known are zeros; but rows of second moments are those that are known.
    """
    arrays: PerArray[Array] = []
    pairs = zip(parts, values, strict=True)
    for _, group in itertools.groupby(pairs, lambda pair: pair[0].array):
        of_array = list(group)
        known = [x for _, x in of_array if x is not None]
        if len(of_array) == 1 or not known:
            arrays.append(of_array[0][1])
            continue
        dtype = np.result_type(*(x.dtype for x in known))
        pieces = [
            jnp.zeros((_length(part.rows), part.width), dtype) if x is None else x.astype(dtype)
            for part, x in of_array
            if not (second and x is None)
        ]
        arrays.append(jax.lax.concatenate(pieces, 0))
    return arrays


def _length(rows: tuple[int, int] | None) -> int:
    return 0 if rows is None else rows[1] - rows[0]


# ---- the parts of a buffer ---------------------------------------------------------------------


def _of_buffer(
    array: int, spec: ArraySpec, axes: Sequence[MatrixAxes | None], per_output: bool
) -> PerPart[Part]:
    parts: list[Part] = []
    row = second = 0
    for i, count, rows in _runs_of_rows(spec, axes):
        matrices, second_rows = None, rows
        if i is not None and axes[i] is not None:
            matrices = _of_items(axes[i], spec.spans[i].layers, count)
            span = _second_span(spec.spans[i], axes[i], per_output, 0, spec.width)
            second_rows = 0 if span is None else count * span.blocks_per_layer
        bounds = (row, row + rows), (second, second + second_rows)
        parts.append(Part(array, matrices, *bounds, spec.width))
        row, second = row + rows, second + second_rows
    if row < (end := spec.local_shape[0]):
        parts.append(Part(array, None, (row, end), width=spec.width, is_padding=True))
    return parts


def _runs_of_rows(
    spec: ArraySpec, axes: Sequence[MatrixAxes | None]
) -> Iterator[tuple[int | None, int, int]]:
    """(first leaf, items, rows) of each run of items that are alike, as this device has them.

    In a row order they are its segments. Otherwise leaves that are alike follow each other.
    """
    if spec.row_order is not None and spec.local_row_order is not None:
        shards = spec.local_row_order.shards
        for segment, members in _members(spec.row_order, spec.spans):
            first = next(iter(members), None)
            yield first, shards * segment.capacity, shards * segment.rows
        return

    def kind(i: int) -> tuple[MatrixAxes | None, LayerAxes | None]:
        return axes[i], None if axes[i] is None else spec.spans[i].layers

    for _, group in itertools.groupby(range(len(spec.spans)), kind):
        members = list(group)
        spans = [spec.spans[i] for i in members]
        items = sum(span.layers.num_layers for span in spans)
        yield members[0], items, sum(span.num_blocks for span in spans)


def _members(row_order: RowOrder, spans: Sequence[Span]) -> list[tuple[Segment, list[int]]]:
    """The leaves of each segment."""
    bounds = [*row_order.starts, row_order.shards * row_order.rows_per_shard]
    return [
        (segment, [i for i, span in enumerate(spans) if start <= span.first < end])
        for segment, start, end in zip(row_order.segments, bounds, bounds[1:], strict=False)
    ]


def _of_items(axes: MatrixAxes | None, layers: LayerAxes, count: int) -> MatrixAxes | None:
    """The matrices of leaves or layers that are stacked along a first axis."""
    if axes is None:
        return None
    new = {axis: 1 + i for i, axis in enumerate(layers.within)}
    return dataclasses.replace(
        axes,
        shape=(count, *(axes.shape[axis] for axis in layers.within)),
        stacked=(0, *(new[axis] for axis in axes.stacked if axis in new)),
        outputs=tuple(new[axis] for axis in axes.outputs),
    )


# ---- buffers that cannot be taken apart --------------------------------------------------------


def _check_whole(inputs: Parameters, axes: Matrices) -> None:
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
    spec: ArraySpec, row_order: RowOrder, axes: Matrices, chosen: ArgLeaves
) -> None:
    for segment, members in _members(row_order, spec.spans):
        items = [_of_items(axes[spec.positions[j]], spec.spans[j].layers, 1) for j in members]
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


# ---- the shapes of second moments --------------------------------------------------------------


def second_shapes(inputs: Parameters, axes: Matrices, *, per_output: bool) -> PyTree:
    """The shape of the second moments of each array; None where it has none.

    They are those of all elements that are in no matrix; with `per_output`, one number per output
    of a matrix, too.
    """
    if not inputs.has_buffers:
        leaves, structure = inputs.reference.leaves, trees.flatten(inputs.tree)[1]
        pairs = zip(leaves, axes, strict=True)
        return structure.unflatten([_second_shape(x, of, per_output) for x, of in pairs])
    _check_whole(inputs, axes)
    remaining = iter(axes)

    def of_node(x: PyTree) -> PyTree:
        if not packing.is_packed(x):
            return _second_shape(x, next(remaining), per_output)
        return _second_packed(
            x, list(itertools.islice(remaining, len(layouts.spans(x.layout)))), per_output
        )

    return jax.tree.map(of_node, inputs.tree, is_leaf=lambda x: x is None or packing.is_packed(x))


def _second_shape(
    x: Array, axes: MatrixAxes | None, per_output: bool
) -> jax.ShapeDtypeStruct | None:
    if x is None or not checks.is_inexact(x) or (axes is not None and not per_output):
        return None
    return jax.ShapeDtypeStruct(x.shape if axes is None else axes.per_output, x.dtype)


def _second_packed(x: Packed[Any], axes: Matrices, per_output: bool) -> Packed[Any]:
    layout = x.layout
    spans, buffers, shapes = list(layouts.spans(layout)), dict(x.buffers), dict(layout.shapes)
    row_orders: dict[str, RowOrder] = {}

    def put(leaves: Sequence[tuple[int, Span]], row: int) -> tuple[int, int]:
        """Puts leaves one behind the other; the row behind them, and the rows of one item."""
        blocks = 0
        for i, span in leaves:
            spans[i] = new = _second_span(span, axes[i], per_output, row, layout.width)
            if new is not None:
                row, blocks = row + new.num_blocks, new.blocks_per_layer
        return row, blocks

    for name, buffer in x.buffers.items():
        leaves = layouts.within(layout, name)
        is_matrix = [axes[i] is not None for i, _ in leaves]
        if not checks.is_inexact(buffer) or not any(is_matrix):
            buffers[name] = _second_shape(buffer, None, per_output)
            continue
        if not per_output and all(is_matrix):
            buffers[name] = None
            continue
        if leaves[0][1].is_unpacked:
            put(leaves, 0)
            span = spans[leaves[0][0]]
            assert span is not None
            shapes[name] = span.layers.shape
        elif (row_order := layouts.row_order(layout, name)) is None:
            shapes[name] = (put(leaves, 0)[0], layout.width)
        else:
            start, segments = 0, []
            for segment, members in _members(row_order, [span for _, span in leaves]):
                blocks = put([leaves[j] for j in members], start)[1]
                rows = segment.capacity * blocks if segment.capacity else segment.rows
                segments += [Segment(rows, segment.capacity)] if rows else []
                start += row_order.shards * rows
            row_orders[name] = RowOrder(row_order.shards, tuple(segments))
            shapes[name] = (start, layout.width)
        local = shapes[name]
        if (shard := layouts.shard(layout)) is not None and not leaves[0][1].is_unpacked:
            local = (shard.num_rows(local[0]), *local[1:])
        buffers[name] = jax.ShapeDtypeStruct(local, buffer.dtype)
    return Packed(buffers, layouts.with_places(layout, spans, shapes, row_orders))


def _second_span(
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
