"""A tree of arrays as one buffer per dtype: a thousand leaves at the price of one.

`pack` and `unpack` are linear, so that gradients of a packed tree are packed, and written in
operations of JAX that have both modes of differentiation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad import checks, layouts, trees
from jgrad.checks import Row
from jgrad.layouts import BLOCK, Layout, Run
from jgrad.trees import PyTree


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A tree of arrays in buffers, one for each dtype.

    A node of JAX's trees, whose leaves are the buffers: everything that works leaf by leaf works on
    it. The layout is static.

    Attributes:
      buffers: arrays of shape (blocks, 256) by the names of dtypes.
      layout: where the leaves lie.
    """

    def __init__(self, buffers: Mapping[str, Any], layout: Layout) -> None:
        self.buffers = dict(buffers)
        self.layout = layout

    def tree_flatten_with_keys(self) -> tuple[Any, Layout]:
        key = jax.tree_util.GetAttrKey("buffers")
        return ((key, self.buffers),), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Any) -> "Packed":
        # Without a look at the buffers: JAX puts all kinds of things in their place.
        self = object.__new__(cls)
        (self.buffers,) = children
        self.layout = layout
        return self

    def __repr__(self) -> str:
        return f"Packed: {self.layout!r}"


def pack(
    tree: PyTree, *, layer_axes: PyTree = None, multiple_of: int = 1, like: PyTree = None
) -> PyTree:
    """A tree of floating arrays as one buffer per dtype.

        buffers[dtype] = [w_1, 0, ..., w_2, 0, ...], each layer filled up to blocks of 256

    Linear, and undone by `unpack` bit for bit.

    Args:
      tree: floating or complex arrays of any shapes, or None; with `like`, any tree that `unpack`
        made.
      layer_axes: axes of a leaf over which layers are stacked, as for `lax.scan`: an int, a tuple
        of ints, or None, or a prefix tree of those. Each layer has blocks of its own, so that
        LARS and LAMB need no `layer_axes` of theirs.
      multiple_of: the number of blocks of a buffer is a multiple of this, so that it can be cut
        over that many devices.
      like: a tree with `Packed`s in it, such as a state or its `jax.eval_shape`; packs what stands
        in their places, in their layouts, and leaves all else as it is.

    Returns:
      A `Packed`; with `like`, a tree like it.

    Raises:
      TypeError: a leaf that is no floating array.
      ValueError: structures or shapes that do not fit.
    """
    if like is None:
        layout, leaves = layouts.of("pack", tree, layer_axes, multiple_of)
        return _fill(layout, leaves)
    given, structure = jax.tree.flatten(like, is_leaf=_is_packed)
    whole = jax.tree.map(
        lambda x: _tree_of(x.layout) if _is_packed(x) else x, like, is_leaf=_is_packed
    )
    checks.same_structure("pack", "tree", tree, "like", whole)
    parts = structure.flatten_up_to(tree)
    packed = [
        _again(x.layout, part) if _is_packed(x) else part
        for x, part in zip(given, parts, strict=True)
    ]
    return structure.unflatten(packed)


def unpack(tree: PyTree) -> PyTree:
    """The tree of arrays that was packed, in the dtypes of the buffers.

    Args:
      tree: a `Packed`, or any tree in which there are some, such as the state of an optimizer:
        moments of packed parameters are packed as they are.

    Returns:
      The tree, with a tree of arrays for each `Packed`.

    Raises:
      ValueError: buffers of other shapes than the layout has, as under `jax.vmap` outside of it.
    """
    return jax.tree.map(lambda x: _empty(x) if _is_packed(x) else x, tree, is_leaf=_is_packed)


def _fill(layout: Layout, leaves: list[Any]) -> Packed:
    """The leaves in buffers, each layer behind the one before."""
    parts: dict[str, list[jax.Array]] = {name: [] for name, _ in layout.blocks}
    for run, x in zip(layout.runs, leaves, strict=True):
        if run is not None:
            parts[run.dtype.name].append(_padded(run, x))
    buffers = {}
    for name, blocks in layout.blocks:
        own = parts[name]
        rest = BLOCK * blocks - sum(x.size for x in own)
        own += [jnp.zeros((rest,), own[0].dtype)] if rest else []
        buffers[name] = jax.lax.concatenate(own, 0).reshape(blocks, BLOCK)
    return Packed(buffers, layout)


def _padded(run: Run, x: jax.Array) -> jax.Array:
    """The leaf as a vector, with zeros behind each layer."""
    place = run.place
    if place.stacked:
        x = jnp.moveaxis(x, place.stacked, range(len(place.stacked)))
    x = x.reshape(place.layers, -1) if x.size else x.reshape(place.layers, 0)
    return jnp.pad(x, ((0, 0), (0, BLOCK * run.per_layer - x.shape[1]))).reshape(-1)


