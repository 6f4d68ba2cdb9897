"""Small leaves packed inside a transformation, for training loops that stay as they are."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jgrad import checks, layouts, packing, values
from jgrad.layouts import Layout
from jgrad.transforms import wrapping
from jgrad.transforms.leaves import Leaves
from jgrad.trees import PyTree

_NAME = "pack_small"


def pack_small(
    tx: optax.GradientTransformation, *, max_size: int = 2048
) -> optax.GradientTransformationExtraArgs:
    """A transformation that sees small leaves as one, tree in and tree out.

        updates = unpack(tx(pack(g), state, pack(w))),   packing leaves of up to max_size elements

    The same numbers as with `tx` alone; see `pack`. Training on packed parameters gains more, since
    nothing is packed and unpacked at each step. In the step in which a small leaf has the gradient
    None, `tx` works on the tree.

    Args:
      tx: any transformation of this library, whose options are given for the tree, or any other
        that works element by element.
      max_size: elements of the largest leaf that is packed; larger ones gain nothing.

    Returns:
      A transformation whose state is that of `tx` for packed parameters. `unpack` makes of it the
      state of `tx` alone.

    Raises:
      ValueError: `max_size` below 0.
      TypeError: `tx` is no transformation, or `max_size` no int.
    """
    tx = wrapping.inner(_NAME, tx)
    values.count(_NAME, "max_size", max_size, low=0)

    def layout_of(tree: PyTree) -> tuple[Layout, list[Any]]:
        return layouts.of(_NAME, tree, max_size=max_size, others=True)

    def init(params: PyTree) -> Any:
        return tx.init(packing.fill(*layout_of(params)))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        leaves = Leaves(_NAME, updates, params)
        layout = _of_state(leaves, state, layout_of(leaves.tree)[0])
        g = leaves.row("updates", updates).with_arrays().leaves
        if not _fit(layout, g):
            steps, new = tx.update(updates, packing.unpack(state), params, **extra_args)
            return steps, packing.pack(new, like=state)
        w = None if params is None else packing.fill(layout, leaves.reference.leaves)
        steps, state = tx.update(packing.fill(layout, g), state, w, **extra_args)
        return packing.unpack(steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def _of_state(leaves: Leaves, state: Any, expected: Layout) -> Layout:
    """The layout in which the state is, which fits the parameters; the expected one in no state."""
    packed = [x for x in jax.tree.leaves(state, is_leaf=packing.is_packed) if packing.is_packed(x)]
    if not packed:
        return expected
    layout: Layout = packed[0].layout
    if leaves.w is not None and layout != expected:
        phrase = next(expected.differences(layout, "`params`", "it"))
        raise ValueError(f"{_NAME}: `state` was not made for these parameters: {phrase}.")
    shapes = layout.tree()
    checks.same_structure(_NAME, leaves.reference.name, leaves.tree, "state", shapes)
    checks.same_shapes(leaves.reference, checks.Row.of(_NAME, "state", shapes))
    return layout


def _fit(layout: Layout, g: Sequence[Any]) -> bool:
    """Whether the gradients of each buffer are there, and of one dtype."""
    for name, _ in layout.shapes:
        own = layout.within(name)
        if own[0][1].start is not None:
            dtypes = {None if g[i] is None else g[i].dtype for i, _ in own}
            if len(dtypes) > 1 or None in dtypes:
                return False
    return True
