"""Options that say where the matrices of each leaf are.

Methods work on one matrix at a time. `layer_axes` names the axes along which matrices are stacked:
layers for `lax.scan`, experts, heads. `output_axes` names the outputs among the other axes. The
rest are inputs, so the kernel of a convolution is one matrix.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgrad._inputs import layer_options, options
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers import layer_axes as axes_of
from jgrad._layers.array_spec import ArraySpec
from jgrad._layers.layer_axes import Axes, LayerAxes, axis_exists, existing, read_layer_axes
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._trees import checks, trees
from jgrad._trees.annotations import ArrayAxes, Mask, MeshAxes
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import MeshAxesPerAxis, automatic_mesh, read_leaves, unknown_axes

# The default of `output_axes`: -1, in a form that `optax.inject_hyperparams` does not turn into an
# array.
LAST = (-1,)
_OUTPUTS = "output_axes"


# ---- as a factory reads them -------------------------------------------------------------------


def read_split(function: str, split: PyTree) -> PyTree:
    """A tree of `Axes` with sizes: (a, b) for those, (a, ...) for a head size, () for None."""

    def is_size(x: object) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    def read(x: object) -> Axes | None:
        if x is None or is_size(x):
            return Axes() if x is None else Axes((x, ...))
        return Axes(x) if type(x) is tuple and x and all(map(is_size, x)) else None

    expected = "None, a head size (an int), or a tuple of sizes"
    if type(split) is tuple and not split:
        raise ValueError(f"{function}: `split`: (), expected {expected}.")
    tree = read_leaves(function, "split", split, read, expected)
    arg = ArgLeaves.from_tree(function, "split", tree)
    for i, sizes in enumerate(arg.leaves):
        if any(size is not ... and size < 1 for size in sizes.values):
            arg.fail(i, ValueError, f"{_shown(sizes)}, expected sizes of 1 or more")
    return tree


def _shown(sizes: Axes) -> object:
    return sizes.values[0] if sizes.values[-1] is ... else sizes.values


def read_shard_over(function: str, shard_over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Names of mesh axes."""
    return () if shard_over is None else checks.axis_names(function, "shard_over", shard_over)


class MatrixOptions(NamedTuple):
    """Which leaves are matrices, and where they are in them."""

    matrices: Mask
    output_axes: ArrayAxes
    split: ArrayAxes
    layer_axes: ArrayAxes
    mesh_axes: MeshAxes

    def check(self, function: str) -> None:
        """What a factory can."""
        read_layer_axes(function, self.output_axes, _OUTPUTS)
        read_split(function, self.split)
        read_layer_axes(function, self.layer_axes)
        options.check_masks(function, matrices=self.matrices)
        if self.matrices is None:
            expected = "a prefix tree of bools, or a function of the parameters' shapes"
            remedy = "`hidden_matrices()` chooses by names and shapes; shapes alone cannot tell"
            raise TypeError(f"{function}: `matrices`: None, expected {expected}; {remedy}.")

    def find(self, inputs: Parameters) -> list[MatrixAxes | None]:
        """Where the matrices of each leaf are; an error where one is packed with others."""
        axes = self.output_axes, self.layer_axes, self.mesh_axes, self.split
        matrices = find(inputs, self.matrices, *axes)
        if inputs.has_buffers:
            refuse_packed(inputs, matrices)
        return matrices


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
    stacked = layer_options.stacked_axes(inputs, layer_axes)
    outputs = inputs.option(_OUTPUTS, read_layer_axes(function, output_axes, _OUTPUTS))
    layers = layers_of(chosen, stacked, reference)
    if inputs.has_buffers:
        _as_packed(inputs.specs, layers, chosen, stacked)
    axes = of_leaves(layers, outputs, chosen)
    axes = _with_shardings(inputs, axes, inputs.placements(mesh_axes))
    if split is None:
        return axes
    return _with_runs(inputs, axes, inputs.option("split", read_split(function, split)))


def layers_of(chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves) -> list[LayerAxes]:
    """The layers of each leaf with True in `chosen`; the others may have any `layer_axes`."""
    pairs = zip(layer_axes.leaves, chosen.leaves, strict=True)
    stacked = layer_axes._replace(leaves=[axes if use else Axes() for axes, use in pairs])
    return axes_of.of_leaves(stacked, reference)


