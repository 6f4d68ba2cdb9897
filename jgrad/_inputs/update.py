"""The way into and out of an update, shared by all transformations."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.state import OptState
from jgrad._packed import arrays as slots
from jgrad._packed import packing
from jgrad._trees import checks, trees
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree


class Leaves:
    """Gradients and parameters of one update, checked against each other and laid side by side.

    A leaf that is not to be updated, with an integer parameter or without a gradient, has the
    gradient `None` here, so that the methods leave it alone.

    Attributes:
      function: the name of the transformation, for messages.
      g: gradients.
      w: parameters, or `None` if they were not given.
      reference: the parameters, or else the gradients; the updates have their shapes and dtypes.
      tree: the tree whose leaves the reference is.
    """

    def __init__(self, function: str, updates: PyTree, params: PyTree) -> None:
        self.function = function
        name, self.tree = ("updates", updates) if params is None else ("params", params)
        self.reference = Row.of(function, name, self.tree).with_arrays()
        self._structure = trees.flatten(self.tree)[1]
        self.slots = slots.of(self.tree)
        self.shapes = packing.shapes(self.tree)
        self.w = None if params is None else checks.parameters(self.reference)
        self._given = self.row("updates", updates)
        self.g = self._gradients(self._given.with_arrays())

    def row(self, name: str, tree: PyTree, *, prefix: bool = False) -> Row:
        """The leaves of a tree with the structure of the parameters, or of a prefix of it."""
        reference = self.reference
        checks.same_structure(self.function, name, tree, reference.name, self.tree, prefix=prefix)
        leaves = trees.broadcast(tree, self.tree) if prefix else trees.flatten(tree)[0]
        return reference._replace(name=name, leaves=leaves)

    def options(self, name: str, tree: PyTree) -> Row:
        """An option for each leaf before packing, from a prefix tree.

        `None` only where nothing is updated.
        """
        row = Row.spread(self.function, name, tree, self.reference.name, self.shapes)
        for slot, g in zip(self.slots, self.g, strict=True):
            for i in slot.positions if g is not None else ():
                if row.leaves[i] is None:
                    row.fail(i, TypeError, "None, expected a value, as this leaf is updated")
        return row

    def gather(self, entries: Sequence[Any]) -> list[Any]:
        """An entry for each leaf, from one for each leaf before packing."""
        found = [slot.gather(entries) for slot in self.slots]
        if any(np.ndim(x) for x, slot in zip(found, self.slots, strict=True) if slot.runs):
            self.check_buffers()
        return found

    def check_buffers(self) -> None:
        """Buffers are as large as their layouts say: it matters here where rows lie."""
        for i, (x, slot) in enumerate(zip(self.reference.leaves, self.slots, strict=True)):
            if slot.runs and not slot.is_whole and x.shape != slot.shape_here:
                remedy = (
                    "inside `vmap`, pack there, or map `update` too; inside `shard_map` or `pmap`, "
                    "`zero` knows which rows are whose"
                )
                problem = f"shape {x.shape}, expected {slot.shape_here} as in its layout; {remedy}"
                self.reference.fail(i, ValueError, problem)

    def updated_shapes(self) -> Row:
        """The leaves before packing, with `None` where nothing is to be updated."""
        row = Row.of(self.function, self.reference.name, self.shapes).with_arrays()
        updated: list[Any] = [None] * len(row.leaves)
        for slot, g in zip(self.slots, self.g, strict=True):
            for i in slot.positions if g is not None else ():
                updated[i] = row.leaves[i]
        return row._replace(leaves=updated)

    def updated(self) -> Row:
        """The reference, with `None` where nothing is to be updated."""
        pairs = zip(self.reference.leaves, self.g, strict=True)
        return self.reference._replace(leaves=[None if g is None else x for x, g in pairs])

    def require_params(self, reason: str) -> list[Any]:
        """The parameters, which have to be there."""
        if self.w is None:
            remedy = "call `update(updates, state, params)`"
            raise ValueError(f"{self.function}: {reason} needs the parameters: {remedy}.")
        return self.w

    def read(
        self, state: OptState, *, mw: bool, vw: bool
    ) -> tuple[jax.Array, Sequence[Any], Sequence[Any]]:
        """The number of this update, counted from 1, and the moments that the method uses."""
        begin = f"{self.function}: `state`: "
        end = f", expected the OptState that this `{self.function}` made with `init`."
        if not isinstance(state, OptState):
            raise TypeError(f"{begin}{type(state).__name__}{end}")
        rows: list[Sequence[Any]] = []
        for name, tree, used in (("mw", state.mw, mw), ("vw", state.vw, vw)):
            if (tree is not None) != used:
                came = f"an OptState {'without' if used else 'with'} `{name}`"
                raise TypeError(f"{begin}{came}, from another method or other options{end}")
            rows.append(self.moment(f"state.{name}", tree, real=name == "vw") if used else [])
        step = jnp.asarray(state.step)
        if step.shape != ():
            remedy = "map `update` over the models, as `init` was"
            raise ValueError(
                f"{self.function}: `state.step`: shape {step.shape}, expected (); {remedy}."
            )
        return optax.safe_increment(step), rows[0], rows[1]

    def updates(self, steps: Sequence[Any]) -> PyTree:
        """-step, in the dtype of the parameter; zero where there is no step."""
        return self.directions([None if step is None else jax.lax.neg(step) for step in steps])

    def directions(self, values: Sequence[Any]) -> PyTree:
        """The values in the dtypes of the parameters; zero where there is none."""
        pairs = zip(values, self.reference.leaves, strict=True)
        return self._structure.unflatten([_like(x, reference) for x, reference in pairs])

    def moments(self, new: Sequence[Any], old: Sequence[Any]) -> PyTree:
        """New moments in the dtypes of the old, which stay where there is no new one."""
        pairs = zip(new, old, strict=True)
        return self._structure.unflatten([y if x is None else _like(x, y) for x, y in pairs])

    def gradients(self, new: Sequence[Any]) -> PyTree:
        """The gradients as they were given, with new ones for the leaves that are updated."""
        pairs = zip(new, self._given.leaves, strict=True)
        return self._structure.unflatten([g if x is None else x for x, g in pairs])

    def zeros(self) -> PyTree:
        """Updates that change nothing."""
        return self.directions([None] * len(self.g))

    def moment(self, name: str, tree: PyTree, *, real: bool = False) -> Sequence[Any]:
        """The leaves of a part of the state, with the shapes and kinds of what is updated."""
        row, updated = self.row(name, tree).with_arrays(), self.updated()
        for i, (moment, reference) in enumerate(zip(row.leaves, updated.leaves, strict=True)):
            if reference is None:
                continue
            complex_ = jnp.iscomplexobj(reference) and not real
            kind = jnp.complexfloating if complex_ else jnp.floating
            if not (checks.is_array(moment) and jnp.issubdtype(moment.dtype, kind)):
                expected = f"an array of a {'complex' if complex_ else 'real floating'} dtype"
                row.fail(i, TypeError, f"{checks.describe(moment)}, expected {expected}")
        checks.same_shapes(row, updated)
        return row.leaves

    def _gradients(self, row: Row) -> list[Any]:
        gradients = []
        for i, (g, p) in enumerate(zip(row.leaves, self.reference.leaves, strict=True)):
            if (expected := _expected(g, p)) is not None:
                row.fail(i, TypeError, f"{checks.describe(g)}, expected {expected}")
            if g is not None and g.dtype == jax.dtypes.float0:
                self.require_params("a float0 gradient")
            gradients.append(g if p is not None and jnp.issubdtype(p.dtype, jnp.inexact) else None)
        checks.same_shapes(row._replace(leaves=gradients), self.reference)
        return gradients


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
    if floating and jnp.iscomplexobj(g) == jnp.iscomplexobj(p):
        return None
    kind = "a complex" if jnp.iscomplexobj(p) else "a real floating"
    return f"{kind} dtype beside a parameter of {p.dtype}"


def _like(x: jax.Array | None, reference: Any) -> jax.Array | None:
    if x is None:
        return None if reference is None else numerics.zeros_like(reference)
    return x if x.dtype == reference.dtype else x.astype(reference.dtype)
