"""The input of one update of a transformation, checked, and the way out."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.apply import cast_back
from jgrad._arithmetic.leafwise import Function
from jgrad._inputs.commit import Commit
from jgrad._inputs.state import OptState
from jgrad._inputs.store import MomentStore, as_stored, kept_arrays
from jgrad._packed import arrays, packing
from jgrad._quantized import leaves as blocks
from jgrad._trees import checks, trees
from jgrad._trees.blocks import is_blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree


class Update:
    """Gradients and parameters of one update, checked against each other, as lists of leaves.

    A leaf that is not updated, since its parameter is an integer or its gradient is missing, has
    the gradient `None` here, so that the methods do not change it.

    Attributes:
      function: the name of the transformation, for messages.
      g: gradients.
      w: parameters, or `None` if they were not given.
      reference: the parameters, or else the gradients; the updates have their shapes and dtypes.
      tree: the tree whose leaves the reference is.
      specs: what each of these leaves stands for.
      shapes: the same tree unpacked, with shapes and dtypes for what is packed.
      commit: whether the update is committed, if a wrapper decides it; None where it always is.
      store: puts new moments in the form of the old ones; there after `read`.
    """

    store: MomentStore

    def __init__(
        self, function: str, updates: PyTree, params: PyTree, commit: Commit | None = None
    ) -> None:
        self.function = function
        self.commit = commit if commit is not None and commit.is_finite(updates) else None
        name, self.tree = ("updates", updates) if params is None else ("params", params)
        self.reference = ArgLeaves.from_tree(function, name, self.tree).with_arrays()
        self._structure = trees.flatten(self.tree)[1]
        self.specs = arrays.specs(self.tree)
        self.shapes = packing.shapes(self.tree)
        self.w = None if params is None else checks.parameters(self.reference)
        self._given = self.like_reference("updates", updates)
        self.g = self._gradients(self._given.with_arrays())

    def like_reference(self, name: str, tree: PyTree) -> ArgLeaves:
        """The leaves of a tree with the structure of the parameters."""
        taken_apart = packing.any_packed(self.tree) and not packing.any_packed(tree)
        remedy = _NOT_PACKED if taken_apart and name.startswith("state") else ""
        checks.same_structure(
            self.function, name, tree, self.reference.name, self.tree, remedy=remedy
        )
        return self.reference._replace(name=name, leaves=trees.flatten(tree)[0])

    def option(self, name: str, tree: PyTree) -> ArgLeaves:
        """An option for each leaf of the unpacked tree, from a prefix of it.

        `None` only where nothing is updated.
        """
        arg = ArgLeaves.from_prefix(self.function, name, tree, self.reference.name, self.shapes)
        for i in self._updated_positions():
            if arg.leaves[i] is None:
                arg.fail(i, TypeError, "None, expected a value, as this leaf is updated")
        return arg

    def per_array(self, entries: Sequence[Any]) -> list[Any]:
        """An entry for each array, from one for each leaf of the unpacked tree."""
        per_array = [spec.per_array(entries) for spec in self.specs]
        pairs = zip(per_array, self.specs, strict=True)
        if any(np.ndim(x) for x, spec in pairs if spec.is_buffer):
            self.check_buffers()
        return per_array

    def check_buffers(self) -> None:
        """Buffers have the shapes of their layouts; needed where rows have numbers of their own."""
        for i, (x, spec) in enumerate(zip(self.reference.leaves, self.specs, strict=True)):
            if spec.is_buffer and not spec.is_unpacked and x.shape != spec.local_shape:
                remedy = (
                    "inside `vmap`, pack there, or map `update` too; inside `shard_map` or `pmap`, "
                    "`zero` knows which rows are whose"
                )
                problem = f"shape {x.shape}, expected {spec.local_shape} as in its layout; {remedy}"
                self.reference.fail(i, ValueError, problem)

    def updated_shapes(self) -> ArgLeaves:
        """The leaves of the unpacked tree, with `None` where nothing is updated."""
        arg = ArgLeaves.from_tree(self.function, self.reference.name, self.shapes).with_arrays()
        updated: list[Any] = [None] * len(arg.leaves)
        for i in self._updated_positions():
            updated[i] = arg.leaves[i]
        return arg._replace(leaves=updated)

    def _updated_positions(self) -> list[int]:
        """Which leaves of the unpacked tree are updated."""
        pairs = zip(self.specs, self.g, strict=True)
        return [i for spec, g in pairs if g is not None for i in spec.positions]

    def updated(self) -> ArgLeaves:
        """The reference, with `None` where nothing is updated."""
        pairs = zip(self.reference.leaves, self.g, strict=True)
        return self.reference._replace(leaves=[None if g is None else x for x, g in pairs])

    def require_params(self, reason: str) -> list[Any]:
        """The parameters, which have to be there."""
        if self.w is None:
            remedy = "call `update(updates, state, params)`"
            raise ValueError(f"{self.function}: {reason} needs the parameters: {remedy}.")
        return self.w

    def read(self, state: OptState, *, mw: bool, vw: bool | PyTree) -> OptState:
        """The number of this update, counted from 1, and the moments as lists of leaves.

        `vw` may be a tree of shapes, of second moments that only some elements have.
        """
        begin = f"{self.function}: `state`: "
        end = f", expected the OptState that this `{self.function}` made with `init`."
        if not isinstance(state, OptState):
            raise TypeError(f"{begin}{type(state).__name__}{end}")
        moments: list[list[Any] | None] = []
        for name, tree, used in (("mw", state.mw, mw), ("vw", state.vw, vw)):
            expected = used if isinstance(used, bool) else used is not None
            if (tree is not None) != expected:
                came = f"an OptState {'without' if expected else 'with'} `{name}`"
                raise TypeError(f"{begin}{came}, from another method or other options{end}")
            full = f"state.{name}"
            if isinstance(used, bool):
                moments.append(self.moment(full, tree, real=name == "vw") if used else None)
            else:
                moments.append(self._some_moments(full, tree, used))
        step = jnp.asarray(state.step)
        if step.shape != ():
            remedy = "map `update` over the models, as `init` was"
            raise ValueError(
                f"{self.function}: `state.step`: shape {step.shape}, expected (); {remedy}."
            )
        step = optax.safe_increment(step)
        self.store = MomentStore(self.specs, step, self.commit)
        return OptState(step, *moments)

    def with_zeros(self, updates: PyTree) -> PyTree:
        """The updates, with zero for None beside a parameter."""
        pairs = zip(trees.flatten(updates)[0], self.reference.leaves, strict=True)
        return self._structure.unflatten([_or_zeros(u, p) for u, p in pairs])

    def directions(self, values: Sequence[Any]) -> PyTree:
        """Updates in the dtypes of the parameters; zero where there is no value."""
        if self.commit is not None:
            values = self._committed(values, self.commit)
        pairs = zip(values, self.reference.leaves, strict=True)
        leaves = [_or_zeros(x, p) for x, p in pairs]
        updates = cast_back(leaves, self.reference.leaves)
        if self.commit is not None:
            self.commit.settle([u for u in updates if checks.is_inexact(u) and _has_room(u.dtype)])
        return self._structure.unflatten(updates)

    def _committed(self, values: Sequence[Any], commit: Commit) -> list[Any]:
        """Zero where the update is not committed; and small enough to be added to any parameter."""
        pairs = list(zip(values, self.reference.leaves, strict=True))
        calls = [
            (_kept_update(p.dtype), (u, commit.flag)) if checks.is_inexact(u) else None
            for u, p in pairs
        ]
        kept = leafwise.run(calls)  # zeros of integers are never settled, and need not be
        return [u if x is None else x for x, (u, _) in zip(kept, pairs, strict=True)]

    def kept(self, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """New arrays of a state as they are stored; old ones where the update is not committed.

        To be called before anything else reads them, so that no other form of them is written. What
        does not come by here, or by `store`, is not settled: the wrapper that decides looks at it.
        """
        self._check_form(new, old)
        kept = as_stored(kept_arrays(new, old, self.commit), old)
        if self.commit is not None:
            self.commit.keep(kept, old)
        return kept

    def _check_form(self, new: Sequence[Any], old: Sequence[Any]) -> None:
        """No array is written where the state has codes: it would be cast to their dtype."""
        for n, o in zip(new, old, strict=True):
            if n is not None and is_blocks(o) and not is_blocks(n):
                raise TypeError(
                    f"{self.function}: a moment in 8 bits: {checks.describe(n)}, expected Blocks, "
                    "as `inputs.store(calls(rule, ...), old)` makes them."
                )

    def moments(self, new: Sequence[Any], old: Sequence[Any], like: PyTree | None = None) -> PyTree:
        """New moments in the dtypes of the old, which stay where there is no new one."""
        self._check_form(new, old)
        structure = self._structure if like is None else trees.flatten(like)[1]
        return structure.unflatten(cast_back(new, old))

    def gradients(self, new: Sequence[Any]) -> PyTree:
        """The gradients as they came in, with new ones for the leaves that are updated."""
        pairs = zip(new, self._given.leaves, strict=True)
        return self._structure.unflatten([g if x is None else x for x, g in pairs])

    def zeros(self) -> PyTree:
        """Updates that change nothing."""
        return self.directions([None] * len(self.g))

    def moment(self, name: str, tree: PyTree, *, real: bool = False) -> list[Any]:
        """The leaves of a part of the state, with the shapes and kinds of what is updated."""
        arg, updated = self.like_reference(name, tree).with_arrays(), self.updated()
        for i, (moment, reference) in enumerate(zip(arg.leaves, updated.leaves, strict=True)):
            if reference is None:
                continue
            if is_blocks(moment):
                blocks.check(arg, i, moment, jnp.uint8 if real else jnp.int8)
                continue
            complex_ = jnp.iscomplexobj(reference) and not real
            kind = jnp.complexfloating if complex_ else jnp.floating
            if not (checks.is_array(moment) and jnp.issubdtype(moment.dtype, kind)):
                expected = f"an array of a {'complex' if complex_ else 'real floating'} dtype"
                arg.fail(i, TypeError, f"{checks.describe(moment)}, expected {expected}")
        checks.same_shapes(arg, updated)
        return list(arg.leaves)

    def _some_moments(self, name: str, tree: PyTree, shapes: PyTree) -> list[Any]:
        """The leaves of real moments, which have these shapes, and are None where there is none."""
        reference = self.reference.name
        checks.same_structure(self.function, name, tree, reference, shapes, remedy=_OTHER_LEAVES)
        arg = ArgLeaves.from_tree(self.function, name, tree).with_arrays()
        expected = arg._replace(name=reference, leaves=trees.flatten(shapes)[0])
        for i, (moment, shape) in enumerate(zip(arg.leaves, expected.leaves, strict=True)):
            if is_blocks(moment) and shape is not None:
                blocks.check(arg, i, moment, jnp.uint8)
                continue
            is_real = checks.is_array(moment) and jnp.issubdtype(moment.dtype, jnp.floating)
            if not (is_real if shape is not None else moment is None):
                what = "None" if shape is None else "an array of a real floating dtype"
                problem = f"{checks.describe(moment)}, expected {what}; {_OTHER_LEAVES}"
                arg.fail(i, TypeError, problem)
        checks.same_shapes(arg, expected)
        return list(arg.leaves)

    def _gradients(self, arg: ArgLeaves) -> list[Any]:
        gradients = []
        for i, (g, p) in enumerate(zip(arg.leaves, self.reference.leaves, strict=True)):
            if (expected := _expected(g, p)) is not None:
                arg.fail(i, TypeError, f"{checks.describe(g)}, expected {expected}")
            if g is not None and g.dtype == jax.dtypes.float0:
                self.require_params("a float0 gradient")
            gradients.append(g if p is not None and jnp.issubdtype(p.dtype, jnp.inexact) else None)
        checks.same_shapes(arg._replace(leaves=gradients), self.reference)
        return gradients


# `nnx.Optimizer` writes the new state back attribute by attribute, and loses nodes that are not its
# own, whatever the optimizer.
_NOT_PACKED = (
    "pack a restored state by `pack(state, like=jax.eval_shape(tx.init, params))`; flax's "
    "`nnx.Optimizer` takes packed states apart: give it `pack_small(tx)` and parameters as a tree, "
    "or call `tx.update` yourself"
)


_OTHER_LEAVES = "a state fits the choice of leaves that it was made for, and no other"


def _or_zeros(x: Any, p: Any) -> Any:
    return numerics.zeros_like(p) if x is None and p is not None else x


def _has_room(dtype: np.dtype) -> bool:
    """Whether no update of a training is too large to be added to any parameter; not in float16."""
    return bool(jnp.finfo(dtype).maxexp >= 128)


@functools.cache  # one function object for each dtype, so that JAX's caches find it again
def _kept_update(dtype: np.dtype) -> Function:
    """`rules.kept_update` for parameters of a dtype."""
    largest = numerics.largest_addable(dtype) if _has_room(dtype) else math.inf
    return functools.partial(rules.kept_update, largest=largest)


def _expected(g: Any, p: Any) -> str | None:
    """What a gradient should have been; `None` if it fits its parameter."""
    if g is None:
        return None
    if p is None:
        return "None, as the parameter is"
    if not checks.is_array(g):
        return "an array or None"
    floating = jnp.issubdtype(g.dtype, jnp.inexact)
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return f"None, float0 or integers beside a parameter of {p.dtype}" if floating else None
    if floating and checks.is_of_kind(g, p):
        return None
    kind = "a complex" if jnp.iscomplexobj(p) else "a real floating"
    return f"{kind} dtype beside a parameter of {p.dtype}"
