"""What an array stands for: a leaf, or whatever a node of a tree says of its arrays.

The folders above ask an `ArraySpec` instead of asking whether an array is packed. A node that holds
many leaves in few arrays, such as a `Packed`, says what these are by `__jgrad_arrays__`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._kernels.leaf_step import Place
from jgrad._layers import layer_axes as axes_of
from jgrad._layers.layer_axes import LayerAxes
from jgrad._quantized.random_bits import ElementKeys, Part, leaf_keys, mixed
from jgrad._trees import shares, trees
from jgrad._trees.annotations import Count
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import Blocks
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import varying_axes
from jgrad._trees.told import Stack, told


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySpec:
    """A leaf of the tree.

    Attributes:
      positions: of the leaves that the array stands for, among those of the unpacked tree.
      stack: where `step_in_backward` has its layers, if it has some.
      is_buffer: whether the array is in a node of its own kind, be it as a leaf.
      is_unpacked: whether the array is a leaf itself.
      spans: where the leaves are in it; none for a leaf.
      shape: of the whole array; of a leaf it is not needed.
      shard: the rows that this device has; None for all of them.
    """

    positions: tuple[int, ...]
    stack: Stack | None = None
    is_buffer = False
    is_unpacked = True
    spans: tuple[Any, ...] = dataclasses.field(default=(), init=False)
    shape: tuple[int, ...] = dataclasses.field(default=(), init=False)
    shard: Any = dataclasses.field(default=None, init=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this device has of it."""
        return self.shape

    def per_array(self, entries: Sequence[Any]) -> Any:
        """One entry per leaf of the tree as one for the array."""
        return entries[self.positions[0]]

    def element_keys(
        self, seed: Count, purpose: int, x: jax.Array | Blocks, place: Place | None = None
    ) -> ElementKeys:
        """What random bits are a hash of, so that a leaf has the same ones packed or not.

        The elements of a leaf are counted in order; of a packed one layer after layer, which is
        another order where layers are stacked over other axes than the first. So has one layer,
        updated by itself, those that it has in its stack, and a shard those that it has in its
        leaf. Where types alone say that it is a shard, its device has bits of its own.

        Args:
          seed: of the user.
          purpose: what is rounded.
          x: the array, or another one that is sharded as it is.
          place: how it is sharded, if the user says it.
        """
        keys: Any = leaf_keys(seed, purpose, self.positions)
        place = place if place is not None and place.is_shard and self._counts(place) else None
        known = (*(place.names if place else ()), *(self.shard.axes if self.shard else ()))
        if apart := [name for name in varying_axes(*jax.tree.leaves(x)) if name not in known]:
            keys = keys + mixed(jax.lax.axis_index(tuple(apart)).astype(jnp.uint32))
        return self._keys(keys, x.shape, place)

    def _keys(self, keys: Any, shape: tuple[int, ...], place: Place | None) -> ElementKeys:
        axes, keys = range(len(shape)), keys[0]
        counts = [place.shards(i) if place else 1 for i in axes]
        index = [place.index_of(i) if place and i in place.cut else None for i in axes]
        share, stack = told().share, self.stack
        if share is None or share.layer is None or stack is None or not stack.axis:
            keys = shares.in_stack(keys, math.prod((*shape, *counts)))
        elif shape[stack.axis : stack.axis + 1] == (stack.length,):  # a part along that axis
            counts[stack.axis], index[stack.axis] = stack.layers, jnp.asarray(share.layer)
        is_whole = all(i is None for i in index)
        part = None if is_whole and place is None else Part(tuple(counts), tuple(index))
        return ElementKeys(keys, np.zeros((), np.uint32), part)

    def _counts(self, place: Place) -> bool:
        """Whether the elements of a shard can be counted from its first one.

        The layers of a stack that are updated one by one are counted by themselves, so that nothing
        says where those of a device begin.
        """
        share, axis = told().share, self.stack.axis if self.stack else 0
        return share is None or share.layer is None or axis not in place.cut

    def mask_per_layer(self, mask: Sequence[bool]) -> bool | np.ndarray:
        """A bool per leaf as one for the array, or one for each layer where they differ."""
        return mask[self.positions[0]]

    def layers_of_leaves(self, layers: LayerAxes) -> list[LayerAxes]:
        """Where the layers of each leaf are; `layers` are those of the array."""
        return [layers]

    def per_leaf(self, numbers: jax.Array, layers: LayerAxes) -> list[jax.Array]:
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

    def layer_axes(
        self, per_leaf: Sequence[LayerAxes], mesh_axes: ArgLeaves, layer_axes: ArgLeaves
    ) -> LayerAxes:
        """Where the layers of the array are, from where those of each leaf of the tree are."""
        return per_leaf[self.positions[0]]


def _is_array(x: PyTree) -> bool:
    return trees.is_leaf(x) or trees.is_packed(x)


def specs(tree: PyTree) -> list[ArraySpec]:
    """One for each leaf of a tree in which nodes may say what their arrays are."""
    arrays: list[ArraySpec] = []
    count = 0
    stacks = told().stacks
    leaves: list[Any] = jax.tree.leaves(tree, is_leaf=_is_array)
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array) if stacks else []
    x: Any
    for x, (path, _) in itertools.zip_longest(leaves, paths, fillvalue=((), None)):
        own = x.__jgrad_arrays__(count) if trees.is_packed(x) else None
        arrays += [ArraySpec((count,), stacks.get(path))] if own is None else own
        count += 1 if own is None else x.num_leaves
    return arrays


def layer_axes_per_array(
    arrays: Sequence[ArraySpec], mesh_axes: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """Where the layers of each array are, from arguments with an entry per leaf of the tree."""
    per_leaf = axes_of.of_leaves(mesh_axes, layer_axes, reference)
    return [spec.layer_axes(per_leaf, mesh_axes, layer_axes) for spec in arrays]
