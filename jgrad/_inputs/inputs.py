"""The checked inputs of one `init` or `update`, and how its results are returned.

Methods and wrappers compute with lists that have an entry per leaf; options are read separately.
"""

import copy
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leaf_moment import as_stored, kept
from jgrad._arithmetic.leafwise import Function
from jgrad._arithmetic.rules import cast_back
from jgrad._layers import array_spec
from jgrad._trees import checks, forms, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import NOTHING, Told


class Finished(NamedTuple):
    """An array that needs nothing more: commit and dtype are taken into account."""

    array: jax.Array


class Parameters:
    """Parameters, or gradients in their place, and what is known about each array.

    Attributes:
      function: the name of the transformation, for messages.
      tree: the tree itself.
      reference: its leaves; updates have their shapes and dtypes.
      specs: what each of these leaves stands for.
      has_buffers: whether there is a `Packed` in the tree.
      shapes: the same tree unpacked, with shapes and dtypes for what is packed.
      g: gradients; in an `init` there are none.
      is_updated: whether each leaf is: it is floating or complex, and has a gradient in an update.
      rows: the positions of these arrays in the tree; of all of them, except in `updated`.
    """

    def __init__(self, function: str, tree: PyTree, name: str = "params") -> None:
        self.function, self.tree = function, tree
        self.reference = ArgLeaves.from_tree(function, name, tree).with_arrays()
        self.specs = array_spec.specs(tree)
        self.has_buffers = any(map(operator.attrgetter("spans"), self.specs))
        self.shapes = trees.shapes(tree) if self.has_buffers else tree
        self.g: list[Leaf] = [None] * len(self.specs)
        self.w: list[Leaf] | None = None
        self._whole = self.reference.leaves
        self.is_updated = list(map(checks.is_inexact, self.reference.leaves))
        self.rows: Sequence[int] = range(len(self.specs))

    def updated(self) -> Self:
        """The same, with the arrays alone that are updated."""
        if all(self.is_updated):
            return self
        new = copy.copy(self)
        new.rows = list(itertools.compress(self.rows, self.is_updated))
        new.reference = self.reference.at(new.rows)
        lists = (self.specs, self.g, self.is_updated, self.w)
        new.specs, new.g, new.is_updated, new.w = leafwise.at(lists, new.rows)
        return new

    def put_back(self, new: Sequence[Leaf], others: Sequence[Leaf]) -> list[Leaf]:
        """An entry for each array of the tree: new ones for these arrays, else those of others."""
        entries = dict(enumerate(others)) | dict(zip(self.rows, new, strict=True))
        return list(entries.values())

    def like_reference(self, name: str, tree: PyTree, shapes: PyTree = None) -> ArgLeaves:
        """The leaves of a tree with the structure of the parameters, or of `shapes`."""
        reference, remedy = self.tree, ""
        if shapes is not None and shapes is not self.tree:
            reference, remedy = shapes, OTHER_LEAVES
        elif self.has_buffers and name.startswith("state") and not trees.any_packed(tree):
            remedy = _NOT_PACKED
        checks.same_structure(
            self.function, name, tree, self.reference.name, reference, remedy=remedy
        )
        return self.reference._replace(name=name, leaves=trees.flatten(tree)[0])

    def option(self, name: str, tree: PyTree) -> ArgLeaves:
        """An option for each leaf of the unpacked tree, from a prefix of it.

        `None` only where nothing is updated.
        """
        arg = ArgLeaves.from_prefix(self.function, name, tree, self.reference.name, self.shapes)
        for spec, is_updated in zip(self.specs, self.is_updated, strict=True):
            for i in spec.positions:
                if is_updated and arg.leaves[i] is None:
                    arg.fail(i, TypeError, "None, expected a value, since this leaf is updated")
        return arg

    def placements(self, mesh_axes: PyTree) -> ArgLeaves:
        """Where each leaf of the unpacked tree lies, as a user says it: a `Placement` for each."""
        return self.option("mesh_axes", read_mesh_axes(self.function, mesh_axes))

    def per_array(self, entries: Sequence[Leaf]) -> list[Leaf]:
        """An entry for each array, from one for each leaf of the unpacked tree."""
        if not self.has_buffers:
            return list(map(entries.__getitem__, self.rows))
        per_array = [spec.per_array(entries) for spec in self.specs]
        pairs = zip(per_array, self.specs, strict=True)
        if any(spec.is_buffer and np.ndim(x) for x, spec in pairs):
            self.check_buffers()
        return per_array

    def check_buffers(self) -> None:
        """Buffers have the shapes of their layouts; needed where rows have numbers of their own."""
        if not self.has_buffers:
            return
        for i, (x, spec) in enumerate(zip(self.reference.leaves, self.specs, strict=True)):
            if spec.is_buffer and not spec.is_unpacked and x.shape != spec.local_shape:
                remedy = (
                    "inside `vmap`, call `pack` there, or map `update` too; inside `shard_map` or "
                    "`pmap`, use `zero`, which knows the rows of each device"
                )
                problem = f"shape {x.shape}, expected {spec.local_shape} as in its layout; {remedy}"
                self.reference.fail(i, ValueError, problem)

    def updated_shapes(self) -> ArgLeaves:
        """The leaves of the unpacked tree, with `None` where nothing is updated."""
        arg = ArgLeaves.from_tree(self.function, self.reference.name, self.shapes).with_arrays()
        updated: list[Leaf] = [None] * len(arg.leaves)
        for spec, is_updated in zip(self.specs, self.is_updated, strict=True):
            for i in spec.positions if is_updated else ():
                updated[i] = arg.leaves[i]
        return arg._replace(leaves=updated)


