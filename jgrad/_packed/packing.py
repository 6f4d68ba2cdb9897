"""A tree of arrays as one buffer per dtype: a thousand leaves at the price of one.

`pack` and `unpack` are linear, so that gradients of a packed tree are packed, and written in
operations of JAX that have both modes of differentiation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._packed import blocks, layouts
from jgrad._packed import splitting as cutting
from jgrad._packed.blocks import BLOCK
from jgrad._packed.layouts import Layout
from jgrad._trees import checks, values
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A tree of arrays in buffers, one for each dtype.

    A node of JAX's trees, whose leaves are the buffers: everything that works leaf by leaf works on
    it. The layout is static.

    Attributes:
      buffers: arrays of shape (blocks, 256) by the names of dtypes; leaves that stay as they are,
        by names such as "leaf 3", of the fourth.
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

    def __contains__(self, name: object) -> bool:
        """Whether there is a buffer of this name; flax's `TrainState` asks trees for names."""
        return name in self.buffers

    def __repr__(self) -> str:
        return f"Packed: {self.layout!r}"


def pack(
    tree: PyTree,
    *,
    layer_axes: PyTree = None,
    multiple_of: int = 1,
    max_size: int | None = None,
    like: PyTree = None,
) -> PyTree:
    """A tree of floating arrays as one buffer per dtype.

        buffers[dtype] = [w_1, 0, ..., w_2, 0, ...], each layer filled up to blocks of 256

    Linear, and undone by `unpack` bit for bit. Leaves of one shape lie side by side.

    Transformations of this library work on packed trees as on others, with options given for the
    unpacked tree. Others have to work element by element, and to make 0 of 0, since padding has to
    stay zero: no noise. Masks and labels of optax, given for the tree, belong around `pack_small`.

    Args:
      tree: floating or complex arrays of any shapes, or None; with `like`, any tree that `unpack`
        made.
      layer_axes: axes of a leaf over which layers are stacked, as for `lax.scan`: an int, a tuple
        of ints, or None, or a prefix tree of those. Each layer has blocks of its own, so that
        LARS and LAMB need no `layer_axes` of theirs; given, they have to agree.
      multiple_of: the number of blocks of a buffer is a multiple of this, so that it can be cut
        over that many devices.
      max_size: leaves with more elements stay as they are, each a buffer of its shape; None for
        no such leaves. Large leaves gain nothing by being packed, and `unpack` copies what is
        packed: where they are most of the model, give some thousands.
      like: a tree with `Packed`s in it, such as parameters and state, or `jax.eval_shape` of the
        function that makes them; packs what stands in their places, in their layouts, and leaves
        all else as it is.

    Returns:
      A `Packed`; with `like`, a tree like it.

    Raises:
      TypeError: a leaf that is no floating array.
      ValueError: structures or shapes that do not fit, or options beside `like`.
    """
    if like is None:
        values.count("pack", "multiple_of", multiple_of)
        if max_size is not None:
            values.count("pack", "max_size", max_size, low=0)
        layout, leaves = layouts.of("pack", tree, layer_axes, multiple_of, max_size)
        return fill(layout, leaves)
    if layer_axes is not None or multiple_of != 1 or max_size is not None:
        raise ValueError("pack: `like`: it has a layout already, expected no other option with it.")
    structure: Any
    given, structure = jax.tree.flatten(like, is_leaf=is_packed)
    checks.same_structure("pack", "tree", tree, "like", shapes(like))
    parts = structure.flatten_up_to(tree)
    packed = [
        _again(x, part) if is_packed(x) else part for x, part in zip(given, parts, strict=True)
    ]
    return structure.unflatten(packed)


def unpack(tree: PyTree) -> PyTree:
    """The tree of arrays that was packed, in the dtypes of the buffers.

        unpack(pack(tree)) = tree

    The gradient of a function of `unpack(packed)` is a `Packed`, and forward mode works.

    Args:
      tree: a `Packed`, or any tree in which there are some, such as the state of an optimizer:
        moments of packed parameters are packed as they are.

    Returns:
      The tree, with a tree of arrays for each `Packed`.

    Raises:
      ValueError: buffers of other shapes than the layout has, as under `jax.vmap` outside of it.
    """
    return jax.tree.map(lambda x: _leaves(x) if is_packed(x) else x, tree, is_leaf=is_packed)


def shapes(tree: PyTree) -> PyTree:
    """The unpacked tree, with shapes and dtypes for what is packed."""

    def whole(x: Any) -> Any:
        if not is_packed(x):
            return x
        buffers = x.buffers.items()
        return x.layout.tree({name: b.dtype for name, b in buffers if hasattr(b, "dtype")})

    return jax.tree.map(whole, tree, is_leaf=lambda x: x is None or is_packed(x))


