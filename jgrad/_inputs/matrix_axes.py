"""Where the matrices of an array are: as options say it, and how to see them one by one.

A method works on one matrix at a time. `layer_axes` says over which axes matrices are stacked:
layers for `lax.scan`, experts, heads. `output_axes` says which of the others are outputs. What is
left is input, so that the kernel of a convolution is one matrix.

Queries, keys and values may be one kernel, and all heads of each. By `split` such an array is cut
along its outputs into runs of blocks of one size; a run is one array, with an axis that counts its
blocks. So heads are one reshape, and what is computed for matrices knows of no blocks.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Function
from jgrad._inputs import options
from jgrad._inputs.inputs import Parameters
from jgrad._inputs.options import Mask
from jgrad._layers import layer_axes as layer_axes_of
from jgrad._layers.layer_axes import Axes, LayerAxes, read_axes, read_layer_axes
from jgrad._packed.array_spec import ArraySpec
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import all_gather, automatic_mesh, replicated, unknown_axes
from jgrad._trees.trees import PyTree


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
      padding: elements behind each item along the last axis of `split`, which the view leaves out;
        back come zeros.
    """

    start: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    padding: int = 0

    def of(self, x: jax.Array) -> jax.Array:
        """The array in this view."""
        x = jax.lax.reshape(x, self.split)
        if self.padding:
            x = jax.lax.slice(x, [0] * x.ndim, [*x.shape[:-1], x.shape[-1] - self.padding])
        return jax.lax.reshape(jax.lax.transpose(x, self.order), self.shape)

    def back(self, x: jax.Array) -> jax.Array:
        """The array of which `x` is the view."""
        split = (*self.split[:-1], self.split[-1] - self.padding)
        x = jax.lax.reshape(x, [split[axis] for axis in self.order])
        x = jax.lax.transpose(x, np.argsort(self.order))
        if self.padding:
            widths = [(0, 0, 0)] * (x.ndim - 1) + [(0, self.padding, 0)]
            x = jax.lax.pad(x, np.zeros((), x.dtype), widths)
        return jax.lax.reshape(x, self.start)


# Of `output_axes`: -1, in a form that `optax.inject_hyperparams` does not make an array of.
LAST = (-1,)
Array = jax.Array | None
# For each axis of an array the mesh axes over which it is sharded.
MeshAxesPerAxis: TypeAlias = tuple[tuple[str, ...], ...]


