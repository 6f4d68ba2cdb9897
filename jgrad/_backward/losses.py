"""A loss, cut where it calls `scan_layers`: each piece between two calls has a vjp of its own.

The loss is traced once. In its jaxpr a call of `scan_layers` is one equation, the marker, and what
stands between two markers is a piece. In the forward pass each piece runs under `jax.vjp`, and a
scan keeps what the backward pass of its layers reads. In the backward pass, nothing but cotangents
stands between the pieces and the loops over layers, so that a loop may take the weights of its
layers and return new ones, which is not possible inside of anything that JAX differentiates.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._backward.scan_layers import Block, Remat, recorded, rematerialised
from jgrad._trees import checks, trees
from jgrad._trees.forms import in_short
from jgrad._trees.trees import PyTree, Structure
from jgrad._trees.unpromised import Unpromised

_NAME = "step_in_backward"

core = Unpromised(f"`{_NAME}`")

Arrays = list[jax.Array]
Cotangents = list[jax.Array | None]  # None for integers, keys and the like
# By variable of a jaxpr.
Environment = dict[Any, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class ScanCall:
    """One call of `scan_layers`.

    Attributes:
      positions: of the stacked leaves among those of the parameters.
      count: the number of layers.
      block: (arrays of a layer, of the carry, of what else it reads) -> arrays of the carry.
      carries: the number of arrays in the carry.
    """

    positions: tuple[int, ...]
    count: int
    block: Callable[[Arrays, Arrays, Arrays], Arrays]
    carries: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Operands of the marker, without the stacks: the carry, and what else the block reads."""
        start = len(self.positions)
        return list(operands[start : start + self.carries]), list(operands[start + self.carries :])


@functools.cache
def _marker() -> Any:
    marker = core.Primitive("jgrad_scan_layers")
    marker.multiple_results = True
    marker.def_abstract_eval(lambda *operands, call: call.split(operands)[0])
    return marker


# ---- the trace ---------------------------------------------------------------------------------


class TracedLoss:
    """A loss as a jaxpr with markers.

    Attributes:
      calls: of `scan_layers`, in order.
      form: the structure of what the loss returns.
    """

    def __init__(
        self, loss: Callable[..., Any], params: PyTree, args: Sequence[Any], *, has_aux: bool
    ) -> None:
        """Of arrays, which may be traced."""
        leaves, structure = _flat(params)
        self.calls: list[ScanCall] = []
        paths = trees.paths(params)

        def of_leaves(leaves: Arrays) -> Any:
            recorder = _Recorder(leaves, self.calls)
            with recorded(recorder.call):
                return loss(structure.unflatten(leaves), *args)

        closed, result = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
        if not self.calls:
            came = "no call of `scan_layers`, or only one that a cached trace of `jax.jit` hides"
            remedy = (
                "call it outside of `jit` to say where the layers are, or use the ordinary step"
            )
            raise ValueError(f"{_NAME}: `loss`: {came}; {remedy}.")
        _check_value(result, has_aux)
        self.form = _flat(result)[1]
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        self._check_stacks(paths)

    def _check_stacks(self, paths: Sequence[str]) -> None:
        """Nothing but one call reads a stack: another one would see new weights."""
        stacks = {
            self._jaxpr.invars[i]: i for call in self.calls for i in call.positions
        }  # by variable
        read: set[Any] = set()
        for eqn in self._jaxpr.eqns:
            own = len(eqn.params["call"].positions) if eqn.primitive is _marker() else 0
            for k, x in enumerate(eqn.invars):
                if isinstance(x, core.Literal) or x not in stacks:
                    continue
                if x in read or k >= own:
                    _refuse_twice(paths[stacks[x]])
                read.add(x)
        for x in self._jaxpr.outvars:
            if not isinstance(x, core.Literal) and x in stacks:
                _refuse_twice(paths[stacks[x]])

    def forward(self, leaves: Arrays) -> "Forward":
        """The forward pass."""
        return Forward(self, self._jaxpr, self._consts, leaves)


