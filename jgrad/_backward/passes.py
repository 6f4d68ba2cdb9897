"""The forward pass of a traced loss, and its backward pass, which shows each call to a visitor.

In the forward pass, each piece between two calls of `scan_layers` runs under `jax.vjp`, and each
scan stores what the backward pass of its layers reads. In the backward pass, only cotangents pass
between the pieces and the loops over layers. A loop can therefore take the weights of its layers
and return new ones, which is impossible inside of anything that JAX differentiates.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._arithmetic.programs import Atom
from jgrad._backward.losses import (
    Arrays,
    Cotangents,
    Environment,
    ScanCall,
    TracedLoss,
    core,
    is_floating,
    is_variable,
    program_of,
    value_of,
)
from jgrad._trees import host_memory

T = TypeVar("T")


class Flow(NamedTuple):
    """Cotangents that go backwards over layers.

    Attributes:
      others: of what layers read beside, added up.
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

    def __init__(self, call: ScanCall, env: Environment, differentiable: set[Atom]) -> None:
        """Runs the layers; `env` has the operands."""
        self._call, operands = call, [value_of(x, env) for x in call.operands]
        others, carry, stacks, self._xs = call.by_role(operands)
        self._others, carry = host_memory.to_device((others, carry))
        self._varied = [
            *(x in differentiable for x in call.others),
            *map(is_floating, call.carry),
            *map(is_floating, call.stacks),
            *(x in differentiable for x in call.xs),
        ]
        self._pulled = [*map(is_floating, call.after), *(x in differentiable for x in call.ys)]
        self._form: Any = None
        turns = jnp.arange(call.count), self._xs
        turn = functools.partial(self._forward, stacks)
        after, (ys, self._stored) = jax.lax.scan(turn, carry, turns)
        self.results = [*after, *ys]

    def _forward(
        self, stacks: Arrays, carry: Arrays, turn: tuple[jax.Array, Arrays]
    ) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        """A layer: the carry behind it, its ys, and what is stored of it."""
        i, x = turn
        ones = [cut.out_of(w, i) for cut, w in zip(self._call.cuts, stacks, strict=True)]
        ones, x = host_memory.to_device((ones, x))
        operands = [*self._others, *carry, *self._layer(ones), *x]
        fixed = _chosen(operands, self._varied, False)

        def varying_results(varied: Arrays) -> tuple[Arrays, Arrays]:
            results = self._call.body(_merged(self._varied, varied, fixed))
            return _chosen(results, self._pulled, True), _chosen(results, self._pulled, False)

        pulled, pull, kept = jax.vjp(
            varying_results, _chosen(operands, self._varied, True), has_aux=True
        )
        results = _merged(self._pulled, pulled, kept)
        # The arrays of the vjp are operands (except the carry), or stored, or known to all layers.
        arrays, structure = jax.tree.flatten(pull)
        carry_positions = range(len(self._others), len(self._others) + len(carry))
        known = {id(y): k for k, y in enumerate(operands) if k not in carry_positions}
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
        others, _, _, xs = self._call.by_role(self._varied)

        def zeros(arrays: Arrays, varied: Sequence[bool]) -> Cotangents:
            pairs = zip(arrays, varied, strict=True)
            to_device = host_memory.to_device
            return [numerics.zeros_like(to_device(x)) if use else None for x, use in pairs]

        return Flow(zeros(self._others, others), after, zeros(self._xs, xs))

    def pull(
        self, ys: Cotangents, i: jax.Array, ones: Arrays, flow: Flow
    ) -> tuple[Cotangents, Flow]:
        """Gradients of layer `i`, which is given as a stack of one, and what is in front of it.

        Args:
          ys: cotangents of all ys.
          i: which layer.
          ones: its weights.
          flow: behind it.
        """

        def at(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

        call, (structure, sources) = self._call, self._form
        carries = [None] * len(call.carry)
        fetched = host_memory.to_device(list(map(at, self._xs)))
        operands = [*self._others, *carries, *self._layer(ones), *fetched]
        arrays = [*operands, *map(at, self._stored)]
        pull = structure.unflatten([arrays[k] if isinstance(k, int) else k for k in sources])
        behind = [x for x in flow.carry if x is not None] + [at(x) for x in ys if x is not None]
        (varied,) = pull(behind)
        new = _merged(self._varied, varied, [None] * len(operands))
        others_now, before, ones_now, xs_now = call.by_role(new)
        gradients = [
            None if g is None else jax.vjp(f, one)[1](g)[0]
            for f, one, g in zip(call.as_read, ones, ones_now, strict=True)
        ]
        others = [x if y is None else x + y for x, y in zip(flow.others, others_now, strict=True)]
        xs = [
            x if y is None else jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
            for x, y in zip(flow.xs, xs_now, strict=True)
        ]
        return gradients, Flow(others, before, xs)


# Gradients of a layer and the flow in front of it: see `SavedCall.pull`.
Pull = Callable[[jax.Array, Arrays, Flow], tuple[Cotangents, Flow]]
# (index of a call, gradients of leaves that have them early, its pull, the flow behind it) -> the
# flow in front of it
Visit = Callable[[int, Cotangents, Pull, Flow], Flow]


class _Piece(NamedTuple):
    """What stands between two calls: its vjp, and the variables of its arguments and results."""

    pull: Callable[[Cotangents], tuple[Arrays]]
    arguments: list[Atom]
    results: list[Atom]


class Forward:
    """The forward pass of a loss, and what its backward pass reads.

    Attributes:
      result: what the loss returned.
    """

    def __init__(self, loss: TracedLoss, leaves: Arrays) -> None:
        self._loss, self._env = loss, dict(zip(loss.jaxpr.constvars, loss.consts, strict=True))
        self._env |= dict(zip(loss.jaxpr.invars, leaves, strict=True))
        self._differentiable = loss.differentiable - loss.stacks  # between calls
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
        self.result = loss.form.unflatten(value_of(x, self._env) for x in loss.jaxpr.outvars)

    def _run(self, start: int, end: int) -> None:
        """A piece, whose results that are differentiated have a vjp."""
        loss, lines = self._loss, self._loss.lines
        later = {x for line in lines[end:] for x in line.reads}
        later.update(filter(is_variable, loss.jaxpr.outvars))
        makes = {x: None for line in lines[start:end] for x in line.makes}
        read = {x: None for line in lines[start:end] for x in line.reads if x not in makes}
        varied = [x for x in read if x in self._differentiable]
        fixed = [x for x in read if x not in varied]
        results = [x for x in makes if x in later and x in loss.differentiable]
        others = [x for x in makes if x in later and x not in loss.differentiable]
        eqns = [line.equation for line in lines[start:end]]
        piece = program_of(loss.jaxpr, eqns, [*varied, *fixed], [*results, *others])

        read_here = [self._env[x] for x in varied], [self._env[x] for x in fixed]
        arguments, constants = host_memory.to_device(read_here)

        def run(arrays: Arrays) -> tuple[Arrays, Arrays]:
            new = core.eval_jaxpr(piece, (), *arrays, *constants)
            return new[: len(results)], new[len(results) :]

        new, pull, rest = jax.vjp(run, arguments, has_aux=True)
        self._env |= dict(zip([*results, *others], [*new, *rest], strict=True))
        self._pieces.append(_Piece(pull, varied, results))

    def backward(self, visit: Visit) -> Cotangents:
        """The gradients of all leaves that no call was given, and None; `visit` sees each call."""
        cotangents, inputs = Environment(), self._loss.jaxpr.invars

        def add(variables: Iterable[Atom], arrays: Iterable[jax.Array | None]) -> None:
            for x, new in zip(variables, arrays, strict=True):
                if new is not None and is_variable(x) and x in self._differentiable:
                    cotangents[x] = cotangents[x] + new if x in cotangents else new

        def cotangents_of(variables: Iterable[Atom], *, is_carry: bool = False) -> Cotangents:
            return [
                (cotangents.pop(x) if x in cotangents else numerics.zeros_like(self._env[x]))
                if (is_floating(x) if is_carry else x in self._differentiable)
                else None
                for x in variables
            ]

        value = self._loss.jaxpr.outvars[0]
        add([value], [numerics.zeros_like(value_of(value, self._env)) + 1])
        for i in range(len(self._saved), -1, -1):
            piece = self._pieces[i]
            add(piece.arguments, *piece.pull(cotangents_of(piece.results)))
            if i:
                call, saved = self._loss.calls[i - 1], self._saved[i - 1]
                pull = functools.partial(saved.pull, cotangents_of(call.ys))
                early: Cotangents = [cotangents.pop(inputs[k]) for k in self._loss.early[i - 1]]
                flow = visit(
                    i - 1, early, pull, saved.begin(cotangents_of(call.after, is_carry=True))
                )
                for variables, arrays in zip((call.others, call.carry, call.xs), flow, strict=True):
                    add(variables, arrays)
        return [cotangents.get(x) for x in inputs]


def _chosen(values: Sequence[T], choice: Sequence[bool], chosen: bool) -> list[T]:
    return [x for x, use in zip(values, choice, strict=True) if use == chosen]


def _merged(choice: Sequence[bool], chosen: Sequence[T], others: Sequence[T]) -> list[T]:
    """The reverse of `_chosen`, of both."""
    iterators = {True: iter(chosen), False: iter(others)}
    return [next(iterators[use]) for use in choice]
