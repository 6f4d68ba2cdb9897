"""`carry_over` converts a state for another recipe, and reports what became of each part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs.pair import arrays_of
from jgrad._packed import packing, restored
from jgrad._states import forms, matching, state_leaves
from jgrad._states.matching import Account, Matcher, Momentum, Source
from jgrad._states.state_leaves import NAME, Keys, StateLeaf, read
from jgrad._trees import checks, trees, variables
from jgrad._trees.annotations import Mask, Tree
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.host_memory import where_it_lies
from jgrad._trees.protocols import Leaf, PyTree


@explained
def carry_over(
    old: PyTree,
    *,
    like: Tree,
    params: PyTree = None,
    strict: bool = False,
    rename: Mapping[str, str] | None = None,
    reset: Mask | None = None,
    momentum: Momentum | None = None,
) -> tuple[Tree, Account]:
    """Converts the state of one optimizer to that of another, and returns a record of what it did.

        state[part, leaf] = old[part, leaf]    where `old` has it, in the form that `like` has
                          = w                  `master`, `average` and `z`
                          = like[part, leaf]   others, or what `init` makes of these shapes

    Parts are matched by their meaning and by the paths of their parameters, so you can add, remove
    and reorder wrappers. `old` may come from jgrad, from optax, or from orbax restoring without a
    target; what is packed there has no names, so it gets those in `like` or `params`, with a note.
    The `value` of a flax variable is not part of a path. Arrays are converted to 8 bits or
    back, and trees are packed or unpacked, as needed. If several parts have the same meaning, they
    are matched in order, so a state of the same recipe comes back bit for bit. With flax's
    `nnx.Optimizer`, pass the `opt_state` of each, and put the result into the new one by
    `nnx.update(new.opt_state, nnx.state(state))`.

    Only unambiguous parts are converted. A second moment is never made up: if `old` only has first
    moments, start again with `tx.init(params)`, or use `reset`, which keeps the step. First moments
    are unambiguous beside second moments of the same kind, as in `adam`, `lamb`, `soap` and
    `optax.adamw`. Others may be averages or sums, of gradients or of steps, and nothing in the
    state tells which. If both states have the same structure, they are kept, with a note, which is
    only right if the method is the same. Otherwise, decide by `momentum` what happens to them, and
    also to second moments of `adafactor`, which are not bias-corrected.

    States of `optax.adamax`, `optax.contrib.adopt` and an `optimizer_of_leaf` with two moments look
    like Adam's. Pass `reset=True` if they mean something else.

    Args:
      old: the old state, with arrays.
      like: the result of the new `tx.init(params)`, or its shapes from `jax.eval_shape(tx.init,
        params)`. If it has arrays, they supply what `old` does not have.
      params: the parameters, needed if the new state has copies or averages of weights that `old`
        does not have. Float32 copies in `old` take precedence.
      strict: True raises an error if anything is dropped or new.
      rename: a dict from old to new paths of leaves or whole subtrees, with keys joined by slashes,
        such as {"encoder/l0": "encoder/layers/0"}.
      reset: moments to set to zero: True for all of them, a prefix tree of bools, `by_path`, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Without `params`,
        the function gets the shapes of the first tree of moments in `like`.
      momentum: what to do with ambiguous moments. "keep" takes them over, which is right if both
        methods store the same thing, as `optax.sgd` and `gradient_descent` do, or `optax.lion` and
        `lion`; "reset" sets first moments to zero. None raises an error, unless both states have
        the same structure.

    Returns:
      `(state, account)`. The state has the structure, shapes and dtypes of `like`. Leaves that need
      no conversion are the arrays of `old`, and no two leaves share an array. The `Account` records
      what was done: `str(account)` has a line for leaves that were treated alike, and its
      attributes are tuples of all names. It is static.

    Raises:
      ValueError: a first moment is ambiguous, a second one is missing, a leaf has another shape,
        nothing matches, parameters are missing, a path in `rename` does not exist, or `like` and
        `params` don't have one layout for what a file has packed; with `strict`, anything is
        dropped or new.
      TypeError: `like` is a transformation, or a leaf has the wrong type.

    Example:
      >>> params = {"w": jnp.ones((64, 128))}
      >>> old = optax.sgd(0.1, momentum=0.9).init(params)
      >>> like = jgrad.gradient_descent(0.1, momentum=0.9).init(params)
      >>> state, account = jgrad.carry_over(old, like=like, momentum="keep")
      >>> account.kept, account.from_like
      (('mw/w',), ('step',))
    """
    if hasattr(like, "init") and hasattr(like, "update"):
        remedy = "expected a state: `jax.eval_shape(tx.init, params)`"
        raise TypeError(f"{NAME}: `like`: a transformation, {remedy}.")
    checks.boolean(NAME, "strict", strict)
    if momentum is not None:
        checks.one_of(NAME, "momentum", momentum, (matching.KEEP, matching.RESET))
    params = None if params is None else arrays_of(params)
    old = trees.map_leaves(lambda x: jnp.asarray(x) if checks.is_number(x) else x, old)
    from_file = restored.with_nodes(NAME, old, like, params)
    is_unnamed = trees.any_packed(from_file) and not trees.any_packed(old)
    old, form = from_file, like
    old, like = map(variables.variables_of_blocks, (old, like))
    shapes = trees.shapes(like, as_stored=True)
    before, after = read(trees.shapes(old, as_stored=True)), read(shapes)
    for name, state in ("old", before), ("like", after):
        for x in state:
            if not hasattr(x.array, "shape"):
                came = f"{checks.describe(x.array)}, expected an array"
                raise TypeError(f"{NAME}: `{name}`{checks.at(x.at)}: {came}.")
    before = state_leaves.renamed(before, after, {} if rename is None else rename)
    chosen = () if reset is None else state_leaves.chosen(reset, params, shapes)
    before, after = map(state_leaves.with_seen, (before, after))
    has_params = params is not None
    pairs, account = Matcher(before, after, chosen, momentum, has_params=has_params).match()
    if is_unnamed:
        account = dataclasses.replace(account, notes=(*account.notes, _UNNAMED))
    if strict and (lines := matching.lost_or_new(account)):
        raise ValueError(f"{NAME}: `strict`: True, expected nothing dropped or new:\n{lines}")
    expected, structure = trees.flatten(like)
    is_in_place = all([y.position for y in source.old] == [x.position] for x, source in pairs)
    if is_in_place and trees.flatten(old)[1] == structure:  # packed buffers stay as they are
        arg = ArgLeaves.from_tree(NAME, "old", old).with_arrays()
        leaves = zip(expected, arg.leaves, strict=True)
        new = [x if x is None else forms.converted(arg, i, x, y) for i, (x, y) in enumerate(leaves)]
        state = structure.unflatten(new)
    else:
        structure, maker = trees.flatten(shapes)[1], _Leaves(old, before, params)
        arrays = {leaf.position: maker.leaf_from(leaf, source) for leaf, source in pairs}
        state = structure.unflatten(map(arrays.get, range(structure.num_leaves)))
        state = packing.pack(state, like=cast(PyTree, like))
        state = forms.in_memory_of(like, state)
    return variables.in_form_of(form, _without_shared_arrays(state)), account


_UNNAMED = (
    "packed leaves of a file, which does not have their names: read by those in `like` or "
    "`params`. If they had others, restore the file with a target, and `rename` them."
)


class _Leaves:
    """Makes the leaves of the new state, as a tree that is not packed.

    Args:
      old: the old state.
      before: its leaves, by their paths in the new one.
      params: the parameters, or None.
    """

    def __init__(self, old: PyTree, before: Sequence[StateLeaf], params: PyTree) -> None:
        self._arg = ArgLeaves.from_tree(NAME, "old", packing.unpack(old)).with_arrays()
        self._params = params
        arrays = ((x.keys, self._arg.leaves[x.position]) for x in before if x.keys)
        self._beside = {(keys, x.shape): x for keys, x in arrays}

    @functools.cached_property
    def _weights(self) -> dict[Keys, Leaf]:
        """The parameters by their paths; none if there are none."""
        return dict(state_leaves.leaves_of(packing.unpack(self._params)))

    def leaf_from(self, leaf: StateLeaf, source: Source) -> Leaf:
        """A leaf of the new state."""
        like, arg = leaf.array, self._arg._replace(paths=lambda: [leaf.at])
        if source.detail == matching.IDENTITY:
            one = jnp.eye(like.shape[-1], dtype=like.dtype)
            return forms.in_memory_of(like, jnp.broadcast_to(one, like.shape))
        if source.what in (matching.ZERO, matching.RESET):
            beside = self._beside.get((leaf.keys, like.shape), self._weights.get(leaf.keys))
            is_array = all(map(checks.is_array, jax.tree.leaves(beside)))
            fits = is_array and getattr(beside, "shape", None) == like.shape
            zeros = functools.partial(forms.zeros, arg, 0, like)
            return forms.in_memory_of(like, where_it_lies(zeros, beside if fits else None))
        if source.detail == matching.ONE:
            return jnp.ones(like.shape, like.dtype)
        if source.what == matching.FROM_LIKE:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), like)
        leaves = [self._arg.leaves[x.position] for x in source.old]
        if source.what == matching.OF_WEIGHTS:
            x = leaves[0] if leaves else self._parameter(leaf)  # no copies in `old`
            x = numerics.strong(jnp.array(numerics.wide(x), copy=True))
            return forms.converted(arg._replace(name="params"), 0, like, x)
        if convert := _OF_WINDOWS.get(source.detail):
            leaves = [where_it_lies(lambda both: convert(*map(numerics.wide, both)), leaves)]
        return forms.converted(self._arg, source.old[0].position, like, leaves[0])

    def _parameter(self, leaf: StateLeaf) -> Leaf:
        if self._params is None:
            came = f"None, expected the parameters: `old` has nothing for {leaf.at} of `like`"
            raise ValueError(f"{NAME}: `params`: {came}.")
        x: Leaf = self._weights.get(leaf.keys)
        if not checks.is_array(x) or x.shape != leaf.array.shape:
            came = f"{checks.describe(x)} at {'/'.join(leaf.keys)}"
            expected = f"an array of shape {tuple(leaf.array.shape)}, as `like` has at {leaf.at}"
            raise ValueError(f"{NAME}: `params`: {came}, expected {expected}.")
        return x


_OF_WINDOWS = {
    matching.SUM: lambda mean, count: mean * count.astype(mean.dtype),
    matching.MEAN: lambda total, count: total / jnp.maximum(count, 1).astype(total.dtype),
}


def _without_shared_arrays(state: PyTree) -> PyTree:
    """A copy of each array that is the leaf of several fields, so that the state can be donated."""
    seen: set[int] = set()

    def alone(x: Leaf) -> Leaf:
        if id(x) in seen and checks.is_array(x):
            return where_it_lies(functools.partial(jnp.array, copy=True), x)
        seen.add(id(x))
        return x

    return jax.tree.map(alone, state)