def refuse_packed(inputs: Parameters, matrices: Sequence[MatrixAxes | None]) -> None:
    """An error if a matrix shares a buffer with other leaves."""
    for spec in inputs.specs:
        for i in () if spec.is_unpacked else spec.positions:
            if matrices[i] is not None:
                arg = ArgLeaves.from_tree(inputs.function, "matrices", inputs.shapes)
                came = "True for a leaf that is packed with others"
                expected = "expected one by itself: a smaller `max_size` of `pack` or `pack_small`"
                remedy = "in the place of `zero`, `shard_over` under `jit`"
                arg.fail(i, ValueError, f"{came}, {expected}; {remedy}")


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
    return [
        _matrices_of_leaf(i, layers_here, output_axes, matrices) if use else None
        for i, (layers_here, use) in pairs
    ]


def _matrices_of_leaf(
    i: int, layers: LayerAxes, output_axes: ArgLeaves, matrices: ArgLeaves
) -> MatrixAxes:
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
    array_of = {i: x for spec, x in arrays if spec.is_unpacked for i in spec.positions}
    sharded = list(axes)
    for i, matrices in enumerate(axes):
        if matrices is None or i not in array_of:  # no matrix, or a packed one, which is refused
            continue
        x, per_axis = array_of[i], mesh_axes.leaves[i].per_axis
        if per_axis is None:
            if unknown := unknown_axes(x):
                _fail_for_part(mesh_axes, i, unknown)
        elif len(per_axis) > len(matrices.shape):
            count, shape = len(per_axis), matrices.shape
            expected = f"at most {len(shape)}, one for each axis of shape {shape}"
            mesh_axes.fail(i, ValueError, f"{count} entries, expected {expected}")
        else:
            is_update = isinstance(inputs, Inputs)  # an `init` may be elsewhere
            sharded[i] = _sharded(matrices, mesh_axes, i, per_axis, x, is_update=is_update)
    return sharded


def _sharded(
    matrices: MatrixAxes,
    mesh_axes: ArgLeaves,
    i: int,
    per_axis: MeshAxesPerAxis,
    x: jax.Array,
    *,
    is_update: bool,
) -> MatrixAxes:
    """With the mesh axes of an array under `jit`, or of what a device has inside of `shard_map`.

    Under `jit`, each part of a leaf has whole elements of mesh axes that there are.
    """
    mesh = automatic_mesh(x) if isinstance(x, jax.Array) else None
    for axis, names in enumerate(per_axis):
        if mesh is not None or (is_update and axis not in matrices.stacked):
            existing(mesh_axes, i, names, x)
    if mesh is None:
        here = ((axis, tuple(filter(axis_exists, names))) for axis, names in enumerate(per_axis))
        return dataclasses.replace(matrices, sharded_axes=tuple(pair for pair in here if pair[1]))
    for axis, names in enumerate(per_axis):
        count = math.prod(mesh.shape[name] for name in names)
        if x.shape[axis] % count:
            problem = f"{names} for axis {axis} of shape {x.shape}, expected a multiple of {count}"
            mesh_axes.fail(i, ValueError, problem)
    missing = len(matrices.shape) - len(per_axis)
    return dataclasses.replace(matrices, mesh_axes=per_axis + ((),) * missing)


def _fail_for_part(mesh_axes: ArgLeaves, i: int, unknown: Sequence[str]) -> None:
    """Inside `shard_map` a leaf may be a part of a matrix, unless JAX knows that it is whole.

    To JAX 0.10, `pmap` is a `shard_map` that checks nothing.
    """
    which, came = ", ".join(map(repr, unknown)), mesh_axes.leaves[i].anywhere or None
    problem = (
        f"{came} inside `shard_map` or `pmap`, where a device may have a part of a matrix along "
        f"{which}, expected the PartitionSpec of the leaf; where each device has whole "
        "matrices, `mesh_axes=PartitionSpec()`"
    )
    mesh_axes.fail(i, ValueError, problem)


# ---- how they are split ------------------------------------------------------------------------


def _with_runs(
    inputs: Parameters, axes: Sequence[MatrixAxes | None], split: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf, with the pieces into which it is split."""
    leaves = trees.flatten(inputs.shapes)[0]
    split_axes = list(axes)
    for i, (matrices, x, sizes) in enumerate(zip(axes, leaves, split.leaves, strict=True)):
        if x is None or not sizes.values:
            continue
        if matrices is None:
            expected = "None for a leaf that is not a matrix; `by_path` chooses leaves"
            split.fail(i, ValueError, f"{_shown(sizes)}, expected {expected}")
        split_axes[i] = dataclasses.replace(matrices, runs=_runs(split, i, matrices, sizes))
    return split_axes


def _runs(
    split: ArgLeaves, i: int, matrices: MatrixAxes, sizes: Axes
) -> tuple[tuple[int, int], ...]:
    """(number, size) of neighbours of one size; nothing for one piece, which is the matrix."""
    # Inside `shard_map` the matrix, of which a device may have a part; outside, leaves are whole.
    outputs = matrices.whole.sizes[0]
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
