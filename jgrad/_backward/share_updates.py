"""The update of one share, as a function of arrays, and whether it is elementwise.

The update of a layer and that of its whole stack are traced, and operations that do not come from
jgrad are checked: the norm of a layer is not that of the stack, and its random bits differ.
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jgrad._arithmetic import elementwise
from jgrad._arithmetic.programs import Atom, Equation, Program, traced
from jgrad._backward.portions import (
    SAME,
    Cut,
    Owned,
    Portion,
    Whole,
    leaves_of_share,
    tree_of_share,
)
from jgrad._trees import checks, forms, shares
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement
from jgrad._trees.shares import Key, Numbers, Share
from jgrad._trees.told import Combine, telling
from jgrad._trees.unpromised import Unpromised
from jgrad._wrappers.apply_gradients import apply_gradients

_NAME = "step_in_backward"

# What to use instead of optax's transformations, by the names of their factories.
_OURS = {
    "apply_if_finite": "`jgrad.skip_nonfinite`",
    "clip_by_block_rms": "`jgrad.adafactor`, which has this clip",
    "clip_by_global_norm": "`jgrad.clip_by_global_norm`",
    "scale_by_factored_rms": "`jgrad.adafactor`",
    "scale_by_trust_ratio": "`jgrad.lamb`, `jgrad.lars` or `jgrad.scale_by_trust_ratio`",
}
# Primitives that move arrays between devices, but keep elements separate.
_OF_DEVICES = {
    *("device_put", "pcast", "pmax", "pmin", "psum", "psum_invariant", "pvary", "reshard"),
    "sharding_constraint",
}
# Primitives of this library that are right of a slice of rows, too: see `is_elementwise`.
_OF_ROWS = {"iota", "jgrad_leaf_step"}
_AROUND = {"transformation", "chain", "with_extra_args_support"}  # of what has no such function
_UPDATE = re.compile(r"(\w+)\.<locals>\.update")


def check(update: Callable[..., PyTree], layer: PyTree, stack: PyTree) -> None:
    """An error where another library does something else.

    Args:
      update: of a share, in which all that is jgrad's is marked.
      layer: its argument.
      stack: the same for all layers at once.
    """
    programs = [traced(update, x)[0].jaxpr for x in (layer, stack)]
    in_layer, in_stack = (list(_foreign_operations(program.eqns)) for program in programs)
    for outer, equation in (*in_layer, *in_stack):
        if _mixes(equation):
            _refuse(outer, f"`{equation.primitive.name}`, which mixes elements")
    for a, b in itertools.zip_longest(in_layer, in_stack):
        if not (a and b) or elementwise.operation(a[1]) != elementwise.operation(b[1]):
            _refuse((a or b)[0], "something else of a layer than of its stack, by its shape")


def _mixes(equation: Equation) -> bool:
    """Whether an operation does more than something with each element."""
    name = equation.primitive.name
    return name not in _OF_DEVICES and elementwise.mixes(equation, lambda shape: shape != ())


def _refuse(equation: Equation, does: str) -> None:
    name = _maker(equation)
    ours = f"use {_OURS[name]}, or the ordinary step" if name in _OURS else "use the ordinary step"
    raise _error(name, does, ours)


def _error(name: str, does: str, remedy: str) -> ValueError:
    who = f"`{name}` of another library" if name else "a transformation of another library"
    return ValueError(
        f"{_NAME}: `tx`: {who} computes {does}. It sees one layer at a time: {remedy}."
    )


def _foreign_operations(
    equations: Sequence[Equation], outer: Equation | None = None
) -> Iterator[tuple[Equation, Equation]]:
    """The operations of other libraries, each with the outermost that it is in.

    Args:
      equations: of a program.
      outer: the operation whose program it is, if that is of another library.
    """
    for equation in equations:
        scopes = str(equation.source_info.name_stack)
        is_marked = shares.is_others(scopes)
        around = outer if is_marked is None else (outer or equation) if is_marked else None
        for inner in elementwise.programs(equation):
            yield from _foreign_operations(inner.eqns, around)
        if around is not None:
            yield around, equation


def _hands_on(program: Program, inputs: Sequence[object], results: Sequence[Atom]) -> bool:
    """Whether another library makes arrays of which weights are made.

    A number counts if it is of gradients and some weight is one; not the rates of
    `optax.inject_hyperparams`.

    Args:
      program: of an update, or one in it.
      inputs: the gradients and weights among its inputs.
      results: the weights among its results.
    """
    touched, needed = set(inputs), set(results)
    has_numbers = any(x.aval.shape == () for x in results)
    for equation in program.eqns:
        if not touched.isdisjoint(_variables(equation)):
            touched.update(equation.outvars)
    for equation in reversed(program.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        needed.update(x for x in _variables(equation) if has_numbers or x.aval.shape != ())
        counts = has_numbers and not touched.isdisjoint(equation.outvars)
        others = [operation for _, operation in _foreign_operations([equation])]
        if any(counts or x.aval.shape != () for y in others for x in y.outvars):
            return True
    return False


def _variables(equation: Equation) -> list[Atom]:
    """What it reads, without constants."""
    return [x for x in equation.invars if not isinstance(x, core.Literal)]


def _maker(equation: Equation) -> str:
    """The function that made the transformation which an operation is of; "" if nothing says it."""
    traceback = equation.source_info.traceback  # may change, checked in JAX 0.8 to 0.12
    codes = traceback.raw_frames()[0] if hasattr(traceback, "raw_frames") else ()
    names = (_UPDATE.match(code.co_qualname) for code in codes)
    name = next((name[1] for name in names if name), "")
    return "" if name in _AROUND else name


Arrays = list[jax.Array]

core = Unpromised("`step_in_backward`")


class Start(NamedTuple):
    """What the update of a share starts from.

    Attributes:
      layer: its number; None of what is in no stack.
      gradients: of the leaves of the share; None for a leaf that has none.
      weights: these leaves.
      state: the arrays of its state.
    """

    layer: jax.Array | int | None
    gradients: list[jax.Array | None]
    weights: Arrays
    state: Arrays


class Made(NamedTuple):
    """What it makes.

    Attributes:
      weights: new ones.
      state: the new arrays of its state.
      parts: its part of each number of all shares.
    """

    weights: Arrays
    state: Arrays
    parts: Numbers


class _Seen(NamedTuple):
    """What the program of an update shows.

    Attributes:
      parts: the form of those of `Made`.
      mixes: whether another library mixes elements.
      is_foreign: whether one makes arrays that are handed on.
      maker: the first of its transformations that is known by name; "" if none is.
    """

    parts: Numbers
    mixes: bool
    is_foreign: bool
    maker: str


class ShareUpdate:
    """A transformation, of the leaves of one share.

    Attributes:
      portion: what the share has.
      combines: how the numbers of two shares become one; known once it was traced.
    """

    def __init__(
        self,
        whole: Whole,
        portion: Portion,
        mesh_axes: Sequence[Placement | None] | None,
        extra: Mapping[str, PyTree],
        *,
        elementwise: bool,
    ) -> None:
        """Of one step.

        Args:
          whole: the transformation, and all parameters.
          portion: see above.
          mesh_axes: how each leaf of the share is sharded, if the user says it.
          extra: other arguments of an update.
          elementwise: whether the transformations of other libraries are.
        """
        self.portion, self.combines = portion, dict[Key, Combine]()
        self._whole, self._extra = whole, extra
        self._seen: _Seen | None = None
        self._elementwise, self._mesh_axes = elementwise, mesh_axes

    def __call__(self, start: Start, known: Numbers, others: Numbers | None = None) -> Made:
        """One update.

        Args:
          start: see there.
          known: numbers of all shares.
          others: for those that are not known, the parts of all other shares.
        """
        self._check_promise(start)
        return self._run(start, known, others)

    def _check_promise(self, start: Start) -> None:
        if not self._elementwise and (seen := self._look(start)).is_foreign:
            promise = "pass `elementwise=True` if it computes each element by itself"
            remedy = f"{promise}, or use the ordinary step"
            raise _error(seen.maker, "updates", remedy)

    def _run(
        self, start: Start, known: Numbers, others: Numbers | None = None, *, marks: bool = False
    ) -> Made:
        whole, positions = self._whole, self.portion.positions

        def tree(leaves: Sequence[object]) -> PyTree:
            return tree_of_share(whole.structure, positions, leaves)

        share = Share(start.layer, known, others, shapes=whole.shapes, marks=marks)
        with telling(share=share):
            params, state = apply_gradients(
                whole.tx,
                tree(start.gradients),
                self.portion.structure.unflatten(start.state),
                tree(start.weights),
                mesh_axes=None if self._mesh_axes is None else tree(self._mesh_axes),
                **self._extra,
            )
        self.combines |= {key: combine for key, (combine, _) in share.parts.items()}
        parts = {key: part for key, (_, part) in share.parts.items()}
        weights = leaves_of_share(whole.structure, positions, params)
        return Made(weights, jax.tree.leaves(state), parts)

    def owned(self, result: Made) -> Owned:
        """What takes the place of its own arrays."""
        pairs = zip(result.state, self.portion.owned, strict=True)
        return Owned(result.weights, [x for x, use in pairs if use])

    def looks_at_several(self, start: Start) -> bool:
        """Whether another library may compute something of several leaves, or of a whole one."""
        seen = self._look(start)
        return seen.mixes or seen.is_foreign

    def parts(self, start: Start) -> Numbers:
        """The form of its parts."""
        return self._look(start).parts

    def _look(self, start: Start) -> _Seen:
        """What its program shows."""
        if self._seen is None:
            run = functools.partial(self._run, known={}, marks=True)
            closed, result = traced(run, start)
            others = list(_foreign_operations(closed.jaxpr.eqns))
            mixes = any(_mixes(equation) for _, equation in others)
            program, weights = closed.jaxpr, len(result.weights)
            state_arrays = len(jax.tree.leaves(start.state))
            inputs = program.invars[: len(program.invars) - state_arrays]
            is_foreign = _hands_on(program, inputs, program.outvars[:weights])
            maker = next(filter(None, (_maker(outer) for outer, _ in others)), "")
            self._seen = _Seen(result.parts, mixes, is_foreign, maker)
        return self._seen

    def _check_elements(self, layer: Start) -> None:
        def many(x: Leaf, cut: Cut | None) -> Leaf:
            if x is None or cut is None or cut is SAME:
                return x
            return jax.lax.concatenate([x] * (self.portion.layers or 1), cut.axis)

        def stack(start: Start) -> Start:
            state = zip(start.state, self.portion.cuts, strict=True)
            cuts: Sequence[Cut | None] = self.portion.weight_cuts or [None] * len(start.weights)
            return start._replace(
                gradients=list(map(many, start.gradients, cuts)),
                weights=list(map(many, start.weights, cuts)),
                state=[many(x, cut) for x, (_, cut) in state],
            )

        def update(start: Start) -> Made:
            return self._run(start, {}, marks=True)

        check(update, layer, jax.eval_shape(stack, layer))

    def numbers_read(self, start: Start) -> dict[Key | None, set[Key]]:
        """Which numbers of all shares its own arrays need, by None; and which each number needs.

        What has no layers is the same for all of them: an error where it is computed of one. What
        other libraries do with a layer is checked, too.
        """
        forms, mixes, is_foreign, _ = self._look(start)
        if is_foreign:
            self._check_elements(start)
            self._check_promise(start)

        def outputs(known: Numbers, start: Start) -> tuple[Owned, Numbers, Arrays]:
            result = self(start, known)
            pairs = zip(result.state, self.portion.are_of_leaves, strict=True)
            return self.owned(result), result.parts, [x for x, use in pairs if not use]

        closed, (owned, parts, others) = traced(outputs, forms, start)
        program = _with_barriers_apart(closed.jaxpr)
        input_keys = _key_of_leaves(forms)
        result_keys: list[Key | int | None] = [None] * len(jax.tree.leaves(owned))
        result_keys += _key_of_leaves(parts)
        result_keys += range(len(others))

        def read_for(result: Key | int | None) -> list[bool]:
            used = [x == result for x in result_keys]
            read: list[bool] = core.dce_jaxpr(program, used)[1]
            return read

        share_inputs = jax.tree.leaves(start._replace(state=[]))
        alone = [*[True] * len(share_inputs), *self.portion.are_of_leaves]
        for i in range(len(others)):
            reads = read_for(i)[len(input_keys) :]
            if any(map(operator.and_, reads, alone)):
                self._refuse_state(i)
        if mixes and not is_foreign:  # it passes on its input, which nobody has seen
            self._check_elements(start)
        return {key: set(itertools.compress(input_keys, read_for(key))) for key in (None, *forms)}

    def is_elementwise(self, start: Start) -> bool:
        """Whether its own arrays are computed element by element, and no number of its state.

        So a slice of rows is updated as it would be within its leaf. Random bits are those of the
        leaf (`shares.in_stack`), and 8 bits have blocks within rows.
        """
        try:
            seen = self._look(start)
        except (TypeError, ValueError):  # an option has an entry for each row of the leaf
            return False

        def outputs(known: Numbers, start: Start) -> tuple[Owned, Numbers]:
            result = self(start, known)
            return self.owned(result), result.parts

        closed, (owned, parts) = traced(outputs, seen.parts, start)
        are_own = [True] * len(jax.tree.leaves(owned)) + [False] * len(jax.tree.leaves(parts))
        program, _ = core.dce_jaxpr(closed.jaxpr, are_own)
        _, read = core.dce_jaxpr(closed.jaxpr, [not x for x in are_own])
        if any(read[len(read) - len(start.state) :]):
            return False
        passed = _OF_DEVICES if seen.is_foreign else _OF_DEVICES | _OF_ROWS

        (cut,) = self.portion.weight_cuts

        def has_rows(shape: Sequence[int]) -> bool:
            return math.prod(shape) >= cut.length

        mixes = any(has_rows(x.shape) for x in closed.consts) or any(
            elementwise.mixes(eqn, has_rows) and forms.SCOPE not in str(eqn.source_info.name_stack)
            for eqn in elementwise.inner_equations(program.eqns, passed)
        )
        return not mixes and all(cut is not SAME for _, cut in self.portion.owned_cuts)

    def _refuse_state(self, i: int) -> None:
        count = len(self.portion.cuts)
        arrays = jax.tree_util.tree_leaves_with_path(self.portion.structure.unflatten(range(count)))
        paths = [path for path, k in arrays if not self.portion.are_of_leaves[k]]
        came = "an array that no layer owns, computed from the gradients of a few layers"
        expected = "expected transformations that compute each element by itself"
        where = checks.at(jax.tree_util.keystr(paths[i]))
        raise ValueError(f"step_in_backward: `state`{where}: {came}; {expected}.")


def _with_barriers_apart(program: Program) -> Program:
    """The same, to ask what depends on what: a barrier joins nothing."""
    eqns = []
    for eqn in program.eqns:
        if eqn.primitive.name != "optimization_barrier":
            eqns.append(eqn)
            continue
        for x, y in zip(eqn.invars, eqn.outvars, strict=True):
            eqns.append(eqn.replace(invars=[x], outvars=[y]))
    return program.replace(eqns=eqns)


def _key_of_leaves(numbers: Numbers) -> list[Key]:
    """For each array of numbers, whose it is."""
    return [key for key in sorted(numbers) for _ in jax.tree.leaves(numbers[key])]


def pruned(f: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`f(*args)`, without operations whose results are unused.

    In a loop JAX leaves them in, and a kernel would write results that are not used.
    """
    closed, form = traced(f, *args)
    program, used = core.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    leaves = [x for x, use in zip(jax.tree.leaves(args), used, strict=True) if use]
    results = core.eval_jaxpr(program, closed.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(form), results)
