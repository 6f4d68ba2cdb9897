"""What an array stands for: a leaf, or whatever a node of a tree says of its arrays.

The folders above ask an `ArraySpec` instead of asking whether an array is packed. A node that holds
many leaves in few arrays, such as a `Packed`, says what these are by `__jgrad_arrays__`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jgrad._trees import trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import Stack, told

Layers = Any  # the `LayerAxes` of an array, of which a method without layers knows nothing


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySpec:
    """A leaf of the tree.

    Attributes:
      positions: of the leaves that the array stands for, among those of the unpacked tree.
      stack: where `step_in_backward` has its layers, if it has some.
      is_buffer: whether the array is in a node of its own kind, be it as a leaf.
      is_unpacked: whether the array is a leaf itself.
      has_rows: whether each of its rows belongs to one of several leaves.
      spans: where the leaves are in it; none for a leaf.
      shape: of the whole array; of a leaf it is not needed.
      shard: the rows that this device has; None for all of them.
    """

    positions: tuple[int, ...]
    stack: Stack | None = None
    is_buffer = False
    is_unpacked = True
    has_rows = False
    spans: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    shard: Any = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this device has of it."""
        return self.shape

    def per_array(self, entries: Sequence[PyTree]) -> PyTree:
        """One entry per leaf of the tree as one for the array."""
        return entries[self.positions[0]]

    def mask_per_layer(self, mask: Sequence[bool]) -> bool | np.ndarray:
        """A bool per leaf as one for the array, or one for each layer where they differ."""
        return mask[self.positions[0]]

    def layers_of_leaves(self, layers: Layers) -> list[Layers]:
        """Where the layers of each leaf are; `layers` are those of the array."""
        return [layers]

    def per_leaf(self, numbers: jax.Array, layers: Layers) -> list[jax.Array]:
        """One number for each layer of the array as those of each leaf, in the shape of its stack.

        Args:
          numbers: a vector.
          layers: those of the array, as `layer_axes` returned them.
        """
        leaves = self.layers_of_leaves(layers)
        parts = jax.lax.split(numbers, [leaf.num_layers for leaf in leaves])
        return [
            x.reshape([leaf.shape[axis] for axis in leaf.stacked])
            for x, leaf in zip(parts, leaves, strict=True)
        ]

    def mesh_axes(self, per_leaf: Sequence[tuple[str, ...]], arg: ArgLeaves) -> tuple[str, ...]:
        """Over which mesh axes the array is sharded, from those of each leaf of the tree."""
        return per_leaf[self.positions[0]]

    def layer_axes(
        self, per_leaf: Sequence[Layers], mesh_axes: ArgLeaves, layer_axes: ArgLeaves
    ) -> Layers:
        """Where the layers of the array are, from where those of each leaf of the tree are."""
        return per_leaf[self.positions[0]]


def _is_array(x: PyTree) -> bool:
    return trees.is_leaf(x) or trees.is_packed(x)


def specs(tree: PyTree) -> list[ArraySpec]:
    """One for each leaf of a tree in which nodes may say what their arrays are."""
    arrays: list[ArraySpec] = []
    count = 0
    stacks = told().stacks
    leaves: list[PyTree] = jax.tree.leaves(tree, is_leaf=_is_array)
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array) if stacks else []
    x: PyTree
    for x, (path, _) in itertools.zip_longest(leaves, paths, fillvalue=((), None)):
        arrays_here = x.__jgrad_arrays__(count) if trees.is_packed(x) else None
        arrays += [ArraySpec((count,), stacks.get(path))] if arrays_here is None else arrays_here
        count += 1 if arrays_here is None else x.num_leaves
    return arrays
