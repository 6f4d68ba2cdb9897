"""Dion2: each update uses the rows with the largest 1-norms of each matrix; the others wait.

Rows run along the shorter side of a matrix, be it outputs or inputs, and along outputs if it is
square; in NorMuon always along outputs, because it divides whole outputs. The choice of rows does
not depend on how a matrix is sharded: if a device has parts of rows, norms are summed over devices;
if it has some of the rows, the norms of all rows are gathered. Either way, this communicates one
number per row.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._layers.matrix_axes import MatrixAxes, View
from jgrad._trees.shardings import MeshAxesPerAxis, all_gather


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of the matrices of one array, of which an update takes some.

    Attributes:
      axes: where the matrices are; of what a device has, with `sharded_axes`.
      are_outputs: whether rows are outputs.
      count: how many of a matrix are taken.
      slots: for how many a device has room: all that it may have of those that are taken.
    """

    axes: MatrixAxes
    are_outputs: bool
    count: int
    slots: int

    @classmethod
    def of(cls, axes: MatrixAxes, fraction: float, *, are_outputs: bool) -> "Rows":
        """Of whole matrices; `are_outputs` is for rows that are outputs of any matrix."""
        out, into = axes.sizes
        are_outputs = are_outputs or out <= into
        side = out if are_outputs else into
        count = math.ceil(fraction * side * (1 - 1e-12))  # 0.28 of 25 is 7, and 7.000000000000001
        return cls(axes, are_outputs, count, count)

    def on_device(self, mesh_axes: MeshAxesPerAxis, sizes: dict[str, int]) -> "Rows":
        """Of what a device has of an array that is sharded so, on a mesh of these sizes."""
        pairs = zip(self.axes.shape, mesh_axes, strict=True)
        shape = tuple(n // math.prod(sizes[name] for name in names) for n, names in pairs)
        named = tuple((axis, names) for axis, names in enumerate(mesh_axes) if names)
        axes = dataclasses.replace(self.axes, shape=shape, mesh_axes=None, sharded_axes=named)
        local = math.prod(shape[axis] for axis in self.sides[0])
        return dataclasses.replace(self, axes=axes, slots=min(self.count, local))

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the rows, and those of the columns."""
        pair = self.axes.outputs, self.axes.inputs
        return pair if self.are_outputs else (pair[1], pair[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """That of an array of the rows that are taken: layers, rows, columns."""
        lengths = self.axes.shape.__getitem__
        return (*map(lengths, self.axes.stacked), self.slots, *map(lengths, self.sides[1]))

    def taken(self, known: MeshAxesPerAxis | None, sizes: dict[str, int]) -> MatrixAxes:
        """Where the matrices are in an array of the rows that are taken.

        Args:
          known: how the array is sharded of which a device has these; None where nothing says it.
          sizes: of the axes of its mesh.
        """
        first, shape = len(self.axes.stacked), self.shape
        names: MeshAxesPerAxis | None = None
        if known is not None:
            row_names = itertools.chain(*(known[axis] for axis in self.sides[0]))
            others = self.axes.stacked, self.sides[1]
            layers, columns = ([known[axis] for axis in axes] for axes in others)
            names = (*layers, tuple(row_names), *columns)
            devices = (math.prod(map(sizes.__getitem__, axes)) for axes in names)
            shape = tuple(map(operator.mul, shape, devices))
        column_axes = tuple(range(first + 1, len(shape)))
        outputs = (first,) if self.are_outputs else column_axes
        return MatrixAxes(shape, tuple(range(first)), outputs, mesh_axes=names)

    def whole_rows(self, shape: Sequence[int]) -> "Rows":
        """Of arrays with all rows of their matrices, by the shape of numbers per row."""
        pairs = enumerate(zip(self.axes.shape, shape, strict=True))
        lengths = tuple(n if axis in self.sides[1] else m for axis, (n, m) in pairs)
        return dataclasses.replace(self, axes=dataclasses.replace(self.axes, shape=lengths))

    def view(self, *, per_row: bool = False) -> View:
        """The array as (matrices, rows, columns), or numbers per row as (matrices, rows)."""
        rows, columns = self.sides
        order, shape = (*self.axes.stacked, *rows, *columns), self.axes.shape
        lengths = [math.prod(shape[axis] for axis in axes) for axes in (rows, columns)]
        if per_row:
            shape = tuple(1 if axis in columns else n for axis, n in enumerate(shape))
            del lengths[1]
        return View(shape, shape, order, (self.axes.count, *lengths))


# ---- on the arrays that a device has, all of one shape -------------------------------------------


@jit_static_kwargs
def largest(arrays: Sequence[jax.Array], *, rows: Rows) -> list[jax.Array]:
    """Which rows of this device are taken, of a shape that broadcasts to the array."""
    norms = _row_norms(arrays, rows)
    for axis, names in rows.axes.sharded(rows.sides[0]):
        norms = all_gather(norms, names, 2 + axis)
    exact, scaled = norms
    # Only if one overflowed, because scaled norms of small rows are 0.
    over = tuple(1 + axis for axis in rows.sides[0])
    exact = jnp.where(jnp.any(jnp.isinf(exact), axis=over, keepdims=True), scaled, exact)
    view = rows.whole_rows(exact.shape[1:]).view(per_row=True)
    flat = jax.lax.concatenate([view.of(x) for x in exact], 0)
    numbers = jax.lax.top_k(flat, rows.count)[1]
    matrices = jax.lax.broadcasted_iota(numbers.dtype, numbers.shape, 0)
    taken = jnp.zeros(flat.shape, bool).at[matrices, numbers].set(True)
    masks = [view.back(x) for x in jax.lax.split(taken, [view.shape[0]] * len(arrays))]
    return [rows.axes.local_part(x, rows.sides[0]) for x in masks]


@jit_static_kwargs
def compact(
    arrays: Sequence[jax.Array], masks: Sequence[jax.Array], *, rows: Rows
) -> list[jax.Array]:
    """The rows that are taken, in order; zeros in slots without one."""
    view = rows.view()
    flags, numbers = _first(_flat(masks, rows), rows.slots)
    sizes = [view.shape[0]] * len(arrays)
    parts = zip(*(jax.lax.split(x, sizes) for x in (flags, numbers)), strict=True)
    pairs = zip(arrays, parts, strict=True)
    return [_picked(view.of(x), *part).reshape(rows.shape) for x, part in pairs]


@jit_static_kwargs
def spread(
    arrays: Sequence[jax.Array], masks: Sequence[jax.Array], *, rows: Rows
) -> list[jax.Array]:
    """The arrays of which `compact` made these; zeros in rows that are not taken."""
    view, flat = rows.view(), _flat(masks, rows)
    count, _, columns = view.shape
    slots = jax.lax.split(_slots_of(flat, rows.slots), [count] * len(arrays))
    columns_of_each = zip(arrays, jax.lax.split(flat, [count] * len(arrays)), slots, strict=True)
    stacks = ((x.reshape(count, rows.slots, columns), *more) for x, *more in columns_of_each)
    return [view.back(_picked(*stack)) for stack in stacks]


def on_few_rows(steps: Function, count: int, *, are_columns: bool) -> Function:
    """Steps of a stack of wide matrices, of which only so many rows, or columns, are not zero."""

    def on_stack(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, 1, 2) if are_columns else x
        is_some = jnp.any(x != 0, axis=2)
        few = _picked(x, *_first(is_some, count))
        is_tall = few.shape[1] > few.shape[2]
        new = steps(jnp.swapaxes(few, 1, 2) if is_tall else few)
        # If fewer rows are nonzero, the rest are zeros and are written nowhere.
        new = jnp.swapaxes(new, 1, 2) if is_tall else new
        x = _picked(new, is_some, _slots_of(is_some, count))
        return jnp.swapaxes(x, 1, 2) if are_columns else x

    return on_stack


def _flat(masks: Sequence[jax.Array], rows: Rows) -> jax.Array:
    view = rows.view(per_row=True)
    return jax.lax.concatenate([view.of(x) for x in masks], 0)


def _first(mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of the rows of each matrix that are chosen, in order, and of others behind them.

    And before that, which of these are chosen.
    """
    flags, numbers = jax.lax.top_k(mask.astype(np.float32), count)
    return flags > 0, numbers


def _slots_of(mask: jax.Array, count: int) -> jax.Array:
    """Of each row of each matrix its place among those that are chosen."""
    return jnp.clip(jnp.cumsum(mask, axis=1, dtype=np.int32) - 1, 0, count - 1)


def _picked(x: jax.Array, is_some: jax.Array, numbers: jax.Array) -> jax.Array:
    """Rows of each matrix by their numbers, and zeros."""
    taken = jnp.take_along_axis(x, numbers[:, :, None], axis=1)
    return jnp.where(is_some[:, :, None], taken, jnp.zeros_like(taken))


def _row_norms(arrays: Sequence[jax.Array], rows: Rows) -> jax.Array:
    """(2, arrays, ...): the 1-norm of each row, and scaled so that none overflows."""
    columns = rows.sides[1]
    names = rows.axes.sharded_over(columns)
    terms = math.prod(rows.axes.shape[axis] for axis in columns)
    terms *= jax.lax.psum(1, names) if names else 1
    factor = 2.0 ** -terms.bit_length()
    sizes = [jnp.abs(jax.lax.stop_gradient(x)) for x in arrays]
    sums = [
        [jnp.sum(x * np.asarray(by, x.dtype), axis=columns, keepdims=True) for x in sizes]
        for by in (1.0, factor)
    ]
    norms = jnp.stack([jnp.stack(x) for x in sums])
    return jax.lax.psum(norms, names) if names else norms
