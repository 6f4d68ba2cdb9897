"""A method, written as a function of one leaf, of all leaves: from lists to leaves and back.

Leaves whose moments are in 8 bits are one operation each, which is a kernel on accelerators. Where
the method ends there, that operation may also do what follows: it keeps a skipped step out, and
adds the update to the weight if `apply_gradients` says so.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leafwise import Call, PerLeaf
from jgrad._inputs.around import Rest, origin
from jgrad._inputs.inputs import Finished, Inputs
from jgrad._inputs.moment import Moment
from jgrad._kernels import platforms
from jgrad._kernels.leaf_step import Place, has_kernel
from jgrad._kernels.moment import LeafMoment, Moments, is_rounded, written

Function = Callable[..., Any]


class Descent(NamedTuple):
    """What makes an update of a direction: -rate (direction + decay w).

    Attributes:
      decay: of each leaf; None for none.
      rate: the learning rate of each leaf.
      rule: see `rules.update_of_leaf`.
      has_rate: whether the direction has the learning rate already.
    """

    decay: PerLeaf
    rate: PerLeaf
    rule: str
    has_rate: bool = False

    @property
    def of_leaf(self) -> Function:
        """(direction, what has its signs, w, decay, rate) -> update."""
        return _of_leaf(self.rule, self.has_rate)

    def updates(
        self, directions: list[Any], w: list[Any] | None, like: list[Any] | None = None
    ) -> list[Any]:
        """The update of each leaf, from a direction that no function of one leaf returned."""
        columns = leafwise.zip_leaves(directions, like, w, self.decay, self.rate)
        return leafwise.run([None if x[0] is None else (self.of_leaf, x) for x in columns])

    def is_cheap_after_kernel(self, w: Any) -> bool:
        """Whether a kernel had better write the direction.

        XLA joins what follows with what reads the update, so that the weight is read once. Not if
        the direction is larger than the update, nor if its signs were a second array.
        """
        return self.rule != "cautious" and (w is None or w.dtype.itemsize >= 4)


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
        function = _with_options(self._function, tuple(sorted(options.items())))
        calls: list[Call | None] = [None] * len(g)
        for i, x in enumerate(g):
            if x is not None:
                leaf = _Leaf.of(i, g, args)
                calls[i] = leaf.in_kernel(function) if leaf.has_kernel else leaf.call(function)
        return _results(calls, args)

    def update(
        self, inputs: Inputs, g: list[Any], *args: Any, descent: Descent | None, **options: Any
    ) -> tuple[Any, ...]:
        """The update of each leaf, with which the method ends, and then the new moments.

        The function returns the direction, or that and an array that has its signs.

        Args:
          inputs: of the method.
          g: see above.
          args: see above.
          descent: what makes an update of the direction; None where that is the update.
          options: see above.
        """
        direction = _with_options(self._function, tuple(sorted(options.items())))
        descending = None if descent is None else descent.of_leaf
        function = _descending(direction, descending)
        calls: list[Call | None] = [None] * len(g)
        after: dict[int, tuple[Any, ...]] = {}
        rests: dict[int, Rest | None] = {}
        for i, x in enumerate(g):
            if x is None:
                continue
            leaf, w = _Leaf.of(i, g, args), None if inputs.w is None else inputs.w[i]
            steps = () if descent is None else (w, *_entry((descent.decay, descent.rate), i))
            if not leaf.has_kernel:
                calls[i] = leaf.call(function, *steps)
                continue
            rest = inputs.rest(i)
            if rest is None and descent is not None and descent.is_cheap_after_kernel(w):
                calls[i], after[i] = leaf.in_kernel(_descending(direction, None)), steps
                continue
            rests[i] = rest
            calls[i] = leaf.in_kernel(function, *steps, ending=inputs.finishing(i), rest=rest, w=w)
        updates, *new = _results(calls, args)
        for i, rest in rests.items():
            update, *others = updates[i]
            if rest is not None and inputs.then is not None:
                inputs.then.note(update, tuple(others))
            updates[i] = Finished(update)
        later = [descending and (descending, (updates[i], None, *x)) for i, x in after.items()]
        for i, update in zip(after, leafwise.run(later), strict=True):
            updates[i] = update
        return updates, *new


def of_one_leaf(function: Function) -> LeafFunction:
    """Makes a function of one leaf one of all leaves; see `LeafFunction`."""
    return LeafFunction(function)


@of_one_leaf
def _rounded(x: jax.Array, moment: Moments) -> jax.Array:
    return moment.write(leafwise.identity, x)


def rounded(moment: Moment, values: list[Any]) -> list[Any]:
    """Arrays of full precision as a moment has them; those that need no rounding as they are."""
    with_old = zip(values, moment.old, strict=True)
    _, new = _rounded([x if is_rounded(old) else None for x, old in with_old], moment)
    return [x if y is None else y for x, y in zip(values, new.stored, strict=True)]


class _Leaf(NamedTuple):
    """The arguments of a function of one leaf, the first of which is the gradient.

    Attributes:
      arguments: see above.
      place: how the leaf is sharded, if the user says it.
      has_kernel: whether all of its moments are in 8 bits, in whole rows.
    """

    arguments: tuple[Any, ...]
    place: Place | None
    has_kernel: bool

    @classmethod
    def of(cls, i: int, g: list[Any], args: tuple[Any, ...]) -> "_Leaf":
        arguments, moments, place = [g[i]], [], None
        for x in args:
            arguments.append(_entry(x, i))
            if isinstance(x, Moment):
                moments.append(has_kernel(arguments[-1]))
                place = x.places[i] if x.places else place
        return cls(tuple(arguments), place, bool(moments) and all(moments))

    def call(self, function: Function, *more: Any) -> Call:
        """The function as it is, which also returns what it wrote."""
        return _with_moments(function), (*self.arguments, *more)

    def in_kernel(
        self,
        function: Function,
        *more: Any,
        ending: tuple[Function | None, tuple[jax.Array, ...]] = (None, ()),
        rest: Rest | None = None,
        w: Any = None,
    ) -> Call:
        """The function, what the gradient is made of, and what follows, as one operation.

        Of the weight `w` the rest knows how it is made of what the operation reads.
        """
        made, (finish, flag) = origin(self.arguments[0]), ending
        arguments = (*self.arguments[1:], *more)
        if rest is not None:
            arguments = tuple(_HERE if x is w else x for x in arguments)
        after = None if rest is None else (rest.function, rest.weight, rest.replaces)
        kernel = _kernel(function, made.functions, finish, after, self.place)
        arrays = () if rest is None else rest.arrays
        return kernel, (made.arrays, arguments, flag, arrays)


def _results(calls: list[Call | None], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What functions of one leaf returned, as a list, and the new moments that they wrote."""
    moments = [x for x in args if isinstance(x, Moment)]
    results = leafwise.run(calls)
    values = [None if x is None else x[0] for x in results]
    new = ([None if x is None else x[1][k] for x in results] for k in range(len(moments)))
    return values, *map(Moment.written, moments, new)


