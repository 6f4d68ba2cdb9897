"""Results of a program in slices along their first axis, each computed without the others.

What a slice is computed of is read from the program, backwards from the result: an elementwise
operation needs the same slices of its operands, a reshape keeps the order of elements, and what is
repeated along the axis is needed as it is. Any other operation may need more than a slice.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jgrad._arithmetic import elementwise
from jgrad._arithmetic.elementwise import core
from jgrad._arithmetic.programs import Atom, ClosedProgram, Equation

# The parameter of an operation that begins with the number of rows of its result.
_ROWS = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}


class Unknown(Exception):
    """A slice may need more than slices."""


class Pruned:
    """A program that computes some of its variables.

    Attributes:
      inputs: positions of the inputs that they need.
    """

    def __init__(self, closed: ClosedProgram, variables: Iterable[Atom]) -> None:
        """Of a closed jaxpr."""
        program = closed.jaxpr.replace(outvars=list(variables))
        self._program, used = core.dce_jaxpr(program, [True] * len(program.outvars))
        self._constants = closed.consts
        self.inputs = [i for i, use in enumerate(used) if use]

    def __call__(self, *inputs: jax.Array) -> list[jax.Array]:
        """The variables, of these inputs."""
        results: list[jax.Array] = core.eval_jaxpr(self._program, self._constants, *inputs)
        return results


class _Operation(NamedTuple):
    """One of a slice.

    Attributes:
      result: the variable of which it makes a slice.
      sliced_operands: the operands of which it needs a slice.
      whole_operands: those that it needs as they are, some of them literals.
      run: computes it of both.
    """

    result: Atom
    sliced_operands: list[Atom]
    whole_operands: list[Atom]
    run: Callable[[list[jax.Array], list[jax.Array | np.ndarray]], jax.Array]


class SlicedResult:
    """How slices of a variable of a program are computed.

    Attributes:
      shape: of all slices together.
      count: how many there are.
      inputs: positions of the inputs of the program of which each needs a slice.
      whole: what each needs as it is.
    """

    inputs: list[int]
    whole: Pruned

    def __init__(self, closed: ClosedProgram, result: Atom, count: int) -> None:
        """Of a closed jaxpr.

        Args:
          closed: the program.
          result: one of its variables.
          count: how many slices of equal length.

        Raises:
          Unknown: what a slice needs is not known.
        """
        self.shape, self.count, self._result = result.aval.shape, count, result
        self._operations: list[_Operation] = []
        sliced, whole = {result: None}, dict[Atom, None]()  # in the order in which they are met
        for eqn in reversed(closed.jaxpr.eqns):
            for i, out in enumerate(eqn.outvars):
                if out in sliced:
                    operation = _operation(eqn, i, count)
                    self._operations.insert(0, operation)
                    del sliced[out]
                    sliced |= dict.fromkeys(operation.sliced_operands)
                    whole |= dict.fromkeys(x for x in operation.whole_operands if _is_variable(x))
        positions = {x: i for i, x in enumerate(closed.jaxpr.invars)}
        if not positions.keys() >= sliced.keys():
            raise Unknown
        self.inputs, self._sliced = [positions[x] for x in sliced], list(sliced)
        self.whole, self._whole = Pruned(closed, whole), list(whole)

    def one(self, slices: Sequence[jax.Array], whole: Sequence[jax.Array]) -> jax.Array:
        """A slice, of the same slices of `inputs`, and of what `whole` computes."""
        sliced = dict(zip(self._sliced, slices, strict=True))
        others = dict(zip(self._whole, whole, strict=True))
        for result, sliced_operands, whole_operands, run in self._operations:
            needed = [others[x] if _is_variable(x) else x.val for x in whole_operands]
            sliced[result] = run([sliced[x] for x in sliced_operands], needed)
        return sliced[self._result]


def _is_variable(x: Atom) -> bool:
    return not isinstance(x, core.Literal)


def _operation(eqn: Equation, i: int, count: int) -> _Operation:
    """What makes a slice of result `i` of an operation."""
    out, operands = eqn.outvars[i], eqn.invars
    if eqn.primitive.name in ("jit", "pjit"):  # the latter in JAX 0.8
        program = eqn.params["jaxpr"]
        inside = SlicedResult(program, program.jaxpr.outvars[i], count)
        # It stays a program by itself: then XLA shards a choice of two zeros as the condition,
        # before it sees that they are the same.
        return _Operation(
            out,
            [operands[k] for k in inside.inputs],
            [operands[k] for k in inside.whole.inputs],
            jax.jit(lambda slices, whole: inside.one(slices, inside.whole(*whole))),
        )
    if eqn.primitive.multiple_results or out.aval.sharding.spec[0] is not None:
        raise Unknown
    needed = list(zip(operands, _needs_slices(eqn, count), strict=True))
    return _Operation(
        out,
        [x for x, is_sliced in needed if is_sliced],
        [x for x, is_sliced in needed if not is_sliced],
        functools.partial(_bound, eqn, [is_sliced for _, is_sliced in needed], count),
    )


def _needs_slices(eqn: Equation, count: int) -> list[bool]:
    """For each operand, whether a slice of it makes a slice of the result; else all of it does."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    shapes = [x.aval.shape for x in eqn.invars]
    has_rows = shapes[0][:1] == shape[:1] if shapes else False
    if name == "broadcast_in_dim":
        return [has_rows and eqn.params["broadcast_dimensions"][0] == 0]
    if name == "reshape" and shapes[0] and shapes[0][0] % count == 0:
        return [True]
    if name in ("bitcast_convert_type", "slice") and has_rows:
        return [True]
    if name == "transpose" and eqn.params["permutation"][0] == 0:
        return [True]
    if elementwise.mixes(eqn, lambda shape: shape != ()):
        raise Unknown
    return [x == shape for x in shapes]


def _bound(
    eqn: Equation,
    needs_slices: list[bool],
    count: int,
    slices: list[jax.Array],
    whole: list[jax.Array | np.ndarray],
) -> jax.Array:
    """An operation, on slices of some operands."""
    operands = {True: iter(slices), False: iter(whole)}
    params = dict(eqn.params)
    if name := _ROWS.get(eqn.primitive.name):
        params[name] = (eqn.outvars[0].aval.shape[0] // count, *params[name][1:])
    with eqn.ctx.manager:
        result: jax.Array = eqn.primitive.bind(*(next(operands[x]) for x in needs_slices), **params)
    return result