class _Recorder:
    """Makes a marker of each call."""

    def __init__(self, leaves: Arrays, calls: list[ScanCall]) -> None:
        self._leaves = leaves  # kept, so that no other array gets the identity of one
        self._calls, self._trace = calls, core.get_opaque_trace_state()
        self._position = {id(x): i for i, x in enumerate(leaves)}

    def call(self, block: Block, layers: PyTree, carry: PyTree, remat: Remat, count: int) -> PyTree:
        """The carry behind the layers."""
        if core.get_opaque_trace_state() != self._trace:
            expected = "expected it in the loss itself, outside of other calls of it"
            raise ValueError(
                f"scan_layers: called inside `vmap`, `jit`, `grad`, `checkpoint`, a branch, a loop "
                f"or another block, {expected}; map and differentiate inside of its block."
            )
        if not count:
            raise ValueError("scan_layers: `layers`: no layers, expected at least one.")
        stacks, of_layers = _flat(layers)
        positions = [self._position.get(id(x)) for x in stacks]
        if None in positions:
            path = trees.paths(of_layers.unflatten(stacks))[positions.index(None)]
            begin = f"scan_layers: `layers`{checks.at(path)}: not an unchanged leaf of `params`"
            expected = "expected one: change it inside of `block`, a layer at a time"
            raise ValueError(f"{begin}, {expected}.")
        arrays, of_carry = _flat(carry)
        # As of `jax.lax.scan`, a carry has strong types.
        carries = [jax.lax.convert_element_type(x, jnp.result_type(x)) for x in arrays]

        def of_arrays(layer: Arrays, carry: Arrays) -> PyTree:
            return block(of_layers.unflatten(layer), of_carry.unflatten(carry))

        layer = jax.eval_shape(lambda xs: [x[0] for x in xs], stacks)
        closed, result = jax.make_jaxpr(of_arrays, return_shape=True)(layer, carries)
        _check_carry(of_carry.unflatten(carries), result)
        # What else a block reads is an operand, where it is of this trace.
        is_read = [isinstance(x, jax.core.Tracer) for x in closed.consts]
        others = [x for x, use in zip(closed.consts, is_read, strict=True) if use]

        def evaluated(layer: Arrays, carry: Arrays, others: Arrays) -> Arrays:
            rest = iter(others)
            consts = [
                next(rest) if use else x for x, use in zip(closed.consts, is_read, strict=True)
            ]
            results: Arrays = core.eval_jaxpr(closed.jaxpr, consts, *layer, *carry)
            return results

        # `jax.checkpoint` takes the arrays as one argument here, and as many as it has leaves.
        again: Any = rematerialised(lambda layer, rest: evaluated(layer, *rest), remat)
        made = ScanCall(
            tuple(i for i in positions if i is not None),
            count,
            lambda layer, carry, others: again(layer, (carry, others)),
            len(carries),
        )
        self._calls.append(made)
        return of_carry.unflatten(_marker().bind(*stacks, *carries, *others, call=made))


def _refuse_twice(path: str) -> None:
    expected = "expected that only one call of `scan_layers` reads it"
    remedy = "move what layers share out of the stack; `block` may read it there"
    raise ValueError(f"{_NAME}: `params`{checks.at(path)}: read twice, {expected}: {remedy}.")


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


def _check_carry(old: PyTree, new: PyTree) -> None:
    """A block returns a carry of the kind that it was given."""
    checks.same_structure("scan_layers", "block(layer, carry)", new, "carry", old)
    for path, x, y in zip(trees.paths(old), *map(jax.tree.leaves, (old, new)), strict=False):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            came, expected = map(in_short, (y, x))
            begin = f"scan_layers: `block` returns a carry{checks.at(path)}"
            raise TypeError(f"{begin} of {came}, expected {expected}, as it was given.")


def _flat(tree: PyTree) -> tuple[Arrays, Structure]:
    leaves, structure = jax.tree.flatten(tree)
    return leaves, structure


# ---- forward and backward ----------------------------------------------------------------------


