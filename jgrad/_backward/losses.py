"""A loss, cut where it calls `scan_layers`: each piece between two calls has a vjp of its own.

The loss is traced once. In its jaxpr a call of `scan_layers` is a scan in a scope of that name, and
what stands between two of them is a piece. In the forward pass each piece runs under `jax.vjp`, and
a scan keeps what the backward pass of its layers reads. In the backward pass, nothing but
cotangents stands between the pieces and the loops over layers, so that a loop may take the weights
of its layers and return new ones, which is not possible inside of anything that JAX differentiates.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from jgrad._arithmetic import elementwise, numerics
from jgrad._backward.portions import Cut
from jgrad._backward.scan_layers import leaves_of_call
from jgrad._trees import checks, trees
from jgrad._trees.forms import in_short
from jgrad._trees.protocols import KeyPath, PyTree
from jgrad._trees.told import Stack
from jgrad._trees.trees import Structure
from jgrad._trees.unpromised import Unpromised

_NAME = "step_in_backward"

core = Unpromised(f"`{_NAME}`")

Arrays = list[jax.Array]
Cotangents = list[jax.Array | None]  # None of what is not differentiated
# By variable of a jaxpr.
Environment = dict[Any, Any]

# Operations through which a call is seen: what they do beside it is done without them.
_JIT = {"jit", "pjit"}
_SEEN_THROUGH = {"checkpoint", "remat", "remat2", *_JIT}


# ---- the trace ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ScanCall:
    """One call of `scan_layers`: the body of its scan, and variables around it.

    Attributes:
      positions: of the stacked leaves among those of the parameters.
      axes: along which each of them has its layers.
      count: the number of layers.
      as_read: for each of them, what a block reads of a layer that is a stack of one.
      body: (what a layer reads beside, carry, layer, xs) -> (carry, ys).
      stacks, others, carry, xs: the operands.
      after, ys: the results.
    """

    positions: tuple[int, ...]
    axes: tuple[int, ...]
    count: int
    as_read: Sequence[Callable[[jax.Array], jax.Array]]
    body: Callable[..., Arrays]
    stacks: list[Any]
    others: list[Any]
    carry: list[Any]
    xs: list[Any]
    after: list[Any]
    ys: list[Any]

    @property
    def operands(self) -> list[Any]:
        """The variables of all, in the order of the body."""
        return [*self.others, *self.carry, *self.stacks, *self.xs]

    def parts(self, operands: Sequence[Any]) -> list[list[Any]]:
        """Operands of the body: others, carry, layer, xs."""
        given = iter(operands)
        parts = (self.others, self.carry, self.stacks, self.xs)
        return [[*itertools.islice(given, len(part))] for part in parts]


class _Line(NamedTuple):
    """An operation of the loss, and what it reads and makes; or a call."""

    reads: list[Any]
    makes: list[Any]
    equation: Any
    call: ScanCall | None


class TracedLoss:
    """A loss as a jaxpr in which calls of `scan_layers` are known.

    Attributes:
      calls: of `scan_layers`, in order.
      form: the structure of what the loss returns.
      lines: what it does.
      differentiable: the variables that have cotangents.
      early: for each call, the leaves in no stack that nothing before it reads, which have their
        whole gradients when the backward pass comes to its layers.
    """

    def __init__(
        self, loss: Callable[..., Any], params: PyTree, args: Sequence[Any], *, has_aux: bool
    ) -> None:
        """Of arrays, which may be traced."""
        leaves, structure = _flat(params)
        closed, result = jax.make_jaxpr(
            lambda leaves: loss(structure.unflatten(leaves), *args), return_shape=True
        )(leaves)
        if any(_is_seen_through(eqn, closed.jaxpr) for eqn in closed.jaxpr.eqns):
            closed = jax.make_jaxpr(functools.partial(_seen_through, closed))(leaves)
        self.jaxpr, self.consts, self._paths = closed.jaxpr, closed.consts, trees.paths(params)
        lines = self._lines()
        self.calls = [line.call for line in lines if line.call is not None]
        if not self.calls:
            expected = "expected one, which says where the layers are"
            raise ValueError(f"{_NAME}: `loss`: no call of `scan_layers`, {expected}.")
        _check_value(result, has_aux)
        self.form = _flat(result)[1]
        self.differentiable = self._between_parameters_and_value(lines)
        self._check_stacks(lines)
        self.early = self._first_read(lines)
        self.lines = self._alive(lines)

    def stacks_by_path(self, params: PyTree) -> dict[KeyPath, Stack]:
        """Where leaves have layers."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        return {
            paths[i]: Stack(axis, call.count)
            for call in self.calls
            for i, axis in zip(call.positions, call.axes, strict=True)
        }

    @property
    def stacks(self) -> set[Any]:
        """The variables of all stacked leaves."""
        return {x for call in self.calls for x in call.stacks}

    def _lines(self) -> list[_Line]:
        if any(map(_is_elsewhere, self.jaxpr.eqns)):
            where = "`grad`, `shard_map`, a branch, a loop or a custom derivative"
            remedy = "expected it outside of these; loop and differentiate inside of its block"
            raise ValueError(f"scan_layers: called inside {where}, {remedy}.")
        made_by: dict[Any, Any] = {}
        lines = []
        for eqn in self.jaxpr.eqns:
            call = None if leaves_of_call(eqn) is None else self._call(eqn, made_by)
            reads = [x for x in (call.operands if call else eqn.invars) if _is_variable(x)]
            lines.append(_Line(reads, eqn.outvars, eqn, call))
            made_by |= dict.fromkeys(eqn.outvars, eqn)
        return lines

    def _call(self, eqn: Any, made_by: dict[Any, Any]) -> ScanCall:
        """What the operands of a scan are: those of all layers, the carry, stacks and `xs`."""
        body = eqn.params["jaxpr"]
        inner, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
        scanned = sum(
            x.aval.ndim > y.aval.ndim for x, y in zip(eqn.invars, inner.invars, strict=True)
        )
        ys = sum(x.aval.ndim > y.aval.ndim for x, y in zip(eqn.outvars, inner.outvars, strict=True))
        carries, first = len(eqn.outvars) - ys, len(eqn.invars) - scanned
        last = first + (leaves_of_call(eqn) or 0)
        inputs = {x: i for i, x in enumerate(self.jaxpr.invars)}
        stacks, axes, as_read = [], [], []
        for x in eqn.invars[first:last]:
            chain: list[Any] = []
            while x in made_by and _keeps_layers(made_by[x]):
                chain.insert(0, made_by[x])
                (x,) = (y for y in made_by[x].invars if _is_variable(y))
            if x not in inputs:
                self._refuse_changed(x, made_by)
            axis = 0
            for step in reversed(chain):
                axis = step.params.get("permutation", range(axis + 1))[axis]
            stacks.append(x)
            axes.append(axis)
            as_read.append(functools.partial(self._as_read, chain, x))
        return ScanCall(
            positions=tuple(map(inputs.__getitem__, stacks)),
            axes=tuple(axes),
            count=eqn.invars[first].aval.shape[0],
            as_read=as_read,
            body=lambda operands: core.eval_jaxpr(inner, consts, *operands),
            stacks=stacks,
            others=eqn.invars[: first - carries],
            carry=eqn.invars[first - carries : first],
            xs=eqn.invars[last:],
            after=eqn.outvars[:carries],
            ys=eqn.outvars[carries:],
        )

    def _as_read(self, chain: Sequence[Any], x: Any, layer: jax.Array) -> jax.Array:
        """A layer as operations on its stack make it, without the axis of layers."""
        if chain:
            program = _program(self.jaxpr, chain, [x], chain[-1].outvars)
            (layer,) = core.eval_jaxpr(program, (), layer)
        return jax.lax.squeeze(layer, (0,))

    def _refuse_changed(self, x: Any, made_by: dict[Any, Any]) -> NoReturn:
        """A stack is computed, of parameters or of other arrays."""
        found = {x}
        for eqn in reversed(self.jaxpr.eqns):
            if found.intersection(eqn.outvars):
                found.update(y for y in eqn.invars if _is_variable(y))
        paths = [path for path, y in zip(self._paths, self.jaxpr.invars, strict=True) if y in found]
        came, remedy = f"{in_short(x.aval)} outside of `params`", "pass what is not updated as `xs`"
        if paths:
            came = f"computed from `params`{checks.at(paths[0])}"
            remedy = "change it inside of `block`, and give each call leaves of its own"
        expected = "expected a leaf, which may be cast or transposed as a whole"
        raise ValueError(f"scan_layers: `layers`: {came}, {expected}; {remedy}.")

    def _between_parameters_and_value(self, lines: Sequence[_Line]) -> set[Any]:
        """The floating variables that depend on parameters, and on which the value depends."""
        known = set(filter(_is_floating, self.jaxpr.invars))
        lines = [line for line in lines if line.equation.primitive.name != "stop_gradient"]
        for line in lines:
            if not known.isdisjoint(line.reads):
                known.update(filter(_is_floating, line.makes))
        needed = {x for x in self.jaxpr.outvars[:1] if _is_variable(x)}
        for line in reversed(lines):
            if not needed.isdisjoint(line.makes):
                needed.update(filter(_is_floating, line.reads))
        return known & needed

    def _check_stacks(self, lines: Sequence[_Line]) -> None:
        """Only one call reads a stack in what is differentiated: another would see new weights."""
        stacks, read = self.stacks, set[Any]()
        for line in lines:
            if line.call is None and self.differentiable.isdisjoint(line.makes):
                continue
            own = [] if line.call is None else line.call.stacks
            now = [x for x in line.reads if x in stacks]
            twice = read.intersection(now) | {x for x in now if now.count(x) > own.count(x)}
            twice |= {x for x in own if own.count(x) > 1}
            if twice:
                inputs = list(self.jaxpr.invars)
                path = self._paths[min(map(inputs.index, twice))]
                raise ValueError(
                    f"{_NAME}: `params`{checks.at(path)}: read twice, expected that only one call "
                    "of `scan_layers` reads it: compute a penalty in its block, by `has_ys=True`, "
                    "and move what layers share out of the stack, where `block` may read it."
                )
            read.update(now)

    def _first_read(self, lines: Sequence[_Line]) -> list[list[int]]:
        """For each call, the leaves in no stack that are read behind it, and not before."""
        found: list[list[int]] = [[] for _ in self.calls]
        position_of = {x: i for i, x in enumerate(self.jaxpr.invars)}
        left, calls = self.differentiable.intersection(position_of) - self.stacks, 0
        for line in lines:
            if line.call is not None or not self.differentiable.isdisjoint(line.makes):
                read = left.intersection(line.reads)
                if calls:
                    found[calls - 1] += sorted(position_of[x] for x in read)
                left -= read
            calls += line.call is not None
        return found

    def _alive(self, lines: Sequence[_Line]) -> list[_Line]:
        """Those that are calls, have effects, or make something that is read."""
        read = {x for x in self.jaxpr.outvars if _is_variable(x)}
        alive = []
        for line in reversed(lines):
            if line.call or line.equation.effects or not read.isdisjoint(line.makes):
                read.update(line.reads)
                alive.append(line)
        return alive[::-1]