def _entry(x: Any, i: int) -> Any:
    """What an argument says of one leaf."""
    if isinstance(x, Moment):
        return x.of_leaf(i)
    if isinstance(x, tuple):
        entries = [_entry(y, i) for y in x]
        return type(x)(*entries) if hasattr(x, "_fields") else tuple(entries)
    return x[i] if isinstance(x, list) else x


# One function object for each choice, so that JAX's caches find it again.


@functools.cache
def _with_options(function: Function, options: tuple[tuple[str, Any], ...]) -> Function:
    return functools.partial(function, **dict(options)) if options else function


@functools.cache
def _of_leaf(rule: str, has_rate: bool) -> Function:
    return functools.partial(rules.update_of_leaf, rule=rule, has_rate=has_rate)


@functools.cache
def _descending(direction: Function, descent: Function | None) -> Function:
    """The update of a leaf, from its direction; the last arguments are those of the descent."""

    def descending(*args: Any) -> jax.Array:
        args, steps = (args, ()) if descent is None else (args[:-3], args[-3:])
        result = direction(*args)
        d, like = result if isinstance(result, tuple) else (result, None)
        return d if descent is None else descent(d, like, *steps)

    return descending


@functools.cache
def _with_moments(function: Function) -> Function:
    """A function of one leaf which also returns what it wrote."""

    def with_moments(*args: Any) -> tuple[Any, list[Any]]:
        result = function(*args)
        return result, written([x for x in args if isinstance(x, LeafMoment)])

    return with_moments


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
