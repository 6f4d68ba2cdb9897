"""Options that say where the matrices of each leaf are.

Methods work on one matrix at a time. `layer_axes` names the axes along which matrices are stacked:
layers for `lax.scan`, experts, heads. `output_axes` names the outputs among the other axes. The
rest are inputs, so the kernel of a convolution is one matrix.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgrad._inputs import layer_options, options
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers.layer_axes import (
    Axes,
    LayerAxes,
    axis_exists,
    existing,
    of_leaves,
    read_layer_axes,
)
from jgrad._layers.matrix_axes import MatrixAxes, TwoKinds
from jgrad._trees import checks, trees
from jgrad._trees.annotations import ArrayAxes, Mask, MeshAxes
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree
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

    def find(self, inputs: Parameters) -> dict[int, MatrixAxes]:
        """Where the matrices of leaves are; an error where one is packed with others."""
        mask = options.mask(inputs, "matrices", self.matrices)
        stacked = layer_options.stacked_axes(inputs, self.layer_axes)
        matrices = find(inputs, mask, stacked, self.output_axes, self.mesh_axes)
        if self.split is not None:
            split = inputs.option("split", read_split(inputs.function, self.split))
            matrices = _with_runs(inputs, matrices, split)
        for i in packed(inputs, matrices):
            arg = ArgLeaves.from_tree(inputs.function, "matrices", inputs.shapes)
            came = "True for a leaf that is packed with others"
            expected = "expected one by itself: a smaller `max_size` of `pack` or `pack_small`"
            remedy = "in the place of `zero`, `shard_over` under `jit`"
            arg.fail(i, ValueError, f"{came}, {expected}; {remedy}")
        return matrices


# ---- of leaves of the unpacked tree, by their positions ----------------------------------------


def find(
    inputs: Parameters,
    mask: Sequence[bool],
    layer_axes: ArgLeaves,
    output_axes: PyTree,
    mesh_axes: PyTree,
) -> dict[int, MatrixAxes]:
    """Where the matrices of the leaves with True are; the others may have any `layer_axes`."""
    params = ArgLeaves.from_tree(inputs.function, "params", inputs.shapes).with_arrays()
    rows = [
        i
        for i, (use, x) in enumerate(zip(mask, params.leaves, strict=True))
        if use and x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    outputs = inputs.option(_OUTPUTS, read_layer_axes(inputs.function, output_axes, _OUTPUTS))
    layers = dict(zip(rows, of_leaves(layer_axes.at(rows), params.at(rows)), strict=True))
    for spec in inputs.specs:
        for i, span in zip(spec.positions, spec.spans, strict=False):
            if i in layers and span.layers.stacked:
                layers[i] = _as_packed(i, layers[i], span.layers, layer_axes)
    reference = params._replace(name="matrices")
    matrices = {i: of_leaf(i, x, outputs, reference) for i, x in layers.items()}
    return matrices | _with_shardings(inputs, matrices, inputs.placements(mesh_axes))


def unpacked(inputs: Parameters) -> dict[int, Leaf]:
    """The arrays that are leaves themselves; all others are buffers of several."""
    pairs = zip(inputs.specs, inputs.reference.leaves, strict=True)
    return {spec.positions[0]: x for spec, x in pairs if spec.is_unpacked}


def packed(inputs: Parameters, matrices: Container[int]) -> list[int]:
    """Those of the matrices that share a buffer with other leaves."""
    buffers = (spec for spec in inputs.specs if not spec.is_unpacked)
    return [i for spec in buffers for i in spec.positions if i in matrices]


def with_shapes_of_matrices(
    inputs: Parameters,
    matrices: Mapping[int, MatrixAxes],
    shape_of: Callable[[Leaf, MatrixAxes], PyTree],
) -> PyTree:
    """The tree of the parameters, with what a moment has in the place of matrices."""
    leaves, both = list(inputs.reference.leaves), TwoKinds.of(inputs.specs, matrices)
    for k, axes in zip(both.first, both.axes, strict=True):
        leaves[k] = shape_of(leaves[k], axes)
    return trees.flatten(inputs.tree)[1].unflatten(leaves)


def _as_packed(i: int, layers: LayerAxes, packed: LayerAxes, layer_axes: ArgLeaves) -> LayerAxes:
    """The layers with which a leaf was packed, in the place of those given."""
    if layers.stacked not in ((), packed.stacked):
        expected = f"the axes with which it was packed, {packed.stacked}"
        layer_axes.fail(i, ValueError, f"{layers.stacked}, expected {expected}")
    return packed


def of_leaf(i: int, layers: LayerAxes, output_axes: ArgLeaves, matrices: ArgLeaves) -> MatrixAxes:
    """The matrices of a leaf with these layers; an error where it has none."""
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
    inputs: Parameters, matrices: Mapping[int, MatrixAxes], mesh_axes: ArgLeaves
) -> dict[int, MatrixAxes]:
    """With what a device has of them inside of `shard_map`; packed ones are refused elsewhere."""
    is_update = isinstance(inputs, Inputs)  # an `init` may be elsewhere
    sharded: dict[int, MatrixAxes] = {}
    for i, x in unpacked(inputs).items():
        if i not in matrices:
            continue
        axes, per_axis = matrices[i], mesh_axes.leaves[i].per_axis
        if per_axis is None:
            if unknown := unknown_axes(x):
                _fail_for_part(mesh_axes, i, unknown)
        elif len(per_axis) > len(axes.shape):
            count, shape = len(per_axis), axes.shape
            expected = f"at most {len(shape)}, one for each axis of shape {shape}"
            mesh_axes.fail(i, ValueError, f"{count} entries, expected {expected}")
        else:
            sharded[i] = _sharded(axes, mesh_axes, i, per_axis, x, is_update=is_update)
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
    inputs: Parameters, matrices: Mapping[int, MatrixAxes], split: ArgLeaves
) -> dict[int, MatrixAxes]:
    """With the pieces into which they are split."""
    split_axes = dict(matrices)
    for i, (x, sizes) in enumerate(zip(trees.flatten(inputs.shapes)[0], split.leaves, strict=True)):
        if x is None or not sizes.values:
            continue
        if i not in matrices:
            expected = "None for a leaf that is not a matrix; `by_path` chooses leaves"
            split.fail(i, ValueError, f"{_shown(sizes)}, expected {expected}")
        runs = _runs(split, i, matrices[i], sizes)
        split_axes[i] = dataclasses.replace(matrices[i], runs=runs)
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