class Inputs(Parameters):
    """Gradients and parameters of one update, checked against each other, as lists of leaves.

    A leaf that is not updated, since its parameter is an integer or its gradient is missing, has
    the gradient `None` here, so that the methods do not change it. Where no parameters were given,
    the gradients are the reference.

    Attributes:
      w: parameters, or `None` if they were not given.
      commit: the decision of a wrapper around.
      notes, undecayed, then: see `Told`.
    """

    def __init__(
        self, function: str, updates: PyTree, params: PyTree, around: Told = NOTHING
    ) -> None:
        if params is None:
            super().__init__(function, updates, "updates")
        else:
            super().__init__(function, params)
            self.w = checks.parameters(self.reference)
        self.commit = around.commit
        self.notes, self.undecayed = around.notes, around.undecayed
        self.then = around.then
        self._structure = trees.flatten(self.tree)[1]
        self._updates = self.like_reference("updates", updates)
        arg = self._updates.with_arrays()
        for i, (g, p) in enumerate(zip(arg.leaves, self.reference.leaves, strict=True)):
            if (expected := _expected(g, p)) is not None:
                arg.fail(i, TypeError, f"{checks.describe(g)}, expected {expected}")
            if g is not None and g.dtype == jax.dtypes.float0:
                self.require_params("a float0 gradient")
            self.g[i] = g if self.is_updated[i] else None
        checks.same_shapes(arg._replace(leaves=self.g), self.reference)
        self.is_updated = [g is not None for g in self.g]

    def require_params(self, reason: str) -> list[Leaf]:
        """The parameters; an error if they are missing."""
        if self.w is None:
            remedy = "call `update(updates, state, params)`"
            raise ValueError(f"{self.function}: {reason} needs the parameters: {remedy}.")
        return self.w

    def directions(self, values: Sequence[Leaf]) -> PyTree:
        """Updates in the dtypes of the parameters; zero where there is no value.

        Zero, too, where they are not committed; and small enough to be added to any parameter.
        """
        leaves = [x.array if isinstance(x, Finished) else x for x in values]
        if self.commit is not None:
            calls = [
                (keeping_update(p.dtype, self.commit.clips), (u, self.commit.flag))
                if checks.is_inexact(u)
                else (leafwise.identity, (x,))
                for u, x, p in zip(values, leaves, self.reference.leaves, strict=True)
            ]
            leaves = leafwise.run(calls)
        leaves = self.put_back(leaves, [None] * len(self._whole))
        both = zip(leaves, self._whole, strict=True)
        leaves = [numerics.zeros_like(p) if x is None and p is not None else x for x, p in both]
        updates = cast_back(leaves, self._whole)
        if self.commit is not None:
            self.commit.settle(updates)
        return self._structure.unflatten(updates)

    def kept(self, new: Sequence[Leaf], old: Sequence[Leaf]) -> list[Leaf]:
        """New arrays of a wrapper's state as they are stored; old ones if it is not committed.

        Call it before the new arrays are read elsewhere; otherwise XLA writes them twice, since
        `skip_nonfinite` then chooses afterwards. Moments go by `Moment.write`.
        """
        arrays = [x.array if isinstance(x, Finished) else x for x in new]
        if self.commit is not None:
            calls = [
                (leafwise.identity, (x,))
                if isinstance(n, Finished)
                else (kept(o.dtype, self.commit.clips), (x, o, self.commit.flag))
                for n, x, o in zip(new, arrays, old, strict=True)
            ]
            arrays = leafwise.run(calls)
        arrays = list(map(as_stored, arrays, old))
        if self.commit is not None:
            self.commit.settle(arrays, old)
        return arrays

    def moments(self, new: Sequence[Leaf], old: Sequence[Leaf]) -> PyTree:
        """New arrays in the dtypes of the old, of all of the tree, which stay for other leaves."""
        return self._structure.unflatten(cast_back(self.put_back(new, old), old))

    def gradients(self, new: Sequence[Leaf]) -> PyTree:
        """The gradients as they came in, with new ones for these leaves."""
        return self._structure.unflatten(self.put_back(new, self._updates.leaves))

    def zeros(self) -> PyTree:
        """Updates that change nothing."""
        return self.directions([None] * len(self.g))

    def moment(
        self, name: str, tree: PyTree, shapes: PyTree = None, *, real: bool = False
    ) -> list[Leaf]:
        """The leaves of a part of the state, with the kinds and shapes of what is updated.

        `shapes` are others than the parameters', or None for leaves that have no such part.
        """
        arg = self.like_reference(name, tree, shapes).with_arrays()
        like = self.reference.leaves if shapes is None else trees.flatten(shapes)[0]
        updated = [x if use else None for x, use in zip(like, self.is_updated, strict=True)]
        for i, (moment, x) in enumerate(zip(arg.leaves, updated, strict=True)):
            if self.is_updated[i]:
                self.check_kind(arg, i, moment, x, shapes is not None, real=real)
            elif self.w is None and moment is not None and self.reference.leaves[i] is not None:
                came = checks.describe(self.reference.leaves[i])
                expected = f"a floating dtype, since `{name}` has an array for it"
                self.reference.fail(i, TypeError, f"{came}, expected {expected}")
        checks.same_shapes(arg, self.reference._replace(leaves=updated))
        return list(arg.leaves)

    def check_kind(
        self, arg: ArgLeaves, i: int, moment: Any, x: Any, is_of_some: bool, *, real: bool
    ) -> None:
        """An error where a part of the state is no array like a leaf, or has another form."""
        form, expected_form = forms.find(moment), forms.find(x)
        if form is not None and x is not None:
            form.check(arg, i, moment, x, real=real, remedy=OTHER_FORM)
            return
        if x is None and moment is None:
            return
        if expected_form is not None:
            expected = f"{expected_form.kind.__name__}; {OTHER_FORM}"
            arg.fail(i, TypeError, f"{checks.describe(moment)}, expected {expected}")
        complex_ = jnp.iscomplexobj(x) and not real
        kind = jnp.complexfloating if complex_ else jnp.floating
        if x is None or not (checks.is_array(moment) and jnp.issubdtype(moment.dtype, kind)):
            expected = f"an array of a {'complex' if complex_ else 'real floating'} dtype"
            if is_of_some:
                expected = f"{'None' if x is None else expected}; {OTHER_LEAVES}"
            arg.fail(i, TypeError, f"{checks.describe(moment)}, expected {expected}")