class SavedCall(NamedTuple):
    """What the backward pass of a call reads.

    Attributes:
      stored: per layer, stacked, as much as no layer and no other operand has.
      others: what else the block reads.
      form: the structure of the vjp of a layer, and where each array of it is: in a layer, among
        the others, among those stored, or itself.
      shapes: of the carry.
    """

    stored: Arrays
    others: Arrays
    form: tuple[Any, list[tuple[str, Any]]]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(
        cls, call: ScanCall, stacks: Arrays, carry: Arrays, others: Arrays
    ) -> tuple[Arrays, "SavedCall"]:
        """The carry behind the layers, and what is kept."""
        form: Any = None

        def body(carry: Arrays, layer: Arrays) -> tuple[Arrays, Arrays]:
            nonlocal form
            new, pull = jax.vjp(call.block, layer, carry, others)
            arrays, structure = _flat(pull)
            known: dict[int, tuple[str, Any]] = {id(x): ("layer", i) for i, x in enumerate(layer)}
            known |= {id(x): ("others", i) for i, x in enumerate(others)}
            stored: Arrays = []
            sources: list[tuple[str, Any]] = []
            for x in arrays:
                source = known.get(id(x), ("itself", x))
                if source[0] == "itself" and isinstance(x, jax.core.Tracer):
                    source = known[id(x)] = ("stored", len(stored))
                    stored.append(x)
                sources.append(source)
            form = structure, sources
            return new, stored

        after, stored = jax.lax.scan(body, carry, stacks)
        return after, cls(stored, others, form, [x.shape for x in after])

    def pull(
        self, i: jax.Array, layer: Arrays, cotangents: Cotangents
    ) -> tuple[Arrays, Cotangents, Arrays]:
        """Cotangents of layer `i`, of the carry in front of it, and of what else it reads."""
        stored = [jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in self.stored]
        structure, sources = self.form
        arrays = {"layer": layer, "others": self.others, "stored": stored}
        pull = structure.unflatten([x if k == "itself" else arrays[k][x] for k, x in sources])
        full = [
            np.zeros(shape, jax.dtypes.float0) if x is None else x
            for x, shape in zip(cotangents, self.shapes, strict=True)
        ]
        of_layer, of_carry, of_others = pull(full)
        before = zip(cotangents, of_carry, strict=True)
        return of_layer, [None if old is None else new for old, new in before], of_others


# (number of a call, what it saved, cotangents behind it) -> those in front of it, and of what else
# its block reads.
Visit = Callable[[int, SavedCall, Cotangents], tuple[Cotangents, Cotangents]]


class _Piece(NamedTuple):
    """What stands between two calls: its vjp, and the variables of its arguments and results."""

    pull: Callable[[Cotangents], tuple[Arrays]]
    arguments: list[Any]
    results: list[Any]


