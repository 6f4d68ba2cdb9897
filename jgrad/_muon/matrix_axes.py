"""Which axes of an array make up a matrix: Muon orthogonalizes one matrix at a time.

An axis of a leaf counts matrices, is an output, or is an input. `layer_axes` says over which axes
matrices are stacked: layers for `lax.scan`, experts, heads. `output_axes` says which of the others
are outputs. What is left is input, so that the kernel of a convolution is one matrix.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jgrad._inputs import options
from jgrad._inputs.inputs import Parameters
from jgrad._inputs.options import Mask
from jgrad._layers import layer_axes as layer_axes_of
from jgrad._layers.layer_axes import Axes, LayerAxes, check_names, read_layer_axes
from jgrad._packed.array_spec import ArraySpec
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import all_gather, automatic_mesh, unknown_axes
from jgrad._trees.trees import PyTree


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
      places: under `jit`, for each axis the names of the mesh axes over which it is sharded; None
        where nothing says it.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    sharded_axes: tuple[tuple[int, tuple[str, ...]], ...] = ()
    places: tuple[tuple[str, ...], ...] | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that are inputs."""
        others = {*self.stacked, *self.outputs}
        return tuple(axis for axis in range(len(self.shape)) if axis not in others)

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

    @property
    def whole(self) -> "MatrixAxes":
        """Those of the array after `gathered`; inside `shard_map` alone."""
        shape = list(self.shape)
        for axis, names in self._gathered_axes:
            shape[axis] *= jax.lax.psum(1, names)
        return dataclasses.replace(self, shape=tuple(shape), sharded_axes=())

    def gathered(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """Whole matrices, of parts of them; or whole outputs, of one number per output."""
        for axis, names in self._gathered_axes_of(per_output):
            x = all_gather(x, names, axis)
        return x

    def local_part(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """This device's part, of what `gathered` returned."""
        for axis, names in self._gathered_axes_of(per_output):
            first = jax.lax.axis_index(names) * self.shape[axis]
            x = jax.lax.dynamic_slice_in_dim(x, first, self.shape[axis], axis)
        return x

    def _gathered_axes_of(self, per_output: bool) -> list[tuple[int, tuple[str, ...]]]:
        axes = self._gathered_axes
        return [(i, names) for i, names in axes if not (per_output and i in self.inputs)]

    @property
    def _gathered_axes(self) -> list[tuple[int, tuple[str, ...]]]:
        """Where layers are sharded, each device has whole matrices."""
        return [(axis, names) for axis, names in self.sharded_axes if axis not in self.stacked]

    def to_wide(self, x: jax.Array) -> jax.Array:
        """The matrices, of shape (count, *wide)."""
        axes = self.in_order
        if axes != tuple(range(len(axes))):
            x = jax.lax.transpose(x, axes)
        return jax.lax.reshape(x, (self.count, *self.wide))

    def from_wide(self, x: jax.Array) -> jax.Array:
        """The array, from what `to_wide` made of it."""
        axes = self.in_order
        x = jax.lax.reshape(x, [self.shape[axis] for axis in axes])
        return x if axes == tuple(range(len(axes))) else jax.lax.transpose(x, np.argsort(axes))

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
        return math.prod(self.shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a method computes with at once: an array; of a packed buffer, some rows.

    Attributes:
      array: which array.
      matrices: where the matrices are; None for other elements.
    """

    array: int
    matrices: MatrixAxes | None

    @property
    def whole(self) -> MatrixAxes:
        """Where the matrices are in the array that `to_matrices` returns."""
        assert self.matrices is not None
        return self.matrices.whole

    def to_matrices(self, x: jax.Array, *, per_output: bool = False) -> jax.Array:
        """An array of whole matrices from this part, or from its numbers per output."""
        assert self.matrices is not None
        return self.matrices.gathered(x, per_output=per_output)

    def from_matrices(
        self, x: jax.Array, like: jax.Array, *, per_output: bool = False
    ) -> jax.Array:
        """This part, in the shape of `like`, from what `to_matrices` made of it."""
        assert self.matrices is not None
        return self.matrices.local_part(x, per_output=per_output)


def find(
    inputs: Parameters, matrices: Mask, output_axes: PyTree, layer_axes: PyTree, mesh_axes: PyTree
) -> list[MatrixAxes | None]:
    """Where the matrices of each leaf of the unpacked tree are; None for a leaf that is none."""
    if not inputs.specs:
        return []
    function = inputs.function
    reference = ArgLeaves.from_tree(function, "params", inputs.shapes).with_arrays()
    pairs = zip(options.mask(inputs, "matrices", matrices), reference.leaves, strict=True)
    use = [use and x is not None and jnp.issubdtype(x.dtype, jnp.inexact) for use, x in pairs]
    chosen = reference._replace(name="matrices", leaves=use)
    stacked = inputs.option("layer_axes", read_layer_axes(function, layer_axes))
    outputs = inputs.option("output_axes", read_output_axes(function, output_axes))
    layers = layers_of(chosen, stacked, reference)
    if inputs.has_buffers:
        _as_packed(inputs.specs, layers, chosen, stacked)
    axes = of_leaves(layers, outputs, chosen)
    sharded_axes = ArgLeaves.from_prefix(
        function,
        "mesh_axes",
        read_shardings(function, mesh_axes),
        inputs.reference.name,
        inputs.shapes,
    )
    return _with_shardings(inputs.specs, axes, sharded_axes, inputs.reference.leaves)


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


def second_shape(x: Any, axes: MatrixAxes | None, *, per_output: bool) -> Any:
    """The shape of the second moments of an array; None where it has none."""
    if not checks.is_inexact(x) or (axes is not None and not per_output):
        return None
    return jax.ShapeDtypeStruct(x.shape if axes is None else axes.per_output, x.dtype)


def read_output_axes(function: str, output_axes: PyTree) -> PyTree:
    """A tree of `Axes` with indices of array axes."""
    return read_layer_axes(function, output_axes, "output_axes")


def read_shardings(function: str, mesh_axes: PyTree) -> PyTree:
    """A tree of `Axes`, of which each value is a tuple of names; None stays."""

    def read(x: Any) -> Axes | None:
        if not isinstance(x, PartitionSpec):
            return None
        parts = [part if isinstance(part, tuple) else (part,) for part in x]
        return Axes(tuple(tuple(name for name in part if name is not None) for part in parts))

    leaves, structure = trees.flatten(mesh_axes)
    arg = ArgLeaves.from_tree(function, "mesh_axes", mesh_axes)
    axes = [None if x is None else read(x) for x in leaves]
    for i, (x, own) in enumerate(zip(leaves, axes, strict=True)):
        if x is not None and own is None:
            expected = "None, or a PartitionSpec, which says which axes are sharded"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
    return structure.unflatten(axes)


def _with_shardings(
    specs: Sequence[ArraySpec],
    axes: Sequence[MatrixAxes | None],
    mesh_axes: ArgLeaves,
    arrays: Sequence[Any],
) -> list[MatrixAxes | None]:
    """The same, with what a device has of each leaf inside of `shard_map`."""
    found = list(axes)
    pairs = zip(specs, arrays, strict=True)
    array_of = {i: (spec, x) for spec, x in pairs for i in spec.positions}
    for i, matrices in enumerate(axes):
        if matrices is None:  # as where there is no parameter, and so no array
            continue
        (spec, x), sharded_axes = array_of[i], mesh_axes.leaves[i]
        if spec.spans:
            if sharded_axes is not None and any(sharded_axes.values):
                expected = "expected None: `zero` knows its rows"
                mesh_axes.fail(i, ValueError, f"a PartitionSpec of a packed leaf, {expected}")
        elif sharded_axes is None:
            _check_whole(mesh_axes, i, x)
        elif len(sharded_axes.values) > len(matrices.shape):
            count, shape = len(sharded_axes.values), matrices.shape
            expected = f"at most {len(shape)}, one for each axis of shape {shape}"
            mesh_axes.fail(i, ValueError, f"{count} entries, expected {expected}")
        else:
            _check_mesh(mesh_axes, i, x)
            found[i] = _sharded(matrices, sharded_axes.values, x)
    return found


def _sharded(matrices: MatrixAxes, values: tuple[tuple[str, ...], ...], x: Any) -> MatrixAxes:
    """With the place of an array under `jit`, or of what a device has inside of `shard_map`."""
    if isinstance(x, jax.Array) and automatic_mesh(x) is not None:
        missing = len(matrices.shape) - len(values)
        return dataclasses.replace(matrices, places=values + ((),) * missing)
    named = tuple((axis, names) for axis, names in enumerate(values) if names)
    return dataclasses.replace(matrices, sharded_axes=named)


def _check_mesh(mesh_axes: ArgLeaves, i: int, x: Any) -> None:
    """Under `jit`, each part of a leaf has whole elements of mesh axes that there are."""
    mesh = automatic_mesh(x) if isinstance(x, jax.Array) else None
    if mesh is None:
        return
    for axis, names in enumerate(mesh_axes.leaves[i].values):
        check_names(mesh_axes, i, names, mesh)
        count = math.prod(mesh.shape[name] for name in names)
        if x.shape[axis] % count:
            problem = f"{names} for axis {axis} of shape {x.shape}, expected a multiple of {count}"
            mesh_axes.fail(i, ValueError, problem)


def _check_whole(mesh_axes: ArgLeaves, i: int, x: Any) -> None:
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


def layers_of(chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves) -> list[LayerAxes]:
    """The layers of each leaf with True in `chosen`; the others may have any `layer_axes`."""
    given = [x if use else Axes() for x, use in zip(layer_axes.leaves, chosen.leaves, strict=True)]
    not_sharded = layer_axes._replace(name="mesh_axes", leaves=[Axes()] * len(given))
    return layer_axes_of.of_leaves(not_sharded, layer_axes._replace(leaves=given), reference)


def of_leaves(
    layers: Sequence[LayerAxes], output_axes: ArgLeaves, matrices: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf with True in `matrices`; None for the others."""
    pairs = enumerate(zip(layers, matrices.leaves, strict=True))
    return [_of_leaf(i, own, output_axes, matrices) if use else None for i, (own, use) in pairs]


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


def _of_leaf(i: int, layers: LayerAxes, output_axes: ArgLeaves, matrices: ArgLeaves) -> MatrixAxes:
    shape, axes = layers.shape, output_axes.leaves[i].values
    remedy = "; without them a leaf is no matrix, and belongs to Adam: False"
    check_is_matrix(matrices, i, layers, "True for ", remedy)
    inside = all(-len(shape) <= axis < len(shape) for axis in axes)
    outputs = tuple(sorted({axis % len(shape) for axis in axes})) if inside else ()
    if not outputs or len(outputs) < len(axes) or not set(outputs) < set(layers.within):
        shown = axes[0] if len(axes) == 1 else axes
        expected = f"some of the axes {layers.within} of {_described(layers)}"
        problem = f"{shown}, expected {expected}, and another left as input"
        output_axes.fail(i, ValueError, problem)
    return MatrixAxes(shape, layers.stacked, outputs)