# `nnx.Optimizer` writes the new state back attribute by attribute, and loses nodes that are not
# flax's own, whatever the optimizer.
_NOT_PACKED = (
    "pack a restored state by `pack(state, like=jax.eval_shape(tx.init, params))`; flax's "
    "`nnx.Optimizer` takes packed states apart: give it `pack_small(tx)` and parameters as a tree, "
    "or call `tx.update` yourself"
)

OTHER_FORM = "convert it by `carry_over(state, like=jax.eval_shape(tx.init, params))`"

OTHER_LEAVES = "a state only fits the choice of leaves for which `init` made it"


@functools.cache  # one function object for each dtype, so that JAX's caches find it again
def keeping_update(dtype: np.dtype, clips: bool) -> Function:
    """`rules.kept_update` for parameters of a dtype."""
    largest = numerics.largest_update(dtype) if clips else math.inf
    return functools.partial(rules.kept_update, largest=largest)


def _expected(g: Any, p: Any) -> str | None:
    """What a gradient should have been; `None` if it fits its parameter."""
    if g is None:
        return None
    if p is None:
        return "None, as the parameter is"
    if not checks.is_array(g):
        return "an array or None"
    if g.dtype.kind in "OSU":  # objects and texts of NumPy
        return "an array of numbers"
    floating = jnp.issubdtype(g.dtype, jnp.inexact)
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return f"None, float0 or integers for a parameter of {p.dtype}" if floating else None
    if floating and jnp.iscomplexobj(g) == jnp.iscomplexobj(p):
        return None
    kind = "a complex" if jnp.iscomplexobj(p) else "a real floating"
    return f"{kind} dtype for a parameter of {p.dtype}"