def _is_elsewhere(equation: Any) -> bool:
    """Whether a call is inside of an operation that is none, or a part of a derivative."""
    scopes, is_call = str(equation.source_info.name_stack), leaves_of_call(equation) is not None
    return _hides_call(equation) or (is_call and ("jvp(" in scopes or equation.params["reverse"]))


def _hides_call(equation: Any) -> bool:
    """Whether there is a call inside of an operation that is none."""
    if leaves_of_call(equation) is not None:
        return False
    inner = (eqn for program in elementwise.programs(equation) for eqn in program.eqns)
    return any(leaves_of_call(eqn) is not None or _hides_call(eqn) for eqn in inner)


def _is_seen_through(eqn: Any, jaxpr: Any) -> bool:
    """Whether it has a call inside; or may cast a stack, or stop its gradient."""
    name, arguments = eqn.primitive.name, {*jaxpr.invars}
    reads_argument = any(_is_variable(x) and x in arguments for x in eqn.invars)
    return name in _SEEN_THROUGH and (_hides_call(eqn) or (name in _JIT and reads_argument))


def _seen_through(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a program without `jit` and `checkpoint` around calls."""
    jaxpr = getattr(closed, "jaxpr", closed)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(variables, [*getattr(closed, "consts", ()), *arguments], strict=True))
    for eqn in jaxpr.eqns:
        values = [_value(x, env) for x in eqn.invars]
        if _is_seen_through(eqn, jaxpr):
            results = _seen_through(eqn.params["jaxpr"], values)
        else:
            read = {x: y for x, y in zip(eqn.invars, values, strict=True) if _is_variable(x)}
            program = _program(jaxpr, [eqn], [*read], eqn.outvars)
            results = core.eval_jaxpr(program, (), *read.values())
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [_value(x, env) for x in jaxpr.outvars]


def _program(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], results: Sequence[Any]) -> Any:
    """Some equations of a jaxpr, as one."""
    names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(results)}
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(results),
        eqns=list(eqns),
        debug_info=jaxpr.debug_info._replace(**names),
    )


def _value(x: Any, env: Environment) -> Any:
    return env[x] if _is_variable(x) else jnp.asarray(x.val, x.aval.dtype)


def _is_variable(x: Any) -> bool:
    return not isinstance(x, core.Literal)


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.inexact))


def _keeps_layers(eqn: Any) -> bool:
    """Whether an operation does the same with each layer of one array."""
    arrays = [x for x in eqn.invars if _is_variable(x)]
    if len(arrays) != 1 or len(eqn.outvars) != 1 or elementwise.programs(eqn):
        return False
    is_elementwise = not elementwise.mixes(eqn, lambda _: True)
    return is_elementwise or eqn.primitive.name in ("pcast", "sharding_constraint", "transpose")


def _check_value(result: Any, has_aux: bool) -> None:
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


def _flat(tree: PyTree) -> tuple[Arrays, Structure]:
    leaves, structure = jax.tree.flatten(tree)
    return leaves, structure


# ---- forward and backward ----------------------------------------------------------------------


class Flow(NamedTuple):
    """Cotangents that go backwards over layers.

    Attributes:
      others: of what blocks read beside, added up.
      carry: behind a layer.
      xs: of those of all layers.
    """

    others: Cotangents
    carry: Cotangents
    xs: Cotangents


class SavedCall:
    """A call after its forward pass: what its backward pass reads.

    Attributes:
      results: the carry behind the layers, and all ys.
    """

    def __init__(self, call: ScanCall, env: Environment, differentiable: set[Any]) -> None:
        """Runs the layers; `env` has the operands."""
        self._call, operands = call, [_value(x, env) for x in call.operands]
        self._others, carry, stacks, self._xs = call.parts(operands)
        self._varied = [
            *(x in differentiable for x in call.others),
            *map(_is_floating, call.carry),
            *map(_is_floating, call.stacks),
            *(x in differentiable for x in call.xs),
        ]
        self._pulled = [*map(_is_floating, call.after), *(x in differentiable for x in call.ys)]
        self._form: Any = None
        given = jnp.arange(call.count), self._xs
        turn = functools.partial(self._forward, stacks)
        after, (ys, self._stored) = jax.lax.scan(turn, carry, given)
        self.results = [*after, *ys]

    def _forward(self, stacks: Arrays, carry: Arrays, given: tuple[Any, Arrays]) -> Any:
        """A layer: the carry behind it, its ys, and what is stored of it."""
        i, x = given
        ones = [Cut(k, 1).out_of(w, i) for k, w in zip(self._call.axes, stacks, strict=True)]
        operands = [*self._others, *carry, *self._layer(ones), *x]
        fixed = _of(operands, self._varied, False)

        def of_varied(varied: Arrays) -> tuple[Arrays, Arrays]:
            results = self._call.body(_merged(self._varied, varied, fixed))
            return _of(results, self._pulled, True), _of(results, self._pulled, False)

        pulled, pull, kept = jax.vjp(of_varied, _of(operands, self._varied, True), has_aux=True)
        results = _merged(self._pulled, pulled, kept)
        # The arrays of the vjp are operands, but for the carry, or stored, or known to all layers.
        arrays, structure = _flat(pull)
        of_carry = range(len(self._others), len(self._others) + len(carry))
        known = {id(y): k for k, y in enumerate(operands) if k not in of_carry}
        stored: Arrays = []
        for y in arrays:
            if isinstance(y, jax.core.Tracer) and id(y) not in known:
                known[id(y)] = len(operands) + len(stored)
                stored.append(y)
        self._form = structure, [known.get(id(y), y) for y in arrays]
        return results[: len(carry)], (results[len(carry) :], stored)

    def _layer(self, ones: Arrays) -> Arrays:
        return [f(one) for f, one in zip(self._call.as_read, ones, strict=True)]

    def begin(self, after: Cotangents) -> Flow:
        """Cotangents behind the last layer."""
        others, _, _, xs = self._call.parts(self._varied)
        zeros = [
            [numerics.zeros_like(x) if use else None for x, use in zip(arrays, varied, strict=True)]
            for arrays, varied in ((self._others, others), (self._xs, xs))
        ]
        return Flow(zeros[0], after, zeros[1])

    def pull(
        self, ys: Cotangents, i: jax.Array, ones: Arrays, flow: Flow
    ) -> tuple[Cotangents, Flow]:
        """Gradients of layer `i`, which is given as a stack of one, and what is in front of it.

        Args:
          ys: cotangents of all ys.
          i: the number of the layer.
          ones: its weights.
          flow: behind it.
        """

        def at(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

        call, (structure, sources) = self._call, self._form
        carries = [None] * len(call.carry)
        operands = [*self._others, *carries, *self._layer(ones), *map(at, self._xs)]
        arrays = [*operands, *map(at, self._stored)]
        pull = structure.unflatten([arrays[k] if isinstance(k, int) else k for k in sources])
        behind = [x for x in flow.carry if x is not None] + [at(x) for x in ys if x is not None]
        (varied,) = pull(behind)
        new = _merged(self._varied, varied, [None] * len(operands))
        of_others, before, of_layer, of_x = call.parts(new)
        gradients = [
            None if g is None else jax.vjp(f, one)[1](g)[0]
            for f, one, g in zip(call.as_read, ones, of_layer, strict=True)
        ]
        others = [x if y is None else x + y for x, y in zip(flow.others, of_others, strict=True)]
        xs = [
            x if y is None else jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
            for x, y in zip(flow.xs, of_x, strict=True)
        ]
        return gradients, Flow(others, before, xs)


# Gradients of a layer and the flow in front of it: see `SavedCall.pull`.
Pull = Callable[[jax.Array, Arrays, Flow], tuple[Cotangents, Flow]]
# (number of a call, gradients of leaves that have them early, its pull, the flow behind it) -> the
# flow in front of it
Visit = Callable[[int, Cotangents, Pull, Flow], Flow]


class _Piece(NamedTuple):
    """What stands between two calls: its vjp, and the variables of its arguments and results."""

    pull: Callable[[Cotangents], tuple[Arrays]]
    arguments: list[Any]
    results: list[Any]


class Forward:
    """The forward pass of a loss, and what its backward pass reads.

    Attributes:
      result: what the loss returned.
    """

    def __init__(self, loss: TracedLoss, leaves: Arrays) -> None:
        self._loss, self._env = loss, dict(zip(loss.jaxpr.constvars, loss.consts, strict=True))
        self._env |= dict(zip(loss.jaxpr.invars, leaves, strict=True))
        self._saved: list[SavedCall] = []
        self._pieces: list[_Piece] = []
        start = 0
        for end, line in enumerate(loss.lines):
            if line.call is not None:
                self._run(start, end)
                saved = SavedCall(line.call, self._env, loss.differentiable)
                self._env |= dict(zip(line.makes, saved.results, strict=True))
                self._saved.append(saved)
                start = end + 1
        self._run(start, len(loss.lines))
        self.result = loss.form.unflatten(_value(x, self._env) for x in loss.jaxpr.outvars)

    def _run(self, start: int, end: int) -> None:
        """A piece, whose results that are differentiated have a vjp."""
        loss, lines = self._loss, self._loss.lines
        later = {x for line in lines[end:] for x in line.reads}
        later.update(filter(_is_variable, loss.jaxpr.outvars))
        made = {x: None for line in lines[start:end] for x in line.makes}
        read = {x: None for line in lines[start:end] for x in line.reads if x not in made}
        varied = [x for x in read if x in loss.differentiable - loss.stacks]
        fixed = [x for x in read if x not in varied]
        results = [x for x in made if x in later and x in loss.differentiable]
        others = [x for x in made if x in later and x not in loss.differentiable]
        eqns = [line.equation for line in lines[start:end]]
        piece = _program(loss.jaxpr, eqns, [*varied, *fixed], [*results, *others])

        def run(arrays: Arrays) -> tuple[Arrays, Arrays]:
            new = core.eval_jaxpr(piece, (), *arrays, *(self._env[x] for x in fixed))
            return new[: len(results)], new[len(results) :]

        new, pull, rest = jax.vjp(run, [self._env[x] for x in varied], has_aux=True)
        self._env |= dict(zip([*results, *others], [*new, *rest], strict=True))
        self._pieces.append(_Piece(pull, varied, results))

    def backward(self, visit: Visit) -> Cotangents:
        """The gradients of all leaves that no call was given, and None; `visit` sees each call."""
        cotangents, inputs = Environment(), self._loss.jaxpr.invars
        differentiable = self._loss.differentiable - self._loss.stacks

        def add(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
            for x, new in zip(variables, arrays, strict=True):
                if new is not None and _is_variable(x) and x in differentiable:
                    cotangents[x] = cotangents[x] + new if x in cotangents else new

        def of(variables: Iterable[Any], *, is_carry: bool = False) -> Cotangents:
            return [
                (cotangents.pop(x) if x in cotangents else numerics.zeros_like(self._env[x]))
                if (_is_floating(x) if is_carry else x in differentiable)
                else None
                for x in variables
            ]

        value = self._loss.jaxpr.outvars[0]
        add([value], [numerics.zeros_like(_value(value, self._env)) + 1])
        for i in range(len(self._saved), -1, -1):
            piece = self._pieces[i]
            add(piece.arguments, *piece.pull(of(piece.results)))
            if i:
                call, saved = self._loss.calls[i - 1], self._saved[i - 1]
                pull = functools.partial(saved.pull, of(call.ys))
                early = [cotangents.pop(inputs[k]) for k in self._loss.early[i - 1]]
                flow = visit(i - 1, early, pull, saved.begin(of(call.after, is_carry=True)))
                for variables, arrays in zip((call.others, call.carry, call.xs), flow, strict=True):
                    add(variables, arrays)
        return [cotangents.get(x) for x in inputs]


def _of(values: Sequence[Any], choice: Sequence[bool], chosen: bool) -> list[Any]:
    return [x for x, use in zip(values, choice, strict=True) if use == chosen]


def _merged(choice: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The reverse of `_of`, of both."""
    given = {True: iter(chosen), False: iter(others)}
    return [next(given[use]) for use in choice]
