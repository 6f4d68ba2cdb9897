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
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from jgrad._arithmetic import elementwise
from jgrad._arithmetic.programs import Atom, ClosedProgram, Equation, Program, traced
from jgrad._backward.portions import (
    SAME,
    Cut,
    Model,
    Owned,
    Portion,
    Start,
    Whole,
    leaves_of_share,
    tree_of_share,
)
from jgrad._trees import forms, shares
from jgrad._trees.places import whole_along
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


def _mixes(equation: Equation) -> bool:
    """Whether an operation does more than something with each element."""
    name = equation.primitive.name
    return name not in _OF_DEVICES and elementwise.mixes(equation, lambda shape: shape != ())


def _refuse(name: str, does: str, remedy: str = "") -> NoReturn:
    """An error of what another library's transformation of that name computes."""
    ours = f"use {_OURS[name]}, or the ordinary step" if name in _OURS else "use the ordinary step"
    who = f"`{name}` of another library" if name else "a transformation of another library"
    raise ValueError(
        f"{_NAME}: `tx`: {who} computes {does}. It sees one layer at a time: {remedy or ours}."
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


class Made(NamedTuple):
    """What it makes.

    Attributes:
      owned: what takes the place of its own arrays.
      parts: its part of each number of all shares.
      others: the new arrays of its state that are of no leaf alone.
    """

    owned: Owned
    parts: Numbers
    others: Arrays


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
        model: Model,
        places: Sequence[Placement | None],
        extra: Mapping[str, PyTree],
        portion: Portion,
        *,
        elementwise: bool,
    ) -> None:
        """Of one step.

        Args:
          whole: the transformation, and all parameters.
          model: all arrays.
          places: how each leaf is sharded, if the user says it; else none.
          extra: other arguments of an update.
          portion: see above.
          elementwise: whether the transformations of other libraries are.
        """
        self.portion, self.combines = portion, dict[Key, Combine]()
        self._whole, self._model, self._extra = whole, model, extra
        cuts = zip(portion.positions, portion.weight_cuts, strict=True) if places else ()
        known = ((places[i], cut.axis) for i, cut in cuts)
        self._mesh_axes = [place and whole_along(place, axis) for place, axis in known]
        self._elementwise = elementwise

    def __call__(self, start: Start, known: Numbers, others: Numbers | None = None) -> Made:
        """One update.

        Args:
          start: see there.
          known: numbers of all shares.
          others: for those that are not known, the parts of all other shares.
        """
        if not self._elementwise and self._seen.is_foreign:
            promise = "pass `elementwise=True` if it computes each element by itself"
            _refuse(self._seen.maker, "updates", f"{promise}, or use the ordinary step")
        return self._run(start, known, others)

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
                mesh_axes=tree(self._mesh_axes) if self._mesh_axes else None,
                **self._extra,
            )
        self.combines |= {key: combine for key, (combine, _) in share.parts.items()}
        parts = {key: part for key, (_, part) in share.parts.items()}
        weights: Arrays = leaves_of_share(whole.structure, positions, params)
        arrays: Arrays = jax.tree.leaves(state)
        own = list(itertools.compress(arrays, self.portion.owned))
        are_others = map(operator.not_, self.portion.are_of_leaves)
        return Made(Owned(weights, own), parts, list(itertools.compress(arrays, are_others)))

    @functools.cached_property
    def example(self) -> Start:
        """The types of what an update is given: a gradient has that of its weight."""
        layer = None if self.portion.layers is None else 0
        model, portion = self._model, self.portion
        weights, state = jax.eval_shape(
            lambda: (model.weights_of(portion, layer), model.state_of(portion, layer))
        )
        gradients = [w if jnp.issubdtype(w.dtype, jnp.inexact) else None for w in weights]
        return Start(layer, gradients, weights, state)

    @property
    def looks_at_several(self) -> bool:
        """Whether another library may compute something of several leaves, or of a whole one."""
        return self._seen.mixes or self._seen.is_foreign

    @property
    def parts(self) -> Numbers:
        """The form of its parts."""
        return self._seen.parts

    @functools.cached_property
    def _seen(self) -> _Seen:
        """What its program shows."""
        closed, result = self._marked(self.example)
        others = list(_foreign_operations(closed.jaxpr.eqns))
        mixes = any(_mixes(equation) for _, equation in others)
        program, weights = closed.jaxpr, len(result.owned.weights)
        inputs = program.invars[: len(program.invars) - len(self.example.state)]
        is_foreign = _hands_on(program, inputs, program.outvars[:weights])
        maker = next(filter(None, (_maker(outer) for outer, _ in others)), "")
        return _Seen(result.parts, mixes, is_foreign, maker)

    def _marked(self, start: Start) -> tuple[ClosedProgram, Made]:
        """The program of an update in which all that is jgrad's is marked, and what it makes."""
        return traced(functools.partial(self._run, known={}, marks=True), start)

    def _program(self) -> tuple[ClosedProgram, Made]:
        """The program of an update by numbers of all shares, and what it makes."""
        return traced(lambda known, start: self(start, known), self.parts, self.example)

    def _check_elements(self) -> None:
        """An error where another library does something else of a layer than of its stack."""
        layers = self.portion.layers or 1

        def many(x: Leaf, cut: Cut | None) -> Leaf:
            if x is None or cut is None or cut is SAME:
                return x
            return jax.lax.concatenate([x] * layers, cut.axis)

        def stacked(layer: Start) -> Start:
            cuts = self.portion.weight_cuts
            state = zip(layer.state, self.portion.cuts, strict=True)
            return layer._replace(
                gradients=list(map(many, layer.gradients, cuts)),
                weights=list(map(many, layer.weights, cuts)),
                state=[many(x, cut) for x, (_, cut) in state],
            )

        programs = map(self._marked, (self.example, jax.eval_shape(stacked, self.example)))
        in_layer, in_stack = (list(_foreign_operations(x.jaxpr.eqns)) for x, _ in programs)
        for outer, equation in (*in_layer, *in_stack):
            if _mixes(equation):
                _refuse(_maker(outer), f"`{equation.primitive.name}`, which mixes elements")
        for a, b in itertools.zip_longest(in_layer, in_stack):
            if not (a and b) or elementwise.operation(a[1]) != elementwise.operation(b[1]):
                does = "something else of a layer than of its stack, by its shape"
                _refuse(_maker((a or b)[0]), does)

    def numbers_read(self) -> dict[Key | None, set[Key]]:
        """Which numbers of all shares its own arrays need, by None; and which each number needs.

        What has no layers is the same for all of them: an error where it is computed of one. What
        other libraries do with a layer is checked, too.
        """
        if self._seen.is_foreign:
            self._check_elements()
        closed, result = self._program()
        program = _with_barriers_apart(closed.jaxpr)
        input_keys = _key_of_leaves(self.parts)
        result_keys: list[Key | int | None] = [None] * len(jax.tree.leaves(result.owned))
        result_keys += _key_of_leaves(result.parts)
        result_keys += range(len(result.others))

        def read_for(result: Key | int | None) -> list[bool]:
            read: list[bool] = core.dce_jaxpr(program, [x == result for x in result_keys])[1]
            return read

        share_inputs = jax.tree.leaves(self.example._replace(state=[]))
        alone = [*[True] * len(share_inputs), *self.portion.are_of_leaves]
        for i in range(len(result.others)):
            if any(itertools.compress(read_for(i)[len(input_keys) :], alone)):
                self._refuse_state(i)
        if self._seen.mixes and not self._seen.is_foreign:  # it passes on its input, unseen
            self._check_elements()
        keys = None, *self.parts
        return {key: set(itertools.compress(input_keys, read_for(key))) for key in keys}

    def is_elementwise(self) -> bool:
        """Whether its own arrays are computed element by element, and no number of its state.

        So a slice of rows is updated as it would be within its leaf. Random bits are those of the
        leaf (`shares.in_stack`), and 8 bits have blocks within rows.
        """
        try:
            is_foreign = self._seen.is_foreign
        except (TypeError, ValueError):  # an option has an entry for each row of the leaf
            return False
        closed, result = self._program()
        owned, parts, others = (len(jax.tree.leaves(x)) for x in result)
        program, _ = core.dce_jaxpr(closed.jaxpr, [True] * owned + [False] * (parts + others))
        are_parts = [False] * owned + [True] * parts + [False] * others
        _, read = core.dce_jaxpr(closed.jaxpr, are_parts)
        if any(read[len(read) - len(self.example.state) :]):
            return False
        passed = _OF_DEVICES if is_foreign else _OF_DEVICES | _OF_ROWS
        (cut,) = self.portion.weight_cuts

        def has_rows(shape: Sequence[int]) -> bool:
            return math.prod(shape) >= cut.length

        mixes = any(has_rows(x.shape) for x in closed.consts) or any(
            elementwise.mixes(eqn, has_rows) and forms.SCOPE not in str(eqn.source_info.name_stack)
            for eqn in elementwise.inner_equations(program.eqns, passed)
        )
        return not mixes and all(cut is not SAME for _, cut in self.portion.owned_cuts)

    def _refuse_state(self, i: int) -> NoReturn:
        """Of the arrays of its state that are of no leaf alone, one needs a few gradients."""
        are_of_leaves = zip(self.portion.cuts, self.portion.are_of_leaves, strict=True)
        positions = [position for (position, _), is_own in are_of_leaves if not is_own]
        came = "an array that no layer owns, computed from the gradients of a few layers"
        expected = "expected transformations that compute each element by itself"
        self._whole.state_shapes.fail(positions[i], ValueError, f"{came}; {expected}")


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
