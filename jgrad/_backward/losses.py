"""The jaxpr of a loss, split at its calls of `scan_layers`: what is read where.

The loss is traced once. In its jaxpr, a call of `scan_layers` is a scan in a scope of that name,
and whatever comes between two calls is a piece.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from jgrad._arithmetic import elementwise
from jgrad._arithmetic.programs import Atom, Equation, Program, traced
from jgrad._backward.portions import Cut
from jgrad._backward.scan_layers import leaves_of_call
from jgrad._trees import checks, host_memory, trees
from jgrad._trees.checks import in_short
from jgrad._trees.protocols import KeyPath, PyTree
from jgrad._trees.told import Stack
from jgrad._trees.trees import Structure
from jgrad._trees.unpromised import Unpromised

_NAME = "step_in_backward"

core = Unpromised(f"`{_NAME}`")

T = TypeVar("T")
Arrays = list[jax.Array]
Cotangents = list[jax.Array | None]  # None for what is not differentiated
# By variable of a jaxpr.
Environment = dict[Atom, jax.Array]

# What to do where a stack is read by a call and by something else, or by two calls.
_OF_PENALTY = (
    "compute a penalty in `block`, by `has_ys=True`, and move what layers share out of the "
    "stack, where `block` may read it"
)
_OF_CALLS = (
    "call it once, on a concatenated batch; a model that applies its layers several times needs "
    "the ordinary step"
)

# Primitives that may contain a call: whatever else they do is done without them.
_JIT = {"jit", "pjit"}
_SEEN_THROUGH = {"checkpoint", "remat", "remat2", *_JIT}


@dataclasses.dataclass(frozen=True, eq=False)
class ScanCall:
    """One call of `scan_layers`: the body of its scan, and variables around it.

    Attributes:
      positions: of the stacked leaves among those of the parameters.
      cuts: where each of them has its layers.
      count: the number of layers.
      as_read: for each of them, what `block` reads of a layer that is a stack of one.
      body: (what a layer reads beside, carry, layer, xs) -> (carry, ys).
      stacks, others, carry, xs: the operands.
      after, ys: the results.
    """

    positions: tuple[int, ...]
    cuts: tuple[Cut, ...]
    count: int
    as_read: Sequence[Callable[[jax.Array], jax.Array]]
    body: Callable[..., Arrays]
    stacks: list[Atom]
    others: list[Atom]
    carry: list[Atom]
    xs: list[Atom]
    after: list[Atom]
    ys: list[Atom]

    @property
    def operands(self) -> list[Atom]:
        """The variables of all, in the order of the body."""
        return [*self.others, *self.carry, *self.stacks, *self.xs]

    def by_role(self, operands: Sequence[T]) -> list[list[T]]:
        """Operands of the body: others, carry, layer, xs."""
        rest = iter(operands)
        roles = (self.others, self.carry, self.stacks, self.xs)
        return [[*itertools.islice(rest, len(role))] for role in roles]


class _Line(NamedTuple):
    """An operation of the loss, and what it reads and makes; or a call."""

    reads: list[Atom]
    makes: list[Atom]
    equation: Equation
    call: ScanCall | None


class TracedLoss:
    """A loss as a jaxpr in which calls of `scan_layers` are known.

    Attributes:
      calls: of `scan_layers`, in order.
      stacks: the variables of all stacked leaves.
      form: the structure of what the loss returns.
      lines: what it does.
      differentiable: the variables that have cotangents.
      early: for each call, the leaves in no stack that nothing before it reads, which have their
        whole gradients when the backward pass comes to its layers.
    """

    def __init__(
        self, loss: Callable[..., PyTree], params: PyTree, args: Sequence[PyTree], *, has_aux: bool
    ) -> None:
        """Of arrays, which may be traced."""
        # `block` sees its layer on the device, where the driver fetches it to.
        on_device = jax.tree.map(host_memory.as_on_device, params)
        closed, result = traced(lambda params: loss(params, *args), on_device)
        if any(_is_seen_through(eqn, closed.jaxpr) for eqn in closed.jaxpr.eqns):
            closed, _ = traced(functools.partial(_seen_through, closed), jax.tree.leaves(on_device))
        self.jaxpr, self.consts, self._paths = closed.jaxpr, closed.consts, trees.paths(params)
        lines = self._lines()
        self.calls = [line.call for line in lines if line.call is not None]
        self.stacks = {x for call in self.calls for x in call.stacks}
        if not self.calls:
            expected = "expected one, which says where the layers are"
            raise ValueError(f"{_NAME}: `loss`: no call of `scan_layers`, {expected}.")
        _check_value(result, has_aux)
        self.form: Structure = jax.tree.structure(result)
        self.differentiable = self._between_parameters_and_value(lines)
        lines_of_value = [x for x in lines if x.call or not self.differentiable.isdisjoint(x.makes)]
        self._check_stacks(lines_of_value)
        self.early = self._first_read(lines_of_value)
        self.lines = self._alive(lines)

    def stacks_by_path(self, params: PyTree) -> dict[KeyPath, Stack]:
        """Where leaves have layers."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        return {
            paths[i]: Stack(cut.axis, call.count, cut.length)
            for call in self.calls
            for i, cut in zip(call.positions, call.cuts, strict=True)
        }

    def _lines(self) -> list[_Line]:
        """What the loss does; of its calls of `scan_layers` those that update their layers.

        A call that is not differentiated is a loop like any other, unless it has stacks of its own.
        """
        eqns = self.jaxpr.eqns
        lines = [_Line(list(filter(is_variable, x.invars)), x.outvars, x, None) for x in eqns]
        known = self._between_parameters_and_value(lines)
        made_by = {x: line.equation for line in lines for x in line.makes}
        is_apart = [known.isdisjoint(line.makes) for line in lines]
        elsewhere = [i for i, eqn in enumerate(eqns) if _is_elsewhere(eqn)]
        calls = [i for i, eqn in enumerate(eqns) if leaves_of_call(eqn) and i not in elsewhere]
        calls.sort(key=is_apart.__getitem__)
        # What is apart may be anywhere, beside a call that is not.
        if elsewhere and not (
            all(is_apart[i] for i in elsewhere) and any(not is_apart[i] for i in calls)
        ):
            where = "`grad`, `shard_map`, a branch, a loop or a custom derivative"
            remedy = "expected it outside of these; loop and differentiate inside of `block`"
            raise ValueError(f"scan_layers: called inside {where}, {remedy}.")
        read = {x for i, line in enumerate(lines) if not is_apart[i] for x in line.reads}
        for i in calls:
            call = self._call(eqns[i], made_by, may_fail=not is_apart[i])
            if call is None:
                continue
            reads = list(filter(is_variable, call.operands))
            is_alone = all(x not in read and reads.count(x) == 1 for x in call.stacks)
            if is_alone or not is_apart[i]:
                read.update(call.stacks)
                lines[i] = _Line(reads, eqns[i].outvars, eqns[i], call)
        return lines

    def _call(
        self, eqn: Equation, made_by: dict[Atom, Equation], *, may_fail: bool
    ) -> ScanCall | None:
        """What the operands of a scan are: those of all layers, the carry, stacks and `xs`.

        Where a stack is no parameter, an error if it may fail, else None.
        """
        body = eqn.params["jaxpr"]
        inner, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
        scanned = sum(
            x.aval.ndim > y.aval.ndim for x, y in zip(eqn.invars, inner.invars, strict=True)
        )
        ys = sum(x.aval.ndim > y.aval.ndim for x, y in zip(eqn.outvars, inner.outvars, strict=True))
        carries, first = len(eqn.outvars) - ys, len(eqn.invars) - scanned
        last = first + (leaves_of_call(eqn) or 0)
        inputs = {x: i for i, x in enumerate(self.jaxpr.invars)}
        count = eqn.params["length"]
        stacks, cuts, as_read = [], [], []
        for x in eqn.invars[first:last]:
            chain, axis = list[Equation](), 0
            while x in made_by and (before := _in_front(made_by[x], axis, count)) is not None:
                chain.insert(0, _on_one_layer(made_by[x], axis))
                x, axis = before
            if x not in inputs and may_fail:
                self._refuse_changed(x, made_by)
            if x not in inputs:
                return None
            stacks.append(x)
            cuts.append(Cut(axis, x.aval.shape[axis] // count))
            as_read.append(functools.partial(self._as_read, chain, x))
        return ScanCall(
            positions=tuple(map(inputs.__getitem__, stacks)),
            cuts=tuple(cuts),
            count=count,
            as_read=as_read,
            body=lambda operands: core.eval_jaxpr(inner, consts, *operands),
            stacks=stacks,
            others=eqn.invars[: first - carries],
            carry=eqn.invars[first - carries : first],
            xs=eqn.invars[last:],
            after=eqn.outvars[:carries],
            ys=eqn.outvars[carries:],
        )

    def _as_read(self, chain: Sequence[Equation], x: Atom, layer: jax.Array) -> jax.Array:
        """A layer as operations on its stack make it, without the axis of layers."""
        if chain:
            program = program_of(self.jaxpr, chain, [x], chain[-1].outvars)
            (layer,) = core.eval_jaxpr(program, (), layer)
        return jax.lax.squeeze(layer, (0,))

    def _refuse_changed(self, x: Atom, made_by: dict[Atom, Equation]) -> NoReturn:
        """A stack is computed, of parameters or of other arrays."""
        sources = {x}
        for eqn in reversed(self.jaxpr.eqns):
            if sources.intersection(eqn.outvars):
                sources.update(y for y in eqn.invars if is_variable(y))
        paths = [
            path for path, y in zip(self._paths, self.jaxpr.invars, strict=True) if y in sources
        ]
        came, remedy = f"{in_short(x.aval)} outside of `params`", "pass what is not updated as `xs`"
        if paths:
            came = f"computed from `params`{checks.at(paths[0])}"
            remedy = (
                "store it as it is scanned, a stack for each call, or change it inside of `block`"
            )
        expected = "expected a leaf, which may be cast, transposed or grouped as a whole"
        raise ValueError(f"scan_layers: `layers`: {came}, {expected}; {remedy}.")

    def _between_parameters_and_value(self, lines: Sequence[_Line]) -> set[Atom]:
        """The floating variables that depend on parameters, and on which the value depends."""
        known = set(filter(is_floating, self.jaxpr.invars))
        lines = [line for line in lines if line.equation.primitive.name != "stop_gradient"]
        for line in lines:
            if not known.isdisjoint(line.reads):
                known.update(filter(is_floating, line.makes))
        needed = {x for x in self.jaxpr.outvars[:1] if is_variable(x)}
        for line in reversed(lines):
            if not needed.isdisjoint(line.makes):
                needed.update(filter(is_floating, line.reads))
        return known & needed

    def _check_stacks(self, lines: Sequence[_Line]) -> None:
        """Only one call reads a stack in what is differentiated: another would see new weights."""
        read, called = set[Atom](), set[Atom]()
        for line in lines:
            stacks_of_call = [] if line.call is None else line.call.stacks
            now = [x for x in line.reads if x in self.stacks]
            twice = read.intersection(now) | {
                x for x in now if now.count(x) > stacks_of_call.count(x)
            }
            twice |= {x for x in stacks_of_call if stacks_of_call.count(x) > 1}
            if twice:
                inputs = list(self.jaxpr.invars)
                path = self._paths[min(map(inputs.index, twice))]
                remedy = _OF_PENALTY if twice - called.intersection(stacks_of_call) else _OF_CALLS
                raise ValueError(
                    f"{_NAME}: `params`{checks.at(path)}: read twice, expected that only one call "
                    f"of `scan_layers` reads it: {remedy}."
                )
            read.update(now)
            called.update(stacks_of_call)

    def _first_read(self, lines: Sequence[_Line]) -> list[list[int]]:
        """For each call, the leaves in no stack that are read behind it, and not before."""
        leaves: list[list[int]] = [[] for _ in self.calls]
        position_of = {x: i for i, x in enumerate(self.jaxpr.invars)}
        left, calls = self.differentiable.intersection(position_of) - self.stacks, 0
        for line in lines:
            read = left.intersection(line.reads)
            if calls:
                leaves[calls - 1] += sorted(position_of[x] for x in read)
            left -= read
            calls += line.call is not None
        return leaves

    def _alive(self, lines: Sequence[_Line]) -> list[_Line]:
        """Those that are calls, have effects, or make something that is read."""
        read = {x for x in self.jaxpr.outvars if is_variable(x)}
        alive = []
        for line in reversed(lines):
            if line.call or line.equation.effects or not read.isdisjoint(line.makes):
                read.update(line.reads)
                alive.append(line)
        return alive[::-1]


def _is_elsewhere(equation: Equation) -> bool:
    """Whether a call is inside of an operation that is none, or a part of a derivative."""
    scopes, is_call = str(equation.source_info.name_stack), leaves_of_call(equation) is not None
    return _hides_call(equation) or (is_call and ("jvp(" in scopes or equation.params["reverse"]))


def _hides_call(equation: Equation) -> bool:
    """Whether there is a call inside of an operation that is none."""
    if leaves_of_call(equation) is not None:
        return False
    inner = (eqn for program in elementwise.programs(equation) for eqn in program.eqns)
    return any(leaves_of_call(eqn) is not None or _hides_call(eqn) for eqn in inner)


def _is_seen_through(eqn: Equation, jaxpr: Program) -> bool:
    """Whether it has a call inside; or may cast a stack, or stop its gradient."""
    name, arguments = eqn.primitive.name, {*jaxpr.invars}
    reads_argument = any(is_variable(x) and x in arguments for x in eqn.invars)
    return name in _SEEN_THROUGH and (_hides_call(eqn) or (name in _JIT and reads_argument))


def _seen_through(closed: Any, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates a program without `jit` and `checkpoint` around calls."""
    jaxpr = getattr(closed, "jaxpr", closed)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(variables, [*getattr(closed, "consts", ()), *arguments], strict=True))
    for eqn in jaxpr.eqns:
        values = [value_of(x, env) for x in eqn.invars]
        if _is_seen_through(eqn, jaxpr):
            results = _seen_through(eqn.params["jaxpr"], values)
        else:
            read = {x: y for x, y in zip(eqn.invars, values, strict=True) if is_variable(x)}
            program = program_of(jaxpr, [eqn], [*read], eqn.outvars)
            results = core.eval_jaxpr(program, (), *read.values())
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [value_of(x, env) for x in jaxpr.outvars]


def program_of(
    jaxpr: Program, eqns: Sequence[Equation], inputs: Sequence[Atom], results: Sequence[Atom]
) -> Program:
    """Some equations of a jaxpr, as one."""
    names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(results)}
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(results),
        eqns=list(eqns),
        debug_info=jaxpr.debug_info._replace(**names),
    )


def value_of(x: Atom, env: Environment) -> jax.Array:
    return env[x] if is_variable(x) else jnp.asarray(x.val, x.aval.dtype)


def is_variable(x: Atom) -> bool:
    return not isinstance(x, core.Literal)


def is_floating(x: Atom) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.inexact))


def _in_front(eqn: Equation, axis: int, layers: int) -> tuple[Atom, int] | None:
    """Of what an operation does the same with each layer, and along which axis; None of others."""
    arrays = [x for x in eqn.invars if is_variable(x)]
    if len(arrays) != 1 or len(eqn.outvars) != 1 or elementwise.programs(eqn):
        return None
    name, (x,), (y,) = eqn.primitive.name, arrays, eqn.outvars
    if name == "transpose":
        return x, eqn.params["permutation"][axis]
    if (
        name == "reshape" and eqn.params.get("dimensions") is None
    ):  # layers may be groups of its rows
        shape, ahead = x.aval.shape, math.prod(y.aval.shape[:axis])
        fits = (k for k, n in enumerate(shape) if math.prod(shape[:k]) == ahead and n % layers == 0)
        return next(((x, k) for k in fits), None)
    is_elementwise = not elementwise.mixes(eqn, lambda _: True)
    return (x, axis) if is_elementwise or name in ("pcast", "sharding_constraint") else None


def _on_one_layer(eqn: Equation, axis: int) -> Equation:
    """Such an operation, of a stack of one."""
    if eqn.primitive.name != "reshape":
        return eqn
    sizes = eqn.params["new_sizes"]
    return eqn.replace(params={**eqn.params, "new_sizes": (*sizes[:axis], 1, *sizes[axis + 1 :])})


def _check_value(result: PyTree, has_aux: bool) -> None:
    """The loss is a real scalar, beside other results if there are some."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if has_aux and not is_pair:
        expected = "`(value, aux)`, as `has_aux=True` says"
        came = "an array" if isinstance(result, jax.ShapeDtypeStruct) else type(result).__name__
        raise TypeError(f"{_NAME}: `loss` returns {came}, expected {expected}.")
    value = result[0] if has_aux else result
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array or value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        came = in_short(value) if is_array else type(value).__name__
        hint = "; use `has_aux=True` for a pair" if is_pair else ""
        raise TypeError(f"{_NAME}: `loss` returns {came}, expected a real floating scalar{hint}.")
