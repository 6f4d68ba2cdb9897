"""A method, written as a function of one leaf, of all leaves: from lists to leaves and back.

Leaves whose moments are in 8 bits are one operation each, which is a kernel on accelerators. If the
method ends there, that operation also does what follows: it keeps a skipped step out, and adds the
update to the weight where `apply_gradients` says so.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax

from jgrad._arithmetic import leafwise
from jgrad._inputs.around import Rest, origin
from jgrad._inputs.inputs import Finished, Inputs
from jgrad._inputs.moment import Moment
from jgrad._kernels import platforms
from jgrad._kernels.leaf_step import Place, has_kernel
from jgrad._kernels.moment import LeafMoment

Function = Callable[..., Any]


class LeafFunction:
    """A function of one leaf as one of all leaves.

    The function is given the gradient, or what stands for it, and then arrays and numbers of its
    leaf. For an argument that is a `Moment` it is given the moment of the leaf, into which it
    writes the new one. Options are keyword-only, and static. It is called where there is a
    gradient.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, g: list[Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        """What the function returns for each leaf, and then the new moments.

        Args:
          g: an entry for each leaf; None where there is nothing to do.
          args: lists with an entry per leaf, numbers for all of them, tuples of both, `Moment`s.
          options: of the function.
        """
        return self._of_all(None, g, args, options)

    def update(self, inputs: Inputs, g: list[Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        """The same of a function that returns the update, with which the method ends."""
        return self._of_all(inputs, g, args, options)

    def _of_all(
        self, inputs: Inputs | None, g: list[Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...]:
        function = _with_options(self._function, tuple(sorted(options.items())))
        moments = [x for x in args if isinstance(x, Moment)]
        calls: list[leafwise.Call | None] = [None] * len(g)
        rests: dict[int, Rest | None] = {}
        for i, x in enumerate(g):
            if x is None:
                continue
            arguments = tuple(_entry(a, i) for a in (g, *args))
            of_leaf = [a for a in arguments if isinstance(a, LeafMoment)]
            if not (of_leaf and all(map(has_kernel, of_leaf))):
                calls[i] = _written(function), arguments
                continue
            place = moments[0].places[i] if moments[0].places else None
            made = origin(x)
            if inputs is None:
                static = made.functions, None, None, place
                calls[i] = _kernel(function, *static), (made.arrays, arguments[1:], (), ())
                continue
            rests[i] = rest = inputs.rest(i)
            if rest is not None:  # which has the weight
                arguments = tuple(_HERE if a is inputs.w[i] else a for a in arguments)
            finish, flag = inputs.finishing(i)
            after = None if rest is None else (rest.function, rest.weight, rest.replaces)
            arrays = () if rest is None else rest.arrays
            calls[i] = (
                _kernel(function, made.functions, finish, after, place),
                (made.arrays, arguments[1:], flag, arrays),
            )
        results = leafwise.run(calls)
        new = [[None if r is None else r[1][k] for r in results] for k in range(len(moments))]
        values = [None if r is None else r[0] for r in results]
        for i, rest in rests.items():
            update, *others = values[i]
            if rest is not None:
                inputs.then.note(update, tuple(others))
            values[i] = Finished(update)
        return values, *map(Moment.written, moments, new)


def of_one_leaf(function: Function) -> LeafFunction:
    """Makes a function of one leaf one of all leaves; see `LeafFunction`."""
    return LeafFunction(function)


def _entry(x: Any, i: int) -> Any:
    """What an argument says of one leaf."""
    if isinstance(x, Moment):
        return x.of_leaf(i)
    if isinstance(x, tuple):
        return jax.tree.unflatten(_structure(x), [_entry(y, i) for y in x])
    return x[i] if isinstance(x, list) else x


def _structure(x: tuple[Any, ...]) -> Any:
    return jax.tree.structure(x, is_leaf=lambda y: y is not x)


# One function object for each choice, so that JAX's caches find it again.


@functools.cache
def _with_options(function: Function, options: tuple[tuple[str, Any], ...]) -> Function:
    return functools.partial(function, **dict(options)) if options else function


@functools.cache
def _written(function: Function) -> Function:
    """A function of one leaf which also returns what it wrote."""

    def written(*args: Any) -> tuple[Any, list[Any]]:
        result = function(*args)
        return result, [x.new for x in args if isinstance(x, LeafMoment)]

    return written


@jax.tree_util.register_static
class _Here:
    """Stands for the weight, where what follows the update has it."""


_HERE = _Here()


@functools.cache
def _kernel(
    function: Function,
    before: tuple[tuple[Function, int], ...],
    finish: Function | None,
    rest: tuple[Function, Function, tuple[int | None, ...]] | None,
    place: Place | None,
) -> Function:
    """A function of one leaf in 8 bits, with all that follows it, as one operation."""
    after, weight, replaces = rest if rest is not None else (None, None, ())

    def step(
        made: tuple[Any, ...],
        arguments: tuple[Any, ...],
        flag: tuple[jax.Array, ...],
        arrays: tuple[Any, ...],
    ) -> tuple[jax.Array, ...]:
        g, *numbers = made
        for f, count in before:
            g, numbers = f(g, *numbers[:count]), numbers[count:]
        if weight is not None:
            arguments = tuple(weight(*arrays) if x is _HERE else x for x in arguments)
        results = function(g, *arguments)
        if finish is None:
            return results if isinstance(results, tuple) else (results,)
        update = finish(results, *flag)
        return (update, *(() if after is None else after(update, *arrays)))

    def call(*args: Any) -> tuple[Any, list[Any]]:
        counts = [len(jax.tree.leaves(x)) for x in (args[:3], *args[3])]
        first = list(itertools.accumulate(counts))  # of each array of the rest
        where = [None if i is None else first[i] for i in replaces]
        values, moments = platforms.run(step, args, replaces=where, place=place)
        return values[0] if len(values) == 1 and finish is None else tuple(values), moments

    return call