def _empty(packed: Packed) -> PyTree:
    """The tree in the buffers, by one split of each."""
    leaves: dict[int, jax.Array] = {}
    for name, blocks in packed.layout.blocks:
        buffer = packed.buffers[name]
        if getattr(buffer, "shape", None) != (blocks, BLOCK):
            raise ValueError(
                f"unpack: `tree`: a buffer {checks.describe(buffer)}, expected an array of shape "
                f"{(blocks, BLOCK)}; map `unpack` over models as they were mapped over."
            )
        own = [
            (i, run) for i, run in enumerate(packed.layout.runs) if run and run.dtype.name == name
        ]
        sizes = [BLOCK * run.blocks for _, run in own]
        sizes.append(BLOCK * blocks - sum(sizes))
        *parts, _ = jax.lax.split(buffer.reshape(-1), sizes)
        for (i, run), part in zip(own, parts, strict=True):
            leaves[i] = _cut(run, part)
    return packed.layout.structure.unflatten(
        [leaves.get(i) for i in range(len(packed.layout.runs))]
    )


def _cut(run: Run, x: jax.Array) -> jax.Array:
    """The leaf from its blocks."""
    place = run.place
    size = math.prod(place.shape[axis] for axis in place.within)
    x = x.reshape(place.layers, BLOCK * run.per_layer)[:, :size]
    axes = (*place.stacked, *place.within)
    x = x.reshape([place.shape[axis] for axis in axes])
    return jnp.moveaxis(x, range(len(axes)), axes) if place.stacked else x


def _again(layout: Layout, tree: PyTree) -> Packed:
    """A tree of the structure and shapes of the layout, in buffers."""
    checks.same_structure("pack", "tree", tree, "like", _tree_of(layout))
    row = Row.of("pack", "tree", tree).with_arrays()
    reference = row._replace(name="like", leaves=trees.flatten(_tree_of(layout))[0])
    for i, (x, struct) in enumerate(zip(row.leaves, reference.leaves, strict=True)):
        if (x is None) != (struct is None):
            row.fail(i, TypeError, f"{checks.describe(x)}, expected {checks.describe(struct)}")
    checks.same_shapes(row, reference)
    return _fill(layout, list(row.leaves))


def _tree_of(layout: Layout) -> PyTree:
    """Shapes and dtypes of what was packed."""
    structs = [
        None if run is None else jax.ShapeDtypeStruct(run.place.shape, run.dtype)
        for run in layout.runs
    ]
    return layout.structure.unflatten(structs)


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


class Slot(NamedTuple):
    """Which leaves of the unpacked tree an array stands for.

    Attributes:
      positions: of the leaves among those of the unpacked tree.
      runs: where they lie, for a buffer; None for an array that is a leaf itself.
      rows: of the buffer.
    """

    positions: tuple[int, ...]
    runs: tuple[Run, ...] | None = None
    rows: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The rows of each layer of a buffer."""
        return tuple(run.per_layer for run in self.runs or () for _ in range(run.place.layers))

    def gather(self, entries: Sequence[Any]) -> Any:
        """An entry per leaf as one for the array: that of all, or a column of a number per row."""
        own = [entries[i] for i in self.positions]
        if self.runs is None or all(x is own[0] for x in own[1:]):
            return own[0] if own else 0.0
        if all(checks.is_number(x) for x in own) and len(set(own)) == 1:
            return own[0]
        arrays = [jnp.asarray(x, dtype=float) for x in own]
        if all(x.size == 1 for x in arrays):
            column = jnp.stack([x.reshape(()) for x in arrays])
            leaf = np.repeat(np.arange(len(own)), [run.blocks for run in self.runs])
            leaf = np.pad(leaf, (0, self.rows - len(leaf)), mode="edge")
            return column[leaf][:, None]
        parts = [
            _padded(run, jnp.broadcast_to(x, run.place.shape))
            for run, x in zip(self.runs, arrays, strict=True)
        ]
        whole = jnp.concatenate(parts)
        return jnp.pad(whole, (0, BLOCK * self.rows - whole.size)).reshape(self.rows, BLOCK)

    def per_layer(self, entries: Sequence[bool]) -> bool | np.ndarray:
        """A bool per leaf as one for the array, or one for each layer where they differ."""
        own = [entries[i] for i in self.positions]
        if self.runs is None or len(set(own)) <= 1:
            return own[0] if own else True
        pairs = zip(self.runs, own, strict=True)
        return np.array([x for run, x in pairs for _ in range(run.place.layers)])


def slots(tree: PyTree) -> list[Slot]:
    """One for each leaf of a tree in which there may be `Packed`s."""
    found, count = [], 0
    for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None or _is_packed(x)):
        if not _is_packed(x):
            found.append(Slot((count,)))
            count += 1
            continue
        for name, rows in x.layout.blocks:
            own = [
                (i, run) for i, run in enumerate(x.layout.runs) if run and run.dtype.name == name
            ]
            positions, runs = zip(*own, strict=True)
            found.append(Slot(tuple(count + i for i in positions), runs, rows))
        count += len(x.layout.runs)
    return found


def shapes(tree: PyTree) -> PyTree:
    """The unpacked tree, with shapes and dtypes for what is packed."""
    return jax.tree.map(
        lambda x: _tree_of(x.layout) if _is_packed(x) else x,
        tree,
        is_leaf=lambda x: x is None or _is_packed(x),
    )
