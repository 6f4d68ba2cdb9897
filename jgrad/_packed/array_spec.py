"""What an array stands for: a leaf, or a packed buffer of leaves with options of their own.

The folders above ask an `ArraySpec` instead of asking whether an array is packed.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._kernels.leaf_step import Place
from jgrad._layers import layer_axes as axes_of
from jgrad._layers.layer_axes import LayerAxes
from jgrad._packed.buffers import join_leaves
from jgrad._packed.layouts import WIDTH, Shard, Span
from jgrad._packed.packed_layers import PackedLayers
from jgrad._packed.packing import Packed
from jgrad._quantized.random_bits import ElementKeys, Part, leaf_keys, mixed
from jgrad._trees import checks, shares, trees
from jgrad._trees.annotations import Count
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import Blocks
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import varying_axes
from jgrad._trees.told import Stack, told


class ArraySpec(NamedTuple):
    """Which leaves of the unpacked tree an array stands for.

    Attributes:
      positions: of the leaves among those of the unpacked tree.
      spans: their blocks; none for an array outside of every `Packed`.
      shape: of the whole buffer.
      shard: the rows that this device has; None for all of them.
      stack: where `step_in_backward` has its layers, if it has some.
    """

    positions: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    shape: tuple[int, ...] = ()
    shard: Shard | None = None
    stack: Stack | None = None

    @property
    def is_buffer(self) -> bool:
        """Whether the array is in a `Packed`, be it as an unpacked leaf."""
        return bool(self.spans)

    @property
    def is_unpacked(self) -> bool:
        """Whether the array is a leaf itself."""
        return not self.spans or self.spans[0].is_unpacked

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this device has of the buffer."""
        if self.shard is None or self.is_unpacked:
            return self.shape
        return (self.shard.num_rows(self.shape[0]), *self.shape[1:])

    def per_array(self, entries: Sequence[Any]) -> Any:
        """One entry per leaf of the tree as one for the array.

        The entry itself where all leaves of the array share it, else a column with a number per
        row, of shape (rows, 1), or an array of the shape of the buffer.
        """
        values = [entries[i] for i in self.positions]
        first, is_shared = values[0], all(x is values[0] for x in values)
        if self.is_unpacked:
            return first
        if any(x is None for x in values):
            return None
        if all(checks.is_number(x) for x in values) and len(set(values)) == 1:
            return first
        if is_shared and jnp.size(first) == 1:
            return jnp.asarray(first, dtype=float).reshape(())
        per_row = self._per_row(values)
        return per_row if self.shard is None else self.shard.slice(per_row)

    def _per_row(self, values: Sequence[Any]) -> jax.Array:
        """Values that differ, of the leaves in the buffer, as a column or an array of its shape."""
        if all(jnp.size(x) == 1 for x in values):
            column = jnp.stack([jnp.asarray(x, dtype=float).reshape(()) for x in values])
            return column[self._leaf_of_row][:, None]
        elements = [
            jnp.broadcast_to(jnp.asarray(x, dtype=float), span.layers.shape)
            for span, x in zip(self.spans, values, strict=True)
        ]
        return join_leaves(self.spans, elements, self.shape[0])

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
        if self.is_unpacked:
            return self._keys_of_leaf(keys[0], x.shape, place)
        first: Any = np.zeros(self.shape[0], np.uint32)
        for span in self.spans:
            first[span.first : span.first + span.num_blocks] = _first_elements(span)
        if place is not None:
            sizes = np.array([span.size for span in self.spans], np.uint32)[self._leaf_of_row]
            first = first + place.index_of(0).astype(jnp.uint32) * sizes
        keys = keys[self._leaf_of_row]
        if self.shard is not None:
            keys, first = map(self.shard.slice, (keys, first))
        return ElementKeys(keys, first)

    def _keys_of_leaf(self, keys: Any, shape: tuple[int, ...], place: Place | None) -> ElementKeys:
        axes = range(len(shape))
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

        Of a packed leaf these have to follow each other. The layers of a stack that are updated one
        by one are counted by themselves, so that nothing says where those of a device begin.
        """
        if self.is_unpacked:
            share, axis = told().share, self.stack.axis if self.stack else 0
            return share is None or share.layer is None or axis not in place.cut
        in_order = all(span.layers.stacked[:1] in ((), (0,)) for span in self.spans)
        return place.cut == [0] and in_order

    def mask_per_layer(self, mask: Sequence[bool]) -> bool | np.ndarray:
        """A bool per leaf as one for the array, or one for each layer where they differ."""
        if self.is_unpacked:
            return mask[self.positions[0]]
        values = [mask[i] for i in self.positions]
        if len(set(values)) == 1:
            return values[0]
        return np.repeat(values, [span.layers.num_layers for span in self.spans])

    def layers_of_leaves(self, layers: LayerAxes) -> list[LayerAxes]:
        """Where the layers of each leaf are; `layers` are those of the array."""
        return [layers] if self.is_unpacked else [span.layers for span in self.spans]

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
        first = per_leaf[self.positions[0]]
        if not self.spans:
            return first
        for i, span in zip(self.positions, self.spans, strict=True):
            if per_leaf[i].stacked not in ((), span.layers.stacked):
                packed = f"the axes with which it was packed, {span.layers.stacked or None}"
                layer_axes.fail(i, ValueError, f"{per_leaf[i].stacked}, expected {packed}")
            if per_leaf[i].mesh_axes != first.mesh_axes:
                expected = f"{first.mesh_axes}, as for the other leaves in its buffer"
                mesh_axes.fail(i, ValueError, f"{per_leaf[i].mesh_axes}, expected {expected}")
        if self.is_unpacked:
            return dataclasses.replace(self.spans[0].layers, mesh_axes=first.mesh_axes)
        sharded_over = first.mesh_axes
        if self.shard is not None:
            sharded_over = tuple(sorted({*sharded_over, *self.shard.axes}))
        return PackedLayers(
            self.local_shape,
            mesh_axes=sharded_over,
            blocks=tuple(span.blocks_per_layer for span in self.spans for _ in span.first_rows),
            shard=self.shard,
        )

    @property
    def _leaf_of_row(self) -> np.ndarray:
        """The leaf of each row, counted in the buffer; rows of none have that before them."""
        leaves = np.zeros(self.shape[0], np.int32)
        for i, span in enumerate(self.spans):
            leaves[span.first :] = i
        return leaves


def _first_elements(span: Span) -> np.ndarray:
    """The number of the first element in each block of a leaf."""
    layers = np.arange(span.layers.num_layers)[:, None] * span.layers.layer_size
    return (layers + np.arange(span.blocks_per_layer) * WIDTH).reshape(-1).astype(np.uint32)


def _is_array(x: PyTree) -> bool:
    return trees.is_leaf(x) or isinstance(x, Packed)


def specs(tree: PyTree) -> list[ArraySpec]:
    """One for each leaf of a tree in which there may be `Packed` nodes."""
    arrays: list[ArraySpec] = []
    count = 0
    stacks = told().stacks
    leaves = jax.tree.leaves(tree, is_leaf=_is_array)
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array) if stacks else []
    for x, (path, _) in itertools.zip_longest(leaves, paths, fillvalue=((), None)):
        if not isinstance(x, Packed):
            arrays.append(ArraySpec((count,), stack=stacks.get(path)))
            count += 1
            continue
        layout = x.layout
        for name, shape in layout.shapes:
            positions, spans = zip(*layout.within(name), strict=True)
            positions = tuple(count + i for i in positions)
            arrays.append(ArraySpec(positions, spans, shape, layout.shard))
        count += len(layout.spans)
    return arrays


def layer_axes_per_array(
    arrays: Sequence[ArraySpec], mesh_axes: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """Where the layers of each array are, from arguments with an entry per leaf of the tree."""
    per_leaf = axes_of.of_leaves(mesh_axes, layer_axes, reference)
    return [spec.layer_axes(per_leaf, mesh_axes, layer_axes) for spec in arrays]
