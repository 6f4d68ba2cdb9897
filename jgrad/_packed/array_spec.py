"""What the arrays of a `Packed` stand for: buffers of leaves with options of their own."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._layers.array_spec import ArraySpec
from jgrad._layers.layer_axes import LayerAxes
from jgrad._packed.buffers import join_leaves
from jgrad._packed.layouts import WIDTH, Layout, Span
from jgrad._packed.packed_layers import PackedLayers
from jgrad._trees import checks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.places import axes_cut, shard_index
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement


class UnpackedSpec(ArraySpec):
    """A leaf that a `Packed` holds as it is."""

    is_buffer = True

    def layer_axes(
        self, per_leaf: Sequence[LayerAxes], mesh_axes: ArgLeaves, layer_axes: ArgLeaves
    ) -> LayerAxes:
        names = [layers.mesh_axes for layers in per_leaf]
        for i, span in zip(self.positions, self.spans, strict=True):
            names[i] = mesh_axes.leaves[i].within(span.layers.stacked)
            if per_leaf[i].stacked not in ((), span.layers.stacked):
                packed = f"the axes with which it was packed, {span.layers.stacked or None}"
                layer_axes.fail(i, ValueError, f"{per_leaf[i].stacked}, expected {packed}")
        return dataclasses.replace(self.spans[0].layers, mesh_axes=self.mesh_axes(names, mesh_axes))

    def mesh_axes(self, per_leaf: Sequence[tuple[str, ...]], arg: ArgLeaves) -> tuple[str, ...]:
        first = per_leaf[self.positions[0]]
        for i in self.positions:
            if per_leaf[i] != first:
                expected = f"{first}, as for the other leaves in its buffer"
                arg.fail(i, ValueError, f"{per_leaf[i]}, expected {expected}")
        return first


class BufferSpec(UnpackedSpec):
    """A buffer of leaves; each entry of `spans` says where one is."""

    is_unpacked = False
    has_rows = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.shard is None:
            return self.shape
        return (self.shard.num_rows(self.shape[0]), *self.shape[1:])

    def per_array(self, entries: Sequence[PyTree]) -> PyTree:
        """One entry per leaf of the tree as one for the array.

        The entry itself where all leaves share it, else a column with a number per row, of shape
        (rows, 1), or an array of the shape of the buffer.
        """
        values = [entries[i] for i in self.positions]
        first, is_shared = values[0], all(x is values[0] for x in values)
        if any(x is None for x in values):
            return None
        if all(checks.is_number(x) for x in values) and len(set(values)) == 1:
            return first
        if is_shared and jnp.size(first) == 1:
            return jnp.asarray(first, dtype=float).reshape(())
        per_row = self._per_row(values)
        return per_row if self.shard is None else self.shard.slice(per_row)

    def _per_row(self, values: Sequence[Leaf]) -> jax.Array:
        """Values that differ, of the leaves in the buffer, as a column or an array of its shape."""
        if all(jnp.size(x) == 1 for x in values):
            column = jnp.stack([jnp.asarray(x, dtype=float).reshape(()) for x in values])
            return column[self._leaf_of_row][:, None]
        elements = [
            jnp.broadcast_to(jnp.asarray(x, dtype=float), span.layers.shape)
            for span, x in zip(self.spans, values, strict=True)
        ]
        return join_leaves(self.spans, elements, self.shape[0])

    def row_keys(self, keys: np.ndarray, place: Placement | None) -> tuple[np.ndarray, np.ndarray]:
        """For each row the key of its leaf, and the number of its first element there."""
        first = np.zeros(self.shape[0], np.uint32)
        for span in self.spans:
            first[span.first : span.first + span.num_rows] = _first_elements(span)
        if place is not None:
            sizes = np.array([span.size for span in self.spans], np.uint32)[self._leaf_of_row]
            first = first + shard_index(place, 0).astype(jnp.uint32) * sizes
        keys = keys[self._leaf_of_row]
        if self.shard is not None:
            keys, first = map(self.shard.slice, (keys, first))
        return keys, first

    def counts(self, place: Placement) -> bool:
        """The elements of each leaf have to follow each other."""
        in_order = all(span.layers.stacked[:1] in ((), (0,)) for span in self.spans)
        return axes_cut(place) == [0] and in_order

    def mask_per_layer(self, mask: Sequence[bool]) -> bool | np.ndarray:
        values = [mask[i] for i in self.positions]
        if len(set(values)) == 1:
            return values[0]
        return np.repeat(values, [span.layers.num_layers for span in self.spans])

    def layers_of_leaves(self, layers: LayerAxes) -> list[LayerAxes]:
        return [span.layers for span in self.spans]

    def layer_axes(
        self, per_leaf: Sequence[LayerAxes], mesh_axes: ArgLeaves, layer_axes: ArgLeaves
    ) -> LayerAxes:
        rows = ([span.rows_per_layer] * span.layers.num_layers for span in self.spans)
        return PackedLayers(
            self.local_shape,
            mesh_axes=super().layer_axes(per_leaf, mesh_axes, layer_axes).mesh_axes,
            rows=tuple(itertools.chain(*rows)),
            shard=self.shard,
        )

    def mesh_axes(self, per_leaf: Sequence[tuple[str, ...]], arg: ArgLeaves) -> tuple[str, ...]:
        names = super().mesh_axes(per_leaf, arg)
        return names if self.shard is None else tuple(sorted({*names, *self.shard.axes}))

    @property
    def _leaf_of_row(self) -> np.ndarray:
        """The leaf of each row, counted in the buffer; rows of none have that before them."""
        leaves = np.zeros(self.shape[0], np.int32)
        for i, span in enumerate(self.spans):
            leaves[span.first :] = i
        return leaves


def _first_elements(span: Span) -> np.ndarray:
    """The number of the first element in each row of a leaf."""
    layers = np.arange(span.layers.num_layers)[:, None] * span.layers.layer_size
    return (layers + np.arange(span.rows_per_layer) * WIDTH).reshape(-1).astype(np.uint32)


def specs_of_layout(layout: Layout, count: int) -> list[ArraySpec]:
    """One for each array of a packed tree, whose first leaf has this position."""
    arrays: list[ArraySpec] = []
    for name, shape in layout.shapes:
        positions, spans = zip(*layout.within(name), strict=True)
        kind = UnpackedSpec if spans[0].is_unpacked else BufferSpec
        positions = tuple(count + i for i in positions)
        arrays.append(kind(positions, spans=spans, shape=shape, shard=layout.shard))
    return arrays