def with_layouts(tree: PyTree, layout_of: Callable[[Layout], Layout]) -> PyTree:
    """The same buffers, said to be another tree, or other parts of it."""
    return jax.tree.map(
        lambda x: Packed(x.buffers, layout_of(x.layout)) if is_packed(x) else x,
        tree,
        is_leaf=is_packed,
    )


def is_packed(x: Any) -> bool:
    """Whether it is a `Packed`."""
    return isinstance(x, Packed)


def fill(layout: Layout, leaves: Sequence[Any]) -> Packed:
    """The leaves in buffers, each layer behind the one before."""
    buffers: dict[str, jax.Array] = {}
    for name, shape in layout.shapes:
        own = layout.within(name)
        (i, run), *_ = own
        if run.is_whole or _is_stand_in(leaves[i], run.place.shape):
            buffers[name] = leaves[i]
            continue
        parts = [blocks.padded(run, leaves[i]) for i, run in own]
        rest = math.prod(shape) - sum(x.size for x in parts)
        parts += [jnp.zeros((rest,), parts[0].dtype)] if rest else []
        buffers[name] = jax.lax.concatenate(parts, 0).reshape(shape)
    return Packed(buffers, layout)


def _leaves(packed: Packed) -> PyTree:
    """The tree in the buffers, by one cut of each."""
    leaves: list[Any] = [None] * len(packed.layout.runs)
    for name, shape in packed.layout.shapes:
        buffer, own = packed.buffers[name], packed.layout.within(name)
        if own[0][1].is_whole:
            leaves[own[0][0]] = buffer
            continue
        if _is_stand_in(buffer, shape):
            for i, _ in own:
                leaves[i] = jnp.copy(buffer)  # each its own, for donation
            continue
        if not (checks.is_array(buffer) and buffer.shape == shape):
            raise ValueError(
                f"unpack: `tree`: {checks.describe(buffer)} as the buffer {name!r}, expected an "
                f"array of shape {shape}; map `unpack` over models as they were mapped over, and "
                "for shapes alone call `jax.eval_shape(unpack, tree)`."
            )
        sizes = [BLOCK * run.blocks for _, run in own]
        rest = math.prod(shape) - sum(sizes)
        parts = cutting.pieces(buffer.reshape(-1), (*sizes, *([rest] if rest else [])))
        for (i, run), part in zip(own, parts[: len(own)], strict=True):
            leaves[i] = blocks.leaf(run, part)
    return packed.layout.structure.unflatten(leaves)


def _is_stand_in(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether `x` says that there is no array: `state.empty`, for leaves with no state."""
    return getattr(x, "shape", None) == (0,) != shape


def _again(like: Packed, tree: PyTree) -> Packed:
    """A tree of the structure and shapes of a layout, in buffers; of one dtype in each."""
    layout = like.layout
    row = Row.of("pack", "tree", tree).with_arrays()
    expected: list[Any] = [None] * len(row.leaves)
    for name, shape in layout.shapes:
        own, buffer = layout.within(name), like.buffers[name]
        (first, run), *_ = own
        if run.is_whole:
            _check_whole(row, first, buffer)
            expected[first] = buffer
            continue
        dtype = getattr(row.leaves[first], "dtype", None)
        for i, run in own:
            x = row.leaves[i]
            if not checks.is_floating(x):
                row.fail(i, TypeError, f"{checks.describe(x)}, expected a floating array")
            if x.dtype != dtype:
                row.fail(i, TypeError, f"{checks.describe(x)}, expected {dtype} as beside it")
            stands_in = _is_stand_in(buffer, shape)
            expected[i] = jax.ShapeDtypeStruct((0,) if stands_in else run.place.shape, dtype)
    for i, x in enumerate(row.leaves):
        if layout.runs[i] is None and x is not None:
            row.fail(i, TypeError, f"{checks.describe(x)}, expected None")
    checks.same_shapes(row, row._replace(name="like", leaves=expected))
    return fill(layout, list(row.leaves))


def _check_whole(row: Row, i: int, buffer: Any) -> None:
    """A leaf that stays as it is: an array where there is one, of its kind."""
    x = row.leaves[i]
    floating = jnp.issubdtype(getattr(buffer, "dtype", np.int32), jnp.inexact)
    if (x is None) != (buffer is None) or not (
        x is None or (checks.is_numeric(x) and checks.is_floating(x) == floating)
    ):
        row.fail(i, TypeError, f"{checks.describe(x)}, expected {checks.describe(buffer)}")
