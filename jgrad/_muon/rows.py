"""Dion2: the rows of each matrix with the largest 1-norms, which an update takes; the others wait.

The rows of a matrix are its shorter side, whether outputs or inputs, and its outputs where both are
alike; in NorMuon outputs always, since it divides whole outputs. Matrices are asked as a whole
which rows they are. So the choice does not depend on how they are sharded: where a device has parts
of rows, norms are summed over devices, and where it has some rows, the norms of all are gathered.
Both are one number for each row.
"""

import dataclasses
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._muon.matrix_axes import MatrixAxes, MeshAxesPerAxis, View
from jgrad._trees.shardings import all_gather


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
        count = math.ceil(fraction * (out if are_outputs else into))
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
            of_rows = itertools.chain(*(known[axis] for axis in self.sides[0]))
            others = self.axes.stacked, self.sides[1]
            layers, columns = ([known[axis] for axis in axes] for axes in others)
            names = (*layers, tuple(of_rows), *columns)
            devices = (math.prod(map(sizes.__getitem__, axes)) for axes in names)
            shape = tuple(map(operator.mul, shape, devices))
        of_columns = tuple(range(first + 1, len(shape)))
        outputs = (first,) if self.are_outputs else of_columns
        return MatrixAxes(shape, tuple(range(first)), outputs, mesh_axes=names)

    def view(self, *, per_row: bool = False) -> View:
        """The array as (matrices, rows, columns), or numbers per row as (matrices, rows)."""
        rows, columns = self.sides
        order, shape = (*self.axes.stacked, *rows, *columns), self.axes.shape
        lengths = [math.prod(shape[axis] for axis in axes) for axes in (rows, columns)]
        if per_row:
            shape = tuple(1 if axis in columns else n for axis, n in enumerate(shape))
            del lengths[1]
        return View(shape, shape, order, (self.axes.count, *lengths))


# ---- on the arrays that a device has -----------------------------------------------------------


@jit_static_kwargs
def largest(x: jax.Array, *, rows: Rows) -> jax.Array:
    """Whether each row of this device is taken, of a shape that broadcasts to the array."""
    norms, scaled = (_of_all_rows(norm, rows) for norm in _norms(x, rows))
    # Only where one overflowed: scaled norms of small rows are 0.
    overflowed = jnp.any(jnp.isinf(norms), axis=rows.sides[0], keepdims=True)
    norms = jnp.where(overflowed, scaled, norms)
    whole = dataclasses.replace(rows, axes=_of_whole_rows(rows))
    view = whole.view(per_row=True)
    numbers = jax.lax.top_k(view.of(norms), rows.count)[1]
    matrices = jax.lax.broadcasted_iota(numbers.dtype, numbers.shape, 0)
    taken = jnp.zeros(view.shape, bool).at[matrices, numbers].set(True)
    local = view.back(taken)
    for axis, names in _sharded(rows, rows.sides[0]):
        length = rows.axes.shape[axis]
        local = jax.lax.dynamic_slice_in_dim(
            local, jax.lax.axis_index(names) * length, length, axis
        )
    return local


@jit_static_kwargs
def compact(x: jax.Array, is_taken: jax.Array, *, rows: Rows) -> jax.Array:
    """The rows that are taken, in order; zeros in slots without one."""
    flat = rows.view(per_row=True).of(is_taken)
    return _first_rows(rows.view().of(x), flat, rows.slots).reshape(rows.shape)


@jit_static_kwargs
def spread(x: jax.Array, is_taken: jax.Array, *, rows: Rows) -> jax.Array:
    """The array of which `compact` made `x`; zeros in rows that are not taken."""
    view = rows.view()
    count, _, columns = view.shape
    flat = rows.view(per_row=True).of(is_taken)
    return view.back(_put_back(x.reshape(count, rows.slots, columns), flat))


@jit_static_kwargs
def not_zero(x: jax.Array, *, rows: Rows) -> jax.Array:
    """As `compact`, of an array that `spread` made."""
    is_some = jnp.any(x != 0, axis=rows.sides[1], keepdims=True)
    return compact(x, is_some, rows=rows)


def of_few(steps: Function, count: int, *, are_columns: bool) -> Function:
    """Steps of a stack of wide matrices, of which only so many rows, or columns, are not zero."""

    def of_stack(x: jax.Array) -> jax.Array:
        x = jnp.swapaxes(x, 1, 2) if are_columns else x
        is_some = jnp.any(x != 0, axis=2)
        few = _first_rows(x, is_some, count)
        is_tall = few.shape[1] > few.shape[2]
        new = steps(jnp.swapaxes(few, 1, 2) if is_tall else few)
        # Where fewer rows are not zero, those behind them are put nowhere: they are zeros.
        x = _put_back(jnp.swapaxes(new, 1, 2) if is_tall else new, is_some)
        return jnp.swapaxes(x, 1, 2) if are_columns else x

    return of_stack


def _first_rows(x: jax.Array, chosen: jax.Array, count: int) -> jax.Array:
    """The chosen rows of each matrix, (matrices, count, columns), and zeros behind them."""
    flags, numbers = jax.lax.top_k(chosen.astype(np.float32), count)
    found = jnp.take_along_axis(x, numbers[:, :, None], axis=1)
    return jnp.where(flags[:, :, None] > 0, found, jnp.zeros_like(found))


def _put_back(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """The rows of `_first_rows` where they were, and zeros elsewhere."""
    place = jnp.clip(jnp.cumsum(chosen, axis=1, dtype=np.int32) - 1, 0, x.shape[1] - 1)
    found = jnp.take_along_axis(x, place[:, :, None], axis=1)
    return jnp.where(chosen[:, :, None], found, jnp.zeros_like(found))


# ---- 1-norms -----------------------------------------------------------------------------------


def _norms(x: jax.Array, rows: Rows) -> list[jax.Array]:
    """The 1-norm of each row of this device, and scaled so that none overflows."""
    size, columns = jnp.abs(jax.lax.stop_gradient(x)), rows.sides[1]
    sharded = _sharded(rows, columns)
    devices = math.prod(jax.lax.psum(1, names) for _, names in sharded)
    terms = devices * math.prod(x.shape[axis] for axis in columns)
    factor = np.asarray(2.0 ** -max(1, terms).bit_length(), size.dtype)
    norms = [jnp.sum(y, axis=columns, keepdims=True) for y in (size, size * factor)]
    names = tuple(itertools.chain(*(names for _, names in sharded)))
    return list(jax.lax.psum(norms, names)) if names else norms


def _of_all_rows(norms: jax.Array, rows: Rows) -> jax.Array:
    for axis, names in _sharded(rows, rows.sides[0]):
        norms = all_gather(norms, names, axis)
    return norms


def _of_whole_rows(rows: Rows) -> MatrixAxes:
    shape = list(rows.axes.shape)
    for axis, names in _sharded(rows, rows.sides[0]):
        shape[axis] *= jax.lax.psum(1, names)
    return dataclasses.replace(rows.axes, shape=tuple(shape))


def _sharded(rows: Rows, axes: tuple[int, ...]) -> list[tuple[int, tuple[str, ...]]]:
    return [(axis, names) for axis, names in rows.axes.sharded_axes if axis in axes]
