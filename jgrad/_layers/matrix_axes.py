"""Where the matrices of an array are, and how to get at them one by one.

Queries, keys and values, with all heads of each, may be fused in one kernel. `split` cuts such an
array along its outputs into runs of pieces of the same size. A run is one array with an additional
axis for its pieces, so heads are just a reshape, and code that works on matrices doesn't have to
know about pieces.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Function
from jgrad._layers.array_spec import ArraySpec
from jgrad._trees.protocols import Leaf
from jgrad._trees.shardings import MeshAxesPerAxis, all_gather, replicated


class View(NamedTuple):
    """The elements of an array with axes split, put in order and merged; and the way back.

    One description of both. `jax.linear_transpose` would trace each view of each leaf once more;
    and all is by operations of `lax`, which are a fraction of those of `jnp` to trace, and which
    return the array itself where there is nothing to do.

    Attributes:
      start: the shape of the array.
      split: its shape with more axes, or with fewer.
      order: of the axes of `split`.
      shape: that of the view.
    """

    start: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, x: jax.Array) -> jax.Array:
        """The array in this view."""
        x = jax.lax.transpose(jax.lax.reshape(x, self.split), self.order)
        return jax.lax.reshape(x, self.shape)

    def back(self, x: jax.Array) -> jax.Array:
        """The array of which `x` is the view."""
        x = jax.lax.reshape(x, [self.split[axis] for axis in self.order])
        return jax.lax.reshape(jax.lax.transpose(x, np.argsort(self.order)), self.start)


Array = jax.Array | None


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Where the matrices of one array are.

    Attributes:
      shape: shape of the array.
      stacked: axes of the array with a matrix for each index, in order and none negative.
      outputs: axes that are outputs, likewise.
      runs: (number, size) of runs of pieces along the outputs of whole matrices, which are
        matrices of their own; none where the array has whole matrices alone.
      sharded_axes: (axis, names of mesh axes) of each axis of which a device has a part.
      mesh_axes: under `jit`, how the array is sharded; None where nothing says it.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    outputs: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = ()
    sharded_axes: tuple[tuple[int, tuple[str, ...]], ...] = ()
    mesh_axes: MeshAxesPerAxis | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that are inputs."""
        return tuple(sorted({*range(len(self.shape))} - {*self.stacked, *self.outputs}))

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self._size(self.stacked)

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        return self._size(self.outputs), self._size(self.inputs)

    @property
    def wide(self) -> tuple[int, int]:
        """The shape of a matrix, transposed where it has more rows than columns."""
        return min(self.sizes), max(self.sizes)

    @property
    def per_output(self) -> tuple[int, ...]:
        """The shape of one number per output and matrix, which broadcasts to the array."""
        return tuple(1 if axis in self.inputs else n for axis, n in enumerate(self.shape))

    # ---- all matrices as one stack -------------------------------------------------------------

    @property
    def as_wide(self) -> View:
        """The matrices of the array, as (count, *wide)."""
        return View(self.shape, self.shape, self.in_order, (self.count, *self.wide))

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the rows and those of the columns, as the array has them."""
        rows_are_outputs = min(self.outputs) < min(self.inputs)
        return (self.outputs, self.inputs) if rows_are_outputs else (self.inputs, self.outputs)

    @property
    def as_matrices(self) -> View:
        """The matrices of the array, as (*stacked, rows, columns) with the `sides` of each."""
        rows, columns = self.sides
        stack = tuple(self.shape[axis] for axis in self.stacked)
        shape = (*stack, self._size(rows), self._size(columns))
        return View(self.shape, self.shape, (*self.stacked, *rows, *columns), shape)

    @property
    def in_order(self) -> tuple[int, ...]:
        """Stacked axes, those of the rows and those of the columns of wide matrices.

        A square matrix has them as they come, which transposes nothing.
        """
        rows, columns = sorted(self.sides, key=self._size)
        return (*self.stacked, *rows, *columns)

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(map(self.shape.__getitem__, axes))

    # ---- whole matrices, of parts on devices ---------------------------------------------------

    @property
    def whole(self) -> "MatrixAxes":
        """Those of the array after `gathered`; inside `shard_map` alone."""
        shape = list(self.shape)
        for axis, names in self.sharded():
            shape[axis] *= jax.lax.psum(1, names)
        return dataclasses.replace(self, shape=tuple(shape), sharded_axes=())

    def sharded_over(self, axes: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes of the `shard_map` around, along which some axes are sharded."""
        return tuple(itertools.chain(*(names for _, names in self.sharded(axes))))

    def gathered(self, x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
        """Whole matrices, of parts of them; or along some axes alone, of numbers for these."""
        for axis, names in self.sharded(axes):
            x = all_gather(x, names, axis)
        return x

    def local_part(self, x: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
        """This device's part, of what `gathered` returned."""
        for axis, names in self.sharded(axes):
            first = jax.lax.axis_index(names) * self.shape[axis]
            x = jax.lax.dynamic_slice_in_dim(x, first, self.shape[axis], axis)
        return x

    def sharded(self, axes: Sequence[int] | None = None) -> list[tuple[int, tuple[str, ...]]]:
        """Those of some axes of which a device has a part, and over which mesh axes.

        By default of those of matrices: where layers are sharded, each device has whole matrices.
        """
        axes = (*self.outputs, *self.inputs) if axes is None else axes
        return [(axis, names) for axis, names in self.sharded_axes if axis in axes]


# ---- runs of pieces ----------------------------------------------------------------------------


def axes_of_runs(axes: MatrixAxes) -> list[MatrixAxes]:
    """Where the matrices are in each array that `cut` returns."""
    if not axes.runs:
        return [axes]
    first, others = axes.outputs[0], _all_but_outputs(axes)
    matrices = []
    for count, size in axes.runs:
        # The old axes, with the outputs as one in the place of their first; -1 counts pieces.
        order = others[:first] + [-1] * (count > 1) + [first] + others[first:]
        lengths = dict(enumerate(axes.shape)) | {-1: count, first: size}
        names: dict[int, tuple[str, ...]] = {}
        if axes.mesh_axes is not None:
            names = dict(enumerate(axes.mesh_axes)) | {-1: axes.mesh_axes[first]}
            names |= {first: ()} if count > 1 else {}
        matrices.append(
            MatrixAxes(
                tuple(lengths[axis] for axis in order),
                tuple(i for i, axis in enumerate(order) if axis == -1 or axis in axes.stacked),
                (order.index(first),),
                mesh_axes=tuple(names[axis] for axis in order) if names else None,
            )
        )
    return matrices


def cut(x: jax.Array, axes: MatrixAxes) -> list[jax.Array]:
    """An array for each run of pieces, of the whole array or of one number per output."""
    if not axes.runs:
        return [x]
    whole, runs = _views(axes, x.shape)
    x, axis = whole.of(x), axes.outputs[0]
    ends = list(itertools.accumulate(run.start[axis] for run in runs))
    bounds = zip([0, *ends], ends, strict=False)
    slices = [jax.lax.slice_in_dim(x, *bound, axis=axis) for bound in bounds]
    return [run.of(y) for run, y in zip(runs, slices, strict=True)]


def joined(arrays: Sequence[jax.Array], axes: MatrixAxes, shape: Sequence[int]) -> jax.Array:
    """The array of a shape from what `cut` made of it."""
    if not axes.runs:
        return arrays[0]
    whole, runs = _views(axes, shape)
    flat = [run.back(x) for run, x in zip(runs, arrays, strict=True)]
    return whole.back(jax.lax.concatenate(flat, axes.outputs[0]))


def _views(axes: MatrixAxes, shape: Sequence[int]) -> tuple[View, list[View]]:
    """Of an array with all outputs in the place of the first of them; of each run of pieces."""
    first, others = axes.outputs[0], _all_but_outputs(axes)
    order = (*others[:first], *axes.outputs, *others[first:])
    before, behind = ([shape[i] for i in part] for part in (others[:first], others[first:]))
    shape = tuple(shape)
    whole = View(shape, shape, order, (*before, axes.sizes[0], *behind))
    runs = []
    for count, size in axes.runs:
        start, counted = (*before, count * size, *behind), (count,) if count > 1 else ()
        run = (*before, *counted, size, *behind)
        runs.append(View(start, run, tuple(range(len(run))), run))
    return whole, runs


def _all_but_outputs(axes: MatrixAxes) -> list[int]:
    return [axis for axis in range(len(axes.shape)) if axis not in axes.outputs]


def mesh_axes_to_cut(axes: MatrixAxes, sizes: dict[str, int]) -> MeshAxesPerAxis:
    """How to shard an array, so that a device cuts its part by itself.

    Along outputs where it has whole pieces there; else along another axis: one all-to-all.

    Args:
      axes: of the array, with `mesh_axes`.
      sizes: of mesh axes.
    """
    assert axes.mesh_axes is not None
    names = [axes.mesh_axes[axis] for axis in axes.outputs]
    together = tuple(itertools.chain(*names))
    devices = math.prod(sizes[name] for name in together)
    is_first = names[0] == together
    if not together or (is_first and len(axes.runs) == 1 and axes.runs[0][0] % devices == 0):
        return axes.mesh_axes
    new = [() if axis in axes.outputs else names for axis, names in enumerate(axes.mesh_axes)]
    for axis in (*axes.inputs, *axes.stacked):
        if not new[axis] and axes.shape[axis] % devices == 0:
            new[axis] = together
            break
    return tuple(new)


# ---- matrices, and all other leaves ------------------------------------------------------------


class TwoKinds(NamedTuple):
    """Which arrays have matrices, for which a method has a way of its own, and which have none.

    Attributes:
      first: the numbers of the former; they are not packed.
      second: of all others.
      axes: where the matrices are.
    """

    first: list[int]
    second: list[int]
    axes: list[MatrixAxes]

    @classmethod
    def of(cls, arrays: Sequence[ArraySpec], matrices: Mapping[int, MatrixAxes]) -> "TwoKinds":
        """Of arrays, from where the matrices are in leaves, by their positions in the tree."""
        positions = [spec.positions[0] for spec in arrays]
        first = [k for k, i in enumerate(positions) if i in matrices]
        second = [k for k, i in enumerate(positions) if i not in matrices]
        return cls(first, second, [matrices[positions[k]] for k in first])

    def together(self, firsts: Sequence[Leaf], seconds: Sequence[Leaf]) -> list[Leaf]:
        """An entry for each leaf, from those of both kinds."""
        entries = dict(zip((*self.first, *self.second), (*firsts, *seconds), strict=True))
        return list(map(entries.__getitem__, range(len(entries))))


# ---- what is computed of matrices --------------------------------------------------------------


def on_matrices(
    rule: Function, axes: Sequence[MatrixAxes], /, *columns: Sequence[Leaf], **options: Any
) -> list[Leaf]:
    """The rule of the entries of each array."""
    rows = zip(axes, *columns, strict=True)
    return leafwise.run(
        [(leafwise.fixed(rule, axes=where, **options), tuple(x)) for where, *x in rows]
    )


def sums(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """The sum over each matrix, of a shape that broadcasts to the array."""
    if not axes.runs:
        return jnp.sum(x, axis=(*axes.outputs, *axes.inputs), keepdims=True)
    per_output = jnp.sum(x, axis=axes.inputs, keepdims=True)
    totals = [
        jnp.broadcast_to(jnp.sum(y, axis=run.outputs, keepdims=True), y.shape)
        for y, run in zip(cut(replicated(per_output), axes), axes_of_runs(axes), strict=True)
    ]
    return joined(totals, axes, per_output.shape)


def per_output(numbers: Sequence[jax.Array], axes: MatrixAxes) -> jax.Array:
    """One scalar for each run as one number per output, of a shape that broadcasts to the array."""
    sizes = [count * size for count, size in axes.runs]
    real = np.result_type(*(x.dtype for x in numbers))
    repeated = map(jnp.broadcast_to, (x.astype(real) for x in numbers), ((n,) for n in sizes))
    x = jax.lax.concatenate(list(repeated), 0)
    return x.reshape([n if axis in axes.outputs else 1 for axis, n in enumerate(axes.shape)])