class Forward:
    """The forward pass of a loss, and what its backward pass reads.

    Attributes:
      result: what the loss returned.
      saved: what each call saved.
    """

    def __init__(self, loss: TracedLoss, jaxpr: Any, consts: Sequence[Any], leaves: Arrays) -> None:
        self._inputs = jaxpr.invars
        self._env: Environment = dict(zip(jaxpr.constvars, consts, strict=True))
        self._env |= dict(zip(jaxpr.invars, leaves, strict=True))
        self._differentiable = _differentiable(jaxpr)
        self._value = jaxpr.outvars[0]
        self.saved: list[SavedCall] = []
        self._pieces: list[_Piece] = []
        self._calls: list[Any] = []
        start = 0
        for end, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive is _marker():
                self._run(jaxpr, jaxpr.eqns[start:end], _read_later(jaxpr, end))
                self._scan(eqn)
                start = end + 1
        end = len(jaxpr.eqns)
        self._run(jaxpr, jaxpr.eqns[start:], _read_later(jaxpr, end))
        self.result = loss.form.unflatten(map(self._read, jaxpr.outvars))

    def _read(self, x: Any) -> Any:
        if not isinstance(x, core.Literal):
            return self._env[x]
        aval: Any = x.aval
        return jnp.asarray(x.val, aval.dtype)

    def _run(self, jaxpr: Any, eqns: Sequence[Any], later: set[Any]) -> None:
        """A piece, whose results that are differentiated have a vjp."""
        made = [x for eqn in eqns for x in eqn.outvars if x in later]
        arguments = _free(eqns)
        varied = [x for x in arguments if x in self._differentiable]
        fixed = [x for x in arguments if x not in self._differentiable]
        results = [x for x in made if x in self._differentiable]
        others = [x for x in made if x not in self._differentiable]
        piece = jaxpr.replace(
            constvars=[],
            invars=[*varied, *fixed],
            outvars=[*results, *others],
            eqns=list(eqns),
            debug_info=jaxpr.debug_info._replace(
                arg_names=("",) * len(arguments), result_paths=("",) * len(made)
            ),
        )

        def run(arrays: Arrays) -> tuple[Arrays, Arrays]:
            new = core.eval_jaxpr(piece, (), *arrays, *(self._env[x] for x in fixed))
            return new[: len(results)], new[len(results) :]

        new, pull, rest = jax.vjp(run, [self._env[x] for x in varied], has_aux=True)
        self._env |= dict(zip([*results, *others], [*new, *rest], strict=True))
        self._pieces.append(_Piece(pull, varied, results))

    def _scan(self, eqn: Any) -> None:
        call = eqn.params["call"]
        operands = list(map(self._read, eqn.invars))
        carry, others = call.split(operands)
        after, saved = SavedCall.of(call, operands[: len(call.positions)], carry, others)
        self._env |= dict(zip(eqn.outvars, after, strict=True))
        self.saved.append(saved)
        self._calls.append(eqn)

    def _zeros(self, x: Any) -> jax.Array | None:
        return numerics.zeros_like(self._env[x]) if _is_floating(x) else None

    def backward(self, visit: Visit) -> list[jax.Array | None]:
        """The gradients of all leaves that are in no stack, and None; `visit` sees each call."""
        cotangents: Environment = {}

        def add(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
            for x, new in zip(variables, arrays, strict=True):
                if new is None or isinstance(x, core.Literal):
                    continue
                if x in self._differentiable:
                    cotangents[x] = cotangents[x] + new if x in cotangents else new

        def of(variables: Iterable[Any]) -> Cotangents:
            return [cotangents.pop(x) if x in cotangents else self._zeros(x) for x in variables]

        add([self._value], [numerics.zeros_like(self._read(self._value)) + 1])
        for i in range(len(self._calls), -1, -1):
            piece = self._pieces[i]
            add(piece.arguments, *piece.pull(of(piece.results)))
            if i:
                eqn = self._calls[i - 1]
                carry, others = eqn.params["call"].split(eqn.invars)
                for_call = visit(i - 1, self.saved[i - 1], of(eqn.outvars))
                for variables, arrays in zip((carry, others), for_call, strict=True):
                    add(variables, arrays)
        stacks = {x for eqn in self._calls for x in eqn.invars[: len(eqn.params["call"].positions)]}
        return [None if x in stacks else cotangents.get(x) for x in self._inputs]


def _differentiable(jaxpr: Any) -> set[Any]:
    """The variables that depend on floating parameters, and are floating."""
    known = set(filter(_is_floating, jaxpr.invars))
    for eqn in jaxpr.eqns:
        if any(not isinstance(x, core.Literal) and x in known for x in eqn.invars):
            known.update(filter(_is_floating, eqn.outvars))
    return known


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.inexact))


def _free(eqns: Sequence[Any]) -> list[Any]:
    """The variables that equations read and do not make."""
    made: set[Any] = set()
    free: dict[Any, None] = {}
    for eqn in eqns:
        for x in eqn.invars:
            if not isinstance(x, core.Literal) and x not in made:
                free[x] = None
        made.update(eqn.outvars)
    return list(free)


def _read_later(jaxpr: Any, end: int) -> set[Any]:
    """The variables that are read from an equation on, or returned."""
    variables = [x for eqn in jaxpr.eqns[end:] for x in eqn.invars]
    return {x for x in [*variables, *jaxpr.outvars] if not isinstance(x, core.Literal)}
