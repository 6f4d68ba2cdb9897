"""What an array stands for: options are given leaf by leaf, and an array may be a packed buffer."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._layers import layer_axes as places
from jgrad._layers.layer_axes import Place
from jgrad._packed import blocks, packing
from jgrad._packed.blocks import BLOCK, Run
from jgrad._packed.rows import Rows, Share
from jgrad._trees import checks, trees
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree


class Slot(NamedTuple):
    """Which leaves of the unpacked tree an array stands for.

    Attributes:
      positions: of the leaves among those of the unpacked tree.
      runs: where they lie in the array; none for an array that is no buffer.
      shape: of the buffer, whole.
      share: a device's rows of it, where it is cut.
    """

    positions: tuple[int, ...]
    runs: tuple[Run, ...] = ()
    shape: tuple[int, ...] = ()
    share: Share | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the array is a leaf itself."""
        return not self.runs or self.runs[0].is_whole

    @property
    def shape_here(self) -> tuple[int, ...]:
        """The shape of what is here of the buffer."""
        if self.share is None or self.is_whole:
            return self.shape
        return (self.share.rows(self.shape[0]), *self.shape[1:])

    def gather(self, entries: Sequence[Any]) -> Any:
        """An entry per leaf as one for the array: that of all, or a column of a number per row."""
        found = self._gather(entries)
        return found if self.share is None or np.ndim(found) == 0 else self.share.of(found)

    def _gather(self, entries: Sequence[Any]) -> Any:
        own = [entries[i] for i in self.positions]
        if self.is_whole:
            return own[0]
        if any(x is None for x in own):
            return None
        if all(checks.is_number(x) for x in own) and len(set(own)) == 1:
            return own[0]
        if all(jnp.size(x) == 1 for x in own):
            shared = all(x is own[0] for x in own)
            numbers = [
                jnp.asarray(x, dtype=float).reshape(()) for x in own[: 1 if shared else None]
            ]
            if shared:
                return numbers[0]
            leaf = np.repeat(np.arange(len(own)), [run.blocks for run in self.runs])
            rows = np.pad(leaf, (0, self.shape[0] - len(leaf)), mode="edge")
            return jnp.stack(numbers)[rows][:, None]
        pairs = zip(self.runs, own, strict=True)
        parts = [
            blocks.padded(run, jnp.broadcast_to(jnp.asarray(x, dtype=float), run.place.shape))
            for run, x in pairs
        ]
        whole = jnp.concatenate(parts)
        rest = self.shape[0] * BLOCK - whole.size
        return jnp.pad(whole, (0, rest)).reshape(self.shape)

    def per_layer(self, entries: Sequence[bool]) -> bool | np.ndarray:
        """A bool per leaf as one for the array, or one for each layer where they differ."""
        own = [entries[i] for i in self.positions]
        if self.is_whole or len(set(own)) == 1:
            return own[0]
        pairs = zip(self.runs, own, strict=True)
        return np.array([x for run, x in pairs for _ in range(run.place.layers)])


def of(tree: PyTree) -> list[Slot]:
    """One for each leaf of a tree in which there may be `Packed`s."""
    found, count = [], 0
    for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None or packing.is_packed(x)):
        if not packing.is_packed(x):
            found.append(Slot((count,)))
            count += 1
            continue
        for name, shape in x.layout.shapes:
            positions, runs = zip(*x.layout.within(name), strict=True)
            found.append(Slot(tuple(count + i for i in positions), runs, shape, x.layout.share))
        count += len(x.layout.runs)
    return found


def any_packed(*given: PyTree) -> bool:
    """Whether there is a `Packed` somewhere."""
    leaves = jax.tree.leaves(given, is_leaf=packing.is_packed)
    return any(map(packing.is_packed, leaves))


def in_arrays(
    slots: Sequence[Slot], norm_axes: Row, layer_axes: Row, reference: Row
) -> list[Place]:
    """The place of each array, from rows with an entry per leaf of the unpacked tree."""
    each = places.in_rows(norm_axes, layer_axes, reference)
    return [_place(slot, each, norm_axes, layer_axes) for slot in slots]


def in_trees(function: str, axes: places.Static, w: PyTree, dcdw: PyTree) -> PyTree:
    """The place of each array of a functional update, as a tree."""
    aligned = checks.common_structure(function, w=w, dcdw=dcdw)
    finest = (w, dcdw)[aligned.finest]
    whole = packing.shapes(finest)
    leaves = trees.flatten(whole)[0] if any_packed(finest) else aligned.rows[0]
    reference = Row(function, "w", leaves, lambda: trees.paths(whole))

    def row(name: str, axes: tuple[Any, tuple[places.Axes, ...]]) -> Row:
        structure, own = axes
        return Row.spread(function, name, structure.unflatten(own), "w", whole)

    rows = row("norm_axes", axes[0]), row("layer_axes", axes[1])
    return aligned.structure.unflatten(in_arrays(of(finest), *rows, reference))


def _place(slot: Slot, each: Sequence[Place], norm_axes: Row, layer_axes: Row) -> Place:
    first = each[slot.positions[0]]
    if not slot.runs:
        return first
    for i, run in zip(slot.positions, slot.runs, strict=True):
        if each[i].stacked not in ((), run.place.stacked):
            packed = f"the axes with which it was packed, {run.place.stacked or None}"
            layer_axes.fail(i, ValueError, f"{each[i].stacked}, expected {packed}")
        if each[i].cut != first.cut:
            expected = f"{first.cut}, as for the other leaves in its buffer"
            norm_axes.fail(i, ValueError, f"{each[i].cut}, expected {expected}")
    if slot.is_whole:
        return dataclasses.replace(slot.runs[0].place, cut=first.cut)
    layers = tuple(run.per_layer for run in slot.runs for _ in range(run.place.layers))
    cut = first.cut if slot.share is None else tuple(sorted({*first.cut, *slot.share.axes}))
    return Rows(slot.shape_here, cut=cut, blocks=layers, share=slot.share)


def gathered(
    function: str, name: str, tree: PyTree, reference_name: str, reference: PyTree
) -> PyTree:
    """An option for the leaves of a packed reference as one for its arrays; else as it is."""
    if not any_packed(reference):
        return tree
    whole = packing.shapes(reference)
    row = Row.spread(function, name, tree, reference_name, whole)
    slots = of(reference)
    for slot in slots:
        for i in slot.positions if slot.runs else ():
            if row.leaves[i] is None:
                row.fail(i, TypeError, "None, expected an array or a number")
    checks.broadcastable(row, Row.of(function, reference_name, whole).with_arrays())
    _, structure = trees.flatten(reference)
    return structure.unflatten([slot.gather(row.leaves) for slot in slots])