def partition_spec(mesh_axes: MeshAxesPerAxis) -> PartitionSpec:
    """How an array is sharded, as JAX writes it."""
    return PartitionSpec(*(names or None for names in mesh_axes))


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Where the matrices of one array are.

    Attributes:
      shape: shape of the array.
      stacked: axes of the array with a matrix for each index, in order and none negative.
      outputs: axes that are outputs, likewise.
      blocks: (number, size) of runs of blocks along the outputs of whole matrices, which are
        matrices of their own; none where the array has whole matrices alone.
      sharded_axes: (axis, names of mesh axes) of each axis of which a device has a part.
      mesh_axes: under `jit`, how the array is sharded; None where nothing says it.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()
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
        out, into = self.sizes
        rows_are_outputs = min(self.outputs) < min(self.inputs) if out == into else out < into
        pair = (self.outputs, self.inputs) if rows_are_outputs else (self.inputs, self.outputs)
        return (*self.stacked, *pair[0], *pair[1])

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(map(self.shape.__getitem__, axes))

    # ---- whole matrices, of parts on devices ---------------------------------------------------

    @property
    def whole(self) -> "MatrixAxes":
        """Those of the array after `gathered`; inside `shard_map` alone."""
        shape = list(self.shape)
        for axis, names in self._gathered_axes():
            shape[axis] *= jax.lax.psum(1, names)
        return dataclasses.replace(self, shape=tuple(shape), sharded_axes=())

    @property
    def in_shard_map(self) -> "MatrixAxes":
        """The same, sharded over no mesh axes but those of the `shard_map` around, if any."""
        named = [
            (axis, tuple(name for name in names if layer_axes_of.axis_exists(name)))
            for axis, names in self.sharded_axes
        ]
        return dataclasses.replace(self, sharded_axes=tuple(x for x in named if x[1]))

    @property
    def gathered_over(self) -> tuple[str, ...]:
        """The mesh axes along which whatever is made of whole matrices is the same."""
        return tuple(itertools.chain(*(names for _, names in self._gathered_axes())))

    def sharded_over(self, axes: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes of the `shard_map` around, along which some axes are sharded."""
        of_axes = self.in_shard_map.sharded_axes
        return tuple(itertools.chain(*(names for axis, names in of_axes if axis in axes)))

    def gathered(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """Whole matrices, of parts of them; or whole outputs, of one number per output."""
        for axis, names in self._gathered_axes(per_output):
            x = all_gather(x, names, axis)
        return x

    def local_part(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """This device's part, of what `gathered` returned."""
        for axis, names in self._gathered_axes(per_output):
            first = jax.lax.axis_index(names) * self.shape[axis]
            x = jax.lax.dynamic_slice_in_dim(x, first, self.shape[axis], axis)
        return x

    def _gathered_axes(self, per_output: bool = False) -> list[tuple[int, tuple[str, ...]]]:
        """No stacked ones: where layers are sharded, each device has whole matrices."""
        others = {*self.stacked, *(self.inputs if per_output else ())}
        return [(axis, names) for axis, names in self.sharded_axes if axis not in others]


# ---- runs of blocks ----------------------------------------------------------------------------


def pieces(axes: MatrixAxes) -> list[MatrixAxes]:
    """Where the matrices are in each array that `cut` returns."""
    if not axes.blocks:
        return [axes]
    first, others = axes.outputs[0], _all_but_outputs(axes)
    matrices = []
    for count, size in axes.blocks:
        # The old axes, with the outputs as one in the place of their first; -1 counts blocks.
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
    """An array for each run of blocks, of the whole array or of one number per output."""
    if not axes.blocks:
        return [x]
    whole, runs = _views(axes, x.shape)
    x, axis = whole.of(x), axes.outputs[0]
    ends = list(itertools.accumulate(run.start[axis] for run in runs))
    bounds = zip([0, *ends], ends, strict=False)
    slices = [jax.lax.slice_in_dim(x, *bound, axis=axis) for bound in bounds]
    return [run.of(y) for run, y in zip(runs, slices, strict=True)]


def joined(blocks: Sequence[jax.Array], axes: MatrixAxes, shape: Sequence[int]) -> jax.Array:
    """The array of a shape from what `cut` made of it."""
    if not axes.blocks:
        return blocks[0]
    whole, runs = _views(axes, shape)
    flat = [run.back(x) for run, x in zip(runs, blocks, strict=True)]
    return whole.back(jax.lax.concatenate(flat, axes.outputs[0]))


def _views(axes: MatrixAxes, shape: Sequence[int]) -> tuple[View, list[View]]:
    """Of an array with all outputs in the place of the first of them; of each run of blocks."""
    first, others = axes.outputs[0], _all_but_outputs(axes)
    order = (*others[:first], *axes.outputs, *others[first:])
    before, behind = ([shape[i] for i in part] for part in (others[:first], others[first:]))
    shape = tuple(shape)
    whole = View(shape, shape, order, (*before, axes.sizes[0], *behind))
    runs = []
    for count, size in axes.blocks:
        start, counted = (*before, count * size, *behind), (count,) if count > 1 else ()
        run = (*before, *counted, size, *behind)
        runs.append(View(start, run, tuple(range(len(run))), run))
    return whole, runs


def _all_but_outputs(axes: MatrixAxes) -> list[int]:
    return [axis for axis in range(len(axes.shape)) if axis not in axes.outputs]


def mesh_axes_to_cut(axes: MatrixAxes, sizes: dict[str, int]) -> MeshAxesPerAxis:
    """How to shard an array, so that a device cuts its part by itself.

    Along outputs where it has whole blocks there; else along another axis: one all-to-all.

    Args:
      axes: of the array, with `mesh_axes`.
      sizes: of mesh axes.
    """
    assert axes.mesh_axes is not None
    names = [axes.mesh_axes[axis] for axis in axes.outputs]
    together = tuple(itertools.chain(*names))
    devices = math.prod(sizes[name] for name in together)
    is_first = names[0] == together
    if not together or (is_first and len(axes.blocks) == 1 and axes.blocks[0][0] % devices == 0):
        return axes.mesh_axes
    new = [() if axis in axes.outputs else names for axis, names in enumerate(axes.mesh_axes)]
    for axis in (*axes.inputs, *axes.stacked):
        if not new[axis] and axes.shape[axis] % devices == 0:
            new[axis] = together
            break
    return tuple(new)


# ---- numbers of matrices -----------------------------------------------------------------------


def apply(
    rule: Function, axes: Sequence[MatrixAxes | None], /, *columns: Sequence[Any], **options: Any
) -> list[Any]:
    """The rule of the entries of each array that has matrices, and all of them."""
    calls = [
        None
        if of is None or any(x is None for x in row)
        else (leafwise.fixed(rule, axes=of, **options), tuple(row))
        for of, *row in zip(axes, *columns, strict=True)
    ]
    return leafwise.run(calls)


def sums(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """The sum over each matrix, of a shape that broadcasts to the array."""
    if not axes.blocks:
        return jnp.sum(x, axis=(*axes.outputs, *axes.inputs), keepdims=True)
    per_output = jnp.sum(x, axis=axes.inputs, keepdims=True)
    totals = [
        jnp.broadcast_to(jnp.sum(y, axis=run.outputs, keepdims=True), y.shape)
        for y, run in zip(cut(replicated(per_output), axes), pieces(axes), strict=True)
    ]
    return joined(totals, axes, per_output.shape)


def per_output(numbers: Sequence[jax.Array], axes: MatrixAxes) -> jax.Array:
    """One scalar for each run as one number per output, of a shape that broadcasts to the array."""
    sizes = [count * size for count, size in axes.blocks]
    real = np.result_type(*(x.dtype for x in numbers))
    repeated = map(jnp.broadcast_to, (x.astype(real) for x in numbers), ((n,) for n in sizes))
    x = jax.lax.concatenate(list(repeated), 0)
    return x.reshape([n if axis in axes.outputs else 1 for axis, n in enumerate(axes.shape)])


# ---- as a factory reads them -------------------------------------------------------------------


def read_output_axes(function: str, output_axes: PyTree) -> PyTree:
    """A tree of `Axes` with indices of array axes."""
    return read_layer_axes(function, output_axes, "output_axes")


def read_shardings(function: str, mesh_axes: PyTree) -> PyTree:
    """A tree of `Axes`, of which each value is a tuple of names; None stays."""
    leaves, structure = trees.flatten(mesh_axes)
    arg = ArgLeaves.from_tree(function, "mesh_axes", mesh_axes)
    axes: list[Axes | None] = []
    for i, spec in enumerate(leaves):
        if spec is not None and not isinstance(spec, PartitionSpec):
            expected = "None, or a PartitionSpec, which says which axes are sharded"
            arg.fail(i, TypeError, f"{checks.describe(spec)}, expected {expected}")
        parts = [part if isinstance(part, tuple) else (part,) for part in spec or ()]
        values = tuple(tuple(name for name in part if name is not None) for part in parts)
        axes.append(None if spec is None else Axes(values))
    return structure.unflatten(axes)


def read_split(function: str, split: PyTree) -> PyTree:
    """A tree of `Axes` with sizes: (a, b) for those, (a, ...) for a head size, () for None."""

    def is_size(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    def read(x: Any) -> Axes | None:
        if x is None or is_size(x):
            return Axes() if x is None else Axes((x, ...))
        return Axes(x) if type(x) is tuple and x and all(map(is_size, x)) else None

    expected = "None, a head size (an int), or a tuple of sizes"
    if type(split) is tuple and not split:
        raise ValueError(f"{function}: `split`: (), expected {expected}.")
    tree = read_axes(function, "split", split, read, expected)
    arg = ArgLeaves.from_tree(function, "split", tree)
    for i, sizes in enumerate(arg.leaves):
        if any(size is not ... and size < 1 for size in sizes.values):
            arg.fail(i, ValueError, f"{_shown(sizes)}, expected sizes of 1 or more")
    return tree


def _shown(sizes: Axes) -> Any:
    return sizes.values[0] if sizes.values[-1] is ... else sizes.values


# ---- for each leaf of the unpacked tree --------------------------------------------------------


def find(
    inputs: Parameters,
    matrices: Mask,
    output_axes: PyTree,
    layer_axes: PyTree,
    mesh_axes: PyTree,
    split: PyTree,
) -> list[MatrixAxes | None]:
    """Where the matrices of each leaf are; None for a leaf that is none."""
    if not inputs.specs:
        return []
    function = inputs.function
    reference = ArgLeaves.from_tree(function, "params", inputs.shapes).with_arrays()
    mask = options.mask(inputs, "matrices", matrices)
    chosen = reference._replace(
        name="matrices",
        leaves=[
            use and x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
            for use, x in zip(mask, reference.leaves, strict=True)
        ],
    )
    stacked = inputs.option("layer_axes", read_layer_axes(function, layer_axes))
    outputs = inputs.option("output_axes", read_output_axes(function, output_axes))
    layers = layers_of(chosen, stacked, reference)
    of_matrices = zip(layers, chosen.leaves, strict=True)
    options.check_layers_of_share(
        inputs, stacked, [x.stacked if use else None for x, use in of_matrices]
    )
    if inputs.has_buffers:
        _as_packed(inputs.specs, layers, chosen, stacked)
    axes = of_leaves(layers, outputs, chosen)
    shardings = read_shardings(function, mesh_axes)
    sharded_axes = ArgLeaves.from_prefix(
        function, "mesh_axes", shardings, inputs.reference.name, inputs.shapes
    )
    axes = _with_shardings(inputs, axes, sharded_axes)
    if split is None:
        return axes
    return _with_blocks(inputs, axes, inputs.option("split", read_split(function, split)))


def layers_of(chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves) -> list[LayerAxes]:
    """The layers of each leaf with True in `chosen`; the others may have any `layer_axes`."""
    pairs = zip(layer_axes.leaves, chosen.leaves, strict=True)
    stacked = layer_axes._replace(leaves=[axes if use else Axes() for axes, use in pairs])
    not_sharded = layer_axes._replace(name="mesh_axes", leaves=[Axes()] * len(stacked.leaves))
    return layer_axes_of.of_leaves(not_sharded, stacked, reference)


def _as_packed(
    specs: Sequence[ArraySpec], layers: list[LayerAxes], chosen: ArgLeaves, layer_axes: ArgLeaves
) -> None:
    """Puts the layers of leaves that were packed with `layer_axes` in the place of those given."""
    packed = [pair for spec in specs for pair in zip(spec.positions, spec.spans, strict=False)]
    for i, span in packed:
        stacked = span.layers.stacked
        if chosen.leaves[i] and stacked:
            if layers[i].stacked not in ((), stacked):
                expected = f"the axes with which it was packed, {stacked}"
                layer_axes.fail(i, ValueError, f"{layers[i].stacked}, expected {expected}")
            layers[i] = span.layers


def of_leaves(
    layers: Sequence[LayerAxes], output_axes: ArgLeaves, matrices: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf with True in `matrices`; None for the others."""
    pairs = enumerate(zip(layers, matrices.leaves, strict=True))
    return [_of_leaf(i, of, output_axes, matrices) if use else None for i, (of, use) in pairs]


def _of_leaf(i: int, layers: LayerAxes, output_axes: ArgLeaves, matrices: ArgLeaves) -> MatrixAxes:
    shape, axes = layers.shape, output_axes.leaves[i].values
    remedy = "; without them a leaf is not a matrix, and belongs to Adam: False"
    if layers.stacked:
        remedy += ", as `hidden_matrices(layer_axes=...)` says"
    check_is_matrix(matrices, i, layers, "True for ", remedy)
    inside = all(-len(shape) <= axis < len(shape) for axis in axes)
    outputs = tuple(sorted({axis % len(shape) for axis in axes})) if inside else ()
    if not outputs or len(outputs) < len(axes) or not set(outputs) < set(layers.within):
        shown = axes[0] if len(axes) == 1 else axes
        expected = f"some of the axes {layers.within} of {_described(layers)}"
        problem = f"{shown}, expected {expected}, and another left as input"
        output_axes.fail(i, ValueError, problem)
    return MatrixAxes(shape, layers.stacked, outputs)


def check_is_matrix(
    arg: ArgLeaves, i: int, layers: LayerAxes, before: str = "", remedy: str = ""
) -> None:
    """A layer has two axes or more; `before` and `remedy` say what else a message says."""
    if len(layers.within) < 2:
        expected = "at least an output and an input axis in each layer"
        arg.fail(i, ValueError, f"{before}{_described(layers)}, expected {expected}{remedy}")


def _described(layers: LayerAxes) -> str:
    over = f" with layers over the axes {layers.stacked}" if layers.stacked else ""
    return f"an array of shape {layers.shape}{over}"


# ---- how they are sharded ----------------------------------------------------------------------


def _with_shardings(
    inputs: Parameters, axes: Sequence[MatrixAxes | None], mesh_axes: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf, with what a device has of it inside of `shard_map`."""
    arrays = zip(inputs.specs, inputs.reference.leaves, strict=True)
    array_of = {i: (spec, x) for spec, x in arrays for i in spec.positions}
    sharded = list(axes)
    for i, matrices in enumerate(axes):
        if matrices is None:  # as where there is no parameter, and so no array
            continue
        (spec, x), named = array_of[i], mesh_axes.leaves[i]
        if spec.spans:
            if named is not None and any(named.values):
                expected = "expected None: `zero` knows its rows"
                mesh_axes.fail(i, ValueError, f"a PartitionSpec of a packed leaf, {expected}")
        elif named is None:
            _check_whole(mesh_axes, i, x)
        elif len(named.values) > len(matrices.shape):
            count, shape = len(named.values), matrices.shape
            expected = f"at most {len(shape)}, one for each axis of shape {shape}"
            mesh_axes.fail(i, ValueError, f"{count} entries, expected {expected}")
        else:
            sharded[i] = _sharded(matrices, mesh_axes, i, x)
    return sharded


def _sharded(matrices: MatrixAxes, mesh_axes: ArgLeaves, i: int, x: jax.Array) -> MatrixAxes:
    """With the mesh axes of an array under `jit`, or of what a device has inside of `shard_map`.

    Under `jit`, each part of a leaf has whole elements of mesh axes that there are.
    """
    values = mesh_axes.leaves[i].values
    mesh = automatic_mesh(x) if isinstance(x, jax.Array) else None
    if mesh is None:
        named = tuple((axis, names) for axis, names in enumerate(values) if names)
        return dataclasses.replace(matrices, sharded_axes=named)
    for axis, names in enumerate(values):
        layer_axes_of.check_names(mesh_axes, i, names, mesh)
        count = math.prod(mesh.shape[name] for name in names)
        if x.shape[axis] % count:
            problem = f"{names} for axis {axis} of shape {x.shape}, expected a multiple of {count}"
            mesh_axes.fail(i, ValueError, problem)
    missing = len(matrices.shape) - len(values)
    return dataclasses.replace(matrices, mesh_axes=values + ((),) * missing)


def _check_whole(mesh_axes: ArgLeaves, i: int, x: jax.Array) -> None:
    """Inside `shard_map` a leaf may be a part of a matrix, unless JAX knows that it is whole.

    To JAX 0.10, `pmap` is a `shard_map` that checks nothing.
    """
    if unknown := unknown_axes(x):
        which = ", ".join(map(repr, unknown))
        problem = (
            f"None inside `shard_map` or `pmap`, where a device may have a part of a matrix along "
            f"{which}, expected the PartitionSpec of the leaf; where each device has whole "
            "matrices, `mesh_axes=PartitionSpec()`"
        )
        mesh_axes.fail(i, ValueError, problem)


# ---- how they are split ------------------------------------------------------------------------


def _with_blocks(
    inputs: Parameters, axes: Sequence[MatrixAxes | None], split: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf, with the blocks into which it is split."""
    leaves = trees.flatten(inputs.shapes)[0]
    blocks = list(axes)
    for i, (matrices, x, sizes) in enumerate(zip(axes, leaves, split.leaves, strict=True)):
        if x is None or not sizes.values:
            continue
        if matrices is None:
            expected = "None for a leaf that is not a matrix; `by_path` chooses leaves"
            split.fail(i, ValueError, f"{_shown(sizes)}, expected {expected}")
        blocks[i] = dataclasses.replace(matrices, blocks=_runs(split, i, matrices, sizes))
    return blocks


def _runs(
    split: ArgLeaves, i: int, matrices: MatrixAxes, sizes: Axes
) -> tuple[tuple[int, int], ...]:
    """(number, size) of neighbours of one size; nothing for one block, which is the matrix."""
    # Inside `shard_map` the matrix, of which a device may have a part; before it leaves are whole.
    outputs = matrices.in_shard_map.whole.sizes[0]
    shape = f"an array of shape {matrices.shape}"
    if sizes.values[-1] is ...:
        size = sizes.values[0]
        if outputs % size:
            expected = f"a divisor of {outputs}, the number of outputs of {shape}"
            split.fail(i, ValueError, f"{size}, expected {expected}")
        return ((outputs // size, size),) if outputs > size else ()
    if sum(sizes.values) != outputs:
        expected = f"{outputs}, the number of outputs of {shape}"
        came = f"{sizes.values} with sum {sum(sizes.values)}"
        split.fail(i, ValueError, f"{came}, expected {expected}")
    alike = itertools.groupby(sizes.values)
    return tuple((len(list(run)), size) for size, run in alike) if len(sizes.values) > 1 else ()
