"""The parts of arrays that hold matrices, and the parts that hold other elements.

Muon orthogonalizes matrices and leaves all other elements to Adam. A leaf is one or the other. A
packed buffer has runs of rows of both, and has second moments for some of its rows alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._layers import matrix_axes
from jgrad._layers.layer_axes import LayerAxes
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._packed import packing
from jgrad._packed.arrays import ArraySpec
from jgrad._packed.blocks import Span
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed
from jgrad._trees import checks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

Rows = tuple[int, int]  # the first, and the one behind the last


class Part(NamedTuple):
    """A whole array, or rows of a packed buffer, with elements of one kind.

    Attributes:
      array: which array.
      rows: of the buffer; None for the whole array.
      matrices: where the matrices are in the array, or in the items of the rows, stacked along a
        first axis; None for other elements.
      second_rows: the rows of their second moments in the buffer of those; None for a whole array.
      is_padding: rows behind the last leaf.
    """

    array: int
    rows: Rows | None = None
    matrices: MatrixAxes | None = None
    second_rows: Rows | None = None
    is_padding: bool = False

    def of(self, x: Any) -> Any:
        """This part of the array."""
        return None if x is None or self.is_padding else _sliced(x, self.rows)

    def second_of(self, x: Any) -> Any:
        """This part of the second moments."""
        return None if x is None or self.is_padding else _sliced(x, self.second_rows)

    def to_matrices(self, x: jax.Array) -> jax.Array:
        """The array that `matrices` describes, from this part."""
        assert self.matrices is not None
        return x if self.rows is None else _to_items(x, self.matrices.shape)

    def from_matrices(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """This part, from what `to_matrices` made of it."""
        return x if self.rows is None else _from_items(x, like.shape)

    def to_outputs(self, x: jax.Array) -> jax.Array:
        """One number per output, from this part of the second moments."""
        assert self.matrices is not None
        return x if self.rows is None else _to_items(x, self.matrices.per_output)


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
            found.append(Part(i, matrices=own[0]))
        else:
            found += _of_buffer(i, spec, own, per_output)
    return found


def taken(parts: Sequence[Part], arrays: Sequence[Any]) -> list[Any]:
    """The parts of arrays."""
    return [part.of(arrays[part.array]) for part in parts]


def joined(parts: Sequence[Part], values: Sequence[Any]) -> list[Any]:
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
                assert part.rows is not None
                x = jnp.zeros((part.rows[1] - part.rows[0], *width), real)
            pieces.append(x.astype(real))
        whole.append(jax.lax.concatenate(pieces, 0))
    return whole


def joined_seconds(parts: Sequence[Part], values: Sequence[Any]) -> list[Any]:
    """The second moments of arrays, from those of their parts; None where there are none."""
    whole = []
    for _, group in itertools.groupby(zip(parts, values, strict=True), lambda pair: pair[0].array):
        known = [x for _, x in group if x is not None]
        whole.append(jax.lax.concatenate(known, 0) if len(known) > 1 else (*known, None)[0])
    return whole


def layers_of_leaves(
    specs: Sequence[ArraySpec], chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """The layers of each leaf that is chosen: as given, or as they were packed."""
    packed = [pair for spec in specs for pair in zip(spec.positions, spec.spans, strict=False)]
    layers = matrix_axes.layers_of(chosen, layer_axes, reference)
    for i, span in packed:
        own = span.layers
        if chosen.leaves[i] and own.stacked:
            if layers[i].stacked not in ((), own.stacked):
                expected = f"the axes with which it was packed, {own.stacked}"
                layer_axes.fail(i, ValueError, f"{layers[i].stacked}, expected {expected}")
            layers[i] = own
    return layers


# ---- second moments, for some elements alone ---------------------------------------------------


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
            count += len(x.layout.runs)
            return _second_packed(x, axes[first:count], per_output)
        count += 1
        return _second_leaf(x, axes[first], per_output)

    return jax.tree.map(of_node, tree, is_leaf=lambda x: x is None or packing.is_packed(x))


def _second_leaf(x: Any, axes: MatrixAxes | None, per_output: bool) -> Any:
    if not checks.is_inexact(x) or (axes is not None and not per_output):
        return None
    return jax.ShapeDtypeStruct(x.shape if axes is None else axes.per_output, x.dtype)


def _second_packed(x: Packed, axes: Sequence[MatrixAxes | None], per_output: bool) -> Packed:
    layout = x.layout
    runs, buffers, shapes = list(layout.runs), dict(x.buffers), dict(layout.shapes)
    for name, buffer in x.buffers.items():
        own = layout.within(name)
        if not checks.is_inexact(buffer) or all(axes[i] is None for i, _ in own):
            buffers[name] = _second_leaf(buffer, None, per_output)
            continue
        if not per_output and all(axes[i] is not None for i, _ in own):
            buffers[name] = None
            continue
        row = 0
        for i, span in own:
            runs[i] = new = _second_span(span, axes[i], per_output, row, layout.width)
            row += 0 if new is None else new.num_blocks
        if own[0][1].is_unpacked:
            assert new is not None
            shapes[name] = new.layers.shape
        else:
            shapes[name] = (row, layout.width)
        buffers[name] = jax.ShapeDtypeStruct(shapes[name], buffer.dtype)
    reduced = Layout(
        layout.structure, tuple(runs), tuple(sorted(shapes.items())), layout.share, layout.width
    )
    return Packed(buffers, layout if reduced == layout else reduced)


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
            new = _second_span(first, own, per_output, 0, spec.width)
            kept = 0 if new is None else count * new.num_blocks
        found.append(Part(array, rows, matrices, (second, second + kept)))
        second += kept
    if row < spec.shape[0]:
        found.append(Part(array, (row, spec.shape[0]), is_padding=True))
    return found


def _of_items(axes: MatrixAxes, layers: LayerAxes, count: int) -> MatrixAxes:
    """The matrices of leaves or layers that are stacked along a first axis."""
    place = {axis: 1 + i for i, axis in enumerate(layers.within)}
    return dataclasses.replace(
        axes,
        shape=(count, *(axes.shape[axis] for axis in layers.within)),
        stacked=(0, *(place[axis] for axis in axes.stacked if axis in place)),
        outputs=tuple(place[axis] for axis in axes.outputs),
    )


def _sliced(x: jax.Array, rows: Rows | None) -> jax.Array:
    if rows is None or rows == (0, x.shape[0]):
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
