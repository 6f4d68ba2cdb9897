"""Small leaves packed inside a transformation, for training loops that stay as they are."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jgrad._inputs.update import Leaves
from jgrad._packed import arrays as slots
from jgrad._packed import layouts, packing
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed
from jgrad._trees import checks, values
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping

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
        that works element by element and makes 0 of 0. Masks and labels of optax see the tree only
        from outside: `optax.masked(pack_small(tx), mask)`.
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

    def check_tree(name: str, tree: PyTree) -> None:
        if slots.any_packed(tree):
            raise TypeError(f"{_NAME}: `{name}`: packed already, expected a tree of arrays.")

    def init(params: PyTree) -> Any:
        check_tree("params", params)
        checks.parameters(checks.Row.of(_NAME, "params", params).with_arrays())
        return tx.init(packing.fill(*layout_of(params)))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        check_tree("updates", updates)
        leaves = Leaves(_NAME, updates, params)
        (layout, own), old = layout_of(leaves.tree), _layout(state)
        if old is None:
            _check_stateless(tx, packing.fill(layout, own))
        elif leaves.w is None:
            checks.same_shapes(leaves.reference, checks.Row.of(_NAME, "state", old.tree()))
            layout = old
        elif not layout.is_like(old):
            phrase = next(layout.differences(old, "`params`", "it"))
            raise ValueError(
                f"{_NAME}: `state` was made for other parameters, or with another `max_size`: "
                f"{phrase}."
            )
        # The tree may be another with the same leaves: flax's nnx wraps them for `init` alone.
        state = packing.with_layouts(state, lambda _: layout)
        g = leaves.row("updates", updates).with_arrays().leaves
        if _fit(layout, g):
            w = None if params is None else packing.fill(layout, leaves.reference.leaves)
            steps, new = tx.update(packing.fill(layout, g), state, w, **extra_args)
            steps = packing.unpack(steps)
        else:
            steps, new = tx.update(updates, packing.unpack(state), params, **extra_args)
            new = packing.pack(new, like=state)
        return steps, new if old is None else packing.with_layouts(new, lambda _: old)

    return optax.GradientTransformationExtraArgs(init, update)


def _layout(state: Any) -> Layout | None:
    """That of the packed trees in a state; None where there are none."""
    found = [x for x in jax.tree.leaves(state, is_leaf=packing.is_packed) if packing.is_packed(x)]
    return found[0].layout if found else None


def _check_stateless(tx: optax.GradientTransformationExtraArgs, packed: Packed) -> None:
    """A state without packed trees is right where `init` makes such a state."""
    if _layout(jax.eval_shape(tx.init, packed)) is not None:
        remedy = "`pack(state, like=jax.eval_shape(tx.init, params))`"
        raise ValueError(
            f"{_NAME}: `state` has no packed leaves, expected what `init` made; of the state of a "
            f"tree, make it by {remedy}."
        )


def _fit(layout: Layout, g: Sequence[Any]) -> bool:
    """Whether the gradients of each buffer are there, and of one dtype."""
    for name, _ in layout.shapes:
        own = layout.within(name)
        if not own[0][1].is_whole:
            dtypes = {None if g[i] is None else g[i].dtype for i, _ in own}
            if len(dtypes) > 1 or None in dtypes:
                return False
    return True
