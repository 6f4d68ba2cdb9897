"""Which axes of an array make up a matrix: Muon orthogonalizes one matrix at a time.

An axis of a leaf counts matrices, is an output, or is an input. `layer_axes` says over which axes
matrices are stacked: layers for `lax.scan`, experts, heads. `output_axes` says which of the others
are outputs. What is left is input, so that the kernel of a convolution is one matrix.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from jgrad._layers import layer_axes as layer_axes_of
from jgrad._layers.layer_axes import Axes, LayerAxes, read_indices
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """Where the matrices of one array are.

    Attributes:
      shape: shape of the array.
      stacked: axes of the array with a matrix for each index, in order and none negative.
      outputs: axes that are outputs, likewise.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    outputs: tuple[int, ...]

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

    def to_wide(self, x: jax.Array) -> jax.Array:
        """The matrices, of shape (count, *wide)."""
        axes = self._in_order
        if axes != tuple(range(len(axes))):
            x = jax.lax.transpose(x, axes)
        return jax.lax.reshape(x, (self.count, *self.wide))

    def from_wide(self, x: jax.Array) -> jax.Array:
        """The array, from what `to_wide` made of it."""
        axes = self._in_order
        x = jax.lax.reshape(x, [self.shape[axis] for axis in axes])
        return x if axes == tuple(range(len(axes))) else jax.lax.transpose(x, np.argsort(axes))

    @property
    def _in_order(self) -> tuple[int, ...]:
        """Stacked axes, those of the rows and those of the columns of wide matrices.

        A square matrix has them as they come, which transposes nothing.
        """
        out, into = self.sizes
        rows_are_outputs = min(self.outputs) < min(self.inputs) if out == into else out < into
        pair = (self.outputs, self.inputs) if rows_are_outputs else (self.inputs, self.outputs)
        return (*self.stacked, *pair[0], *pair[1])

    def _size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[axis] for axis in axes)


def read_output_axes(function: str, output_axes: PyTree) -> PyTree:
    """A tree of `Axes` with indices of array axes."""
    return read_indices(function, "output_axes", output_axes)


def layers_of(chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves) -> list[LayerAxes]:
    """The layers of each leaf with True in `chosen`; the others may have any `layer_axes`."""
    given = [x if use else Axes() for x, use in zip(layer_axes.leaves, chosen.leaves, strict=True)]
    not_sharded = layer_axes._replace(name="norm_axes", leaves=[Axes()] * len(given))
    return layer_axes_of.of_leaves(not_sharded, layer_axes._replace(leaves=given), reference)


def of_leaves(
    layers: Sequence[LayerAxes], output_axes: ArgLeaves, matrices: ArgLeaves
) -> list[MatrixAxes | None]:
    """The matrices of each leaf with True in `matrices`; None for the others."""
    pairs = enumerate(zip(layers, matrices.leaves, strict=True))
    return [_of_leaf(i, own, output_axes, matrices) if use else None for i, (own, use) in pairs]


def _of_leaf(i: int, layers: LayerAxes, output_axes: ArgLeaves, matrices: ArgLeaves) -> MatrixAxes:
    shape, axes = layers.shape, output_axes.leaves[i].values
    over = f" with layers over the axes {layers.stacked}" if layers.stacked else ""
    if len(layers.within) < 2:
        expected = "at least an output and an input axis in each layer"
        remedy = "without them a leaf is no matrix, and belongs to Adam: False"
        problem = f"True for an array of shape {shape}{over}, expected {expected}; {remedy}"
        matrices.fail(i, ValueError, problem)
    inside = all(-len(shape) <= axis < len(shape) for axis in axes)
    outputs = tuple(sorted({axis % len(shape) for axis in axes})) if inside else ()
    if not outputs or len(outputs) < len(axes) or not set(outputs) < set(layers.within):
        shown = axes[0] if len(axes) == 1 else axes
        expected = f"some of the axes {layers.within} of an array of shape {shape}{over}"
        problem = f"{shown}, expected {expected}, and another left as input"
        output_axes.fail(i, ValueError, problem)
    return MatrixAxes(shape, layers.stacked, outputs)
