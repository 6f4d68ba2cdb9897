"""Packs small leaves inside a transformation, so that training loops stay unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.inputs import OTHER_FORM, Inputs
from jgrad._inputs.pair import pair
from jgrad._packed import packing
from jgrad._packed.layouts import Layout, layout_of, other_leaves
from jgrad._packed.packing import Packed
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Count, Inner
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.forms import SMALLEST
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.told import refuse
from jgrad._trees.trees import Structure
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "pack_small"


@explained
def pack_small(tx: AnyTransformation[Inner], *, max_size: Count = 2048) -> Transformation[Inner]:
    """Packs small leaves inside each update, while your loop keeps working with trees.

        updates = unpack(tx(pack(g), state, pack(w))),   packing leaves of up to max_size elements

    Packing avoids a loop or a kernel launch for each small leaf. Results match those of `tx` alone,
    in float32 bit for bit; see `pack`. If `max_size` is 4096 or more, leaves too small for 8-bit
    moments get a separate buffer, so that 8-bit results match as well. Training on packed
    parameters saves more, because no step has to pack and unpack. In a step where a small leaf has
    the gradient None, nothing is packed.

    Args:
      tx: any transformation of jgrad, with options given for the unpacked tree, or any other that
        is elementwise and maps 0 to 0. optax's masks and labels only work on the unpacked tree, so
        put them outside: `optax.masked(pack_small(tx), mask)`.
      max_size: number of elements up to which a leaf is packed; larger ones would gain nothing.

    Returns:
      A transformation whose state is that of `tx` for packed parameters. `unpack(state)` is the
      state of `tx` alone: save this, and after restoring use `pack(restored, like=state)`. Orbax,
      pickle and equinox can also save the packed state, and `flax.serialization` saves it unpacked.
      If you pass other trees to `optax.tree.map_params`, use `tx` and `unpack(state)` there.

    Raises:
      ValueError: `max_size` is below 0; from `update`, the leaves of the state have other names.
      TypeError: `tx` is not a transformation, or `max_size` is not an int.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.pack_small(jgrad.gradient_descent(0.1, momentum=0.9))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> updates["w"].shape, state.mw.buffers["float32"].shape
      ((3, 2), (2, 256))
      >>> jgrad.unpack(state).mw["w"].shape
      (3, 2)
    """
    tx = inside.transformation(_NAME, tx)
    checks.count(_NAME, "max_size", max_size, low=0)

    def small_packed(tree: PyTree) -> tuple[Layout, list[Leaf]]:
        is_apart = bool(max_size >= SMALLEST)
        return layout_of(_NAME, tree, max_size=max_size, small_apart=is_apart, others=True)

    def init(params: PyTree) -> PyTree:
        refuse(_NAME, "leave it out")
        packing.check_unpacked(_NAME, "params", params)
        parameters.checked(_NAME, params)
        layout, leaves = small_packed(params)
        # `optax.tree.map_params` calls `init` with a node in place of the parameters.
        return tx.init(packing.fill(layout, leaves) if layout.shapes else params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        packing.check_unpacked(_NAME, "updates", updates)
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        old = packing.layout_in(state)
        g = list(inputs.like_reference("updates", updates).with_arrays().leaves)
        layout, leaves = small_packed(_part(inputs, g, old))
        if old is None:
            if layout.shapes:
                _check_stateless(tx, packing.fill(layout, leaves))
        else:
            layout = _in_containers_of(layout, old, inputs)
        # Parts of the state may have their own layouts, for some of the leaves.
        state = _with_structure(state, layout.structure)
        if _fit(layout, g):
            w = None if params is None else packing.fill(layout, leaves)
            packed = packing.fill(layout, g)
            steps, new = inputs.hand_over(tx, packed, state, w)
            steps = packing.unpack(steps)
        else:
            g, w = (layout.structure.unflatten(x) for x in (g, leaves))
            w = None if params is None else w
            steps, new = inputs.hand_over(tx, g, packing.unpack(state), w)
            new = packing.pack(new, like=state)
        steps = jax.tree.map(_or_zeros, steps, inputs.tree, is_leaf=trees.is_none)
        return steps, new if old is None else _with_structure(new, old.structure)

    return pair(init, update, _NAME)


def _or_zeros(u: Leaf, p: Leaf) -> Leaf:
    """Zeros for an array that `init` did not see."""
    return numerics.zeros_like(p) if u is None and p is not None else u


def _with_structure(state: PyTree, structure: Structure) -> PyTree:
    """A state with the layouts of another tree that has the same leaves."""
    return packing.with_layouts(state, lambda x: dataclasses.replace(x, structure=structure))


def _part(inputs: Inputs, g: list[Leaf], old: Layout | None) -> PyTree:
    """The parameters; and of a model None for what `init` did not see, if it is not updated."""
    leaves, structure = trees.flatten(inputs.tree)
    if old is None or len(old.spans) != len(leaves):
        return inputs.tree
    for i, span in enumerate(old.spans):
        if span is None and inputs.g[i] is None:
            leaves[i] = g[i] = None
    return structure.unflatten(leaves)


def _in_containers_of(layout: Layout, old: Layout, inputs: Inputs) -> Layout:
    """The layout of a state for the trees of this update, whose leaves are the same by name.

    The containers may be others: flax's nnx wraps leaves in variables for `init` alone.
    """
    name = f"`{inputs.reference.name}`"
    phrase = other_leaves(layout, old, name, "`state`")
    if phrase:
        phrase += f"; {OTHER_FORM[:-2]}, rename=...)`"
    else:
        old = dataclasses.replace(old, structure=layout.structure)
        if inputs.w is None:  # of gradients, the dtypes may be others
            state_arg = ArgLeaves.from_tree(_NAME, "state", old.tree())
            checks.same_shapes(inputs.reference, state_arg)
            for i, x in enumerate(state_arg.leaves):
                if x is None and inputs.is_updated[i]:
                    came = checks.describe(inputs.g[i])
                    inputs.reference.fail(i, TypeError, f"{came}, expected None, as in `state`")
        elif not layout.is_part_of(old):
            phrase = next(layout.__jgrad_differences__(old, name, "it"))
    if phrase:
        made_for = "other parameters, or with another `max_size`"
        raise ValueError(f"{_NAME}: `state` was made for {made_for}: {phrase}.")
    return old


def _check_stateless(tx: optax.GradientTransformationExtraArgs, packed: Packed[Any]) -> None:
    """A state without packed trees is right where `init` makes such a state."""
    if packing.layout_in(jax.eval_shape(tx.init, packed)) is not None:
        remedy = "`pack(state, like=jax.eval_shape(tx.init, params))`"
        raise ValueError(
            f"{_NAME}: `state` has no packed leaves, expected what `init` made; make it from "
            f"the state of a tree by {remedy}."
        )


def _fit(layout: Layout, g: Sequence[Leaf]) -> bool:
    """Whether the gradients of each buffer are there, and of one dtype; and there is a buffer."""
    for name, _ in layout.shapes:
        dtypes = {None if g[i] is None else g[i].dtype for i, _ in layout.within(name)}
        if layout.unpacked_leaf(name) is None and (len(dtypes) > 1 or None in dtypes):
            return False
    return bool(layout.shapes)
