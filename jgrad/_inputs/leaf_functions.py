"""Applies a method, which is written for one leaf, to all leaves: from lists to leaves and back.

Each leaf with 8-bit moments is one operation, which is a kernel on accelerators. If nothing else of
the method comes after it, this operation may also do what follows: leave out a skipped step, and
add the update to the weight for `apply_gradients`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leafwise import Call, Function, PerLeaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs.around import Origin, Rest, in_float32, origin
from jgrad._inputs.inputs import Finished, Inputs
from jgrad._inputs.moment import Moment
from jgrad._kernels import platforms
from jgrad._kernels.leaf_step import Place, in_memory
from jgrad._kernels.moment import KernelMoment, LeafMoment, Moments, written
from jgrad._trees import checks


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

    def updates(
        self, directions: list[Any], w: list[Any] | None, like: list[Any] | None = None
    ) -> list[Any]:
        """The update of each leaf, from a direction that no function of one leaf returned."""
        columns = leafwise.zip_leaves(directions, like, w, self.decay, self.rate)
        update = _update(self.rule, self.has_rate)
        return leafwise.run([None if x[0] is None else (update, x) for x in columns])


class LeafFunction:
    """Applies a function of one leaf to all leaves.

    The function gets the gradient, or what stands for it, and then the arrays and numbers of its
    leaf. For an argument that is a `Moment`, it gets the moment of the leaf, into which it writes
    the new one. Options are keyword-only, and static. It is only called if there is a gradient.
    """

    def __init__(self, function: Function, no_kernel: str = "") -> None:
        """`no_kernel` says why a TPU cannot have the function as a kernel, where it cannot."""
        # Kept here instead of globally, because the function may be a user's. One function object
        # for each choice, so that JAX's caches find it again.
        self._program = functools.cache(functools.partial(_program, function))
        self._kernel = functools.cache(functools.partial(_kernel, no_kernel))
        functools.update_wrapper(self, function)

    def __call__(self, g: list[Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        """What the function returns for each leaf, and then the new moments.

        Args:
          g: an entry for each leaf; None where there is nothing to do.
          args: lists with an entry per leaf, numbers for all of them, tuples of both, `Moment`s.
          options: of the function.
        """
        program = self._program(tuple(sorted(options.items())), None, whole=True)
        calls: list[Call | None] = [None] * len(g)
        for i, x in enumerate(g):
            if x is not None:
                leaf = _Leaf.of(i, g, args, self._kernel)
                calls[i] = leaf.in_kernel(program) if leaf.has_kernel else (program, leaf.arguments)
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
        chosen = tuple(sorted(options.items()))
        rule = None if descent is None else (descent.rule, descent.has_rate)
        program = self._program(chosen, rule)
        calls: list[Call | None] = [None] * len(g)
        told: list[int] = []
        later: dict[int, tuple[Any, ...]] = {}  # XLA fuses it with what reads the update
        for i, x in enumerate(g):
            if x is None:
                continue
            leaf = _Leaf.of(i, g, args, self._kernel)
            w = None if inputs.w is None else inputs.w[i]
            steps = (
                () if descent is None else (w, _entry(descent.decay, i), _entry(descent.rate, i))
            )
            if not leaf.has_kernel:
                calls[i] = program, (*leaf.arguments, *steps)
                continue
            rest = inputs.rest(i)
            if rest is None or not in_memory(w, jax.tree.leaves(rest.args)[0]):
                calls[i] = leaf.in_kernel(self._program(chosen, None))
                if descent is not None:
                    later[i] = steps
                continue
            told.append(i)
            calls[i] = leaf.in_kernel(program, *steps, ending=inputs.finishing(i), rest=rest, w=w)
        updates, *new = _results(calls, args)
        for i in told:
            update, *others = updates[i]
            if inputs.then is not None:
                inputs.then.note(update, tuple(others))
            updates[i] = Finished(update)
        if rule is not None:
            then: list[Call] = [
                (_update(*rule), (updates[i], None, *steps)) for i, steps in later.items()
            ]
            for i, update in zip(later, leafwise.run(then), strict=True):
                updates[i] = update
        return updates, *new


of_one_leaf = LeafFunction  # as methods are decorated


class _Leaf(NamedTuple):
    """The arguments of a function of one leaf, the first of which is the gradient.

    Attributes:
      arguments: see above.
      place: how the leaf is sharded, if the user says it.
      has_kernel: whether all of its moments are in 8 bits, in whole rows.
      make: makes a kernel of the function.
    """

    arguments: tuple[Any, ...]
    place: Place | None
    has_kernel: bool
    make: Function

    @classmethod
    def of(cls, i: int, g: list[Any], args: tuple[Any, ...], make: Function) -> "_Leaf":
        arguments, moments, place = [g[i]], [], None
        for x in args:
            arguments.append(_entry(x, i))
            if isinstance(x, Moment):
                moments.append(x.has_kernel(i))
                said = x.places[i] if x.places else None
                place = place if said is None or said.is_shard else said
        return cls(tuple(arguments), place, bool(moments) and all(moments), make)

    def in_kernel(
        self,
        function: Function,
        *more: Any,
        ending: tuple[Function | None, tuple[jax.Array, ...]] = (None, ()),
        rest: Rest | None = None,
        w: Any = None,
    ) -> Call:
        """The function, what its gradient and the weight `w` are made of, and what follows."""
        (finish, flag), (g, *others) = ending, self.arguments
        follows, rest_args, replaces = rest or (None, (), ())
        arguments = [_as_read(g), *(_as_read(x) if x is w else x for x in (*others, *more))]
        kernel = self.make(function, finish, follows, self.place)
        return kernel, (tuple(arguments), flag, rest_args, replaces)


def _as_read(x: Any) -> Any:
    """What a kernel reads in the place of a gradient or a weight."""
    if not checks.is_array(x):
        return x
    made = origin(x)
    if in_memory(made.arrays[0]):
        return made
    return x if in_memory(x) else in_float32(x)  # what reads it is not in the kernel


def _results(calls: list[Call | None], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of functions of one leaf, as a list, and the new moments that they wrote."""
    values: list[Any] = [None] * len(calls)
    moments = [(x, [None] * len(calls)) for x in args if isinstance(x, Moment)]
    for i, result in enumerate(leafwise.run(calls)):
        if result is not None:
            values[i], of_leaf = result
            for (_, new), x in zip(moments, of_leaf, strict=True):
                new[i] = x
    return values, *itertools.starmap(Moment.written, moments)


def _entry(x: Any, i: int) -> Any:
    """The entry of an argument for one leaf."""
    if isinstance(x, Moment):
        return x.of_leaf(i)
    if isinstance(x, tuple):
        entries = [_entry(y, i) for y in x]
        return type(x)(*entries) if hasattr(x, "_fields") else tuple(entries)
    return x[i] if isinstance(x, list) else x


@functools.cache  # one function object for each choice, so that JAX's caches find it again
def _update(rule: str, has_rate: bool) -> Function:
    return functools.partial(rules.update_of_leaf, rule=rule, has_rate=has_rate)


def _program(
    function: Function,
    options: tuple[tuple[str, Any], ...],
    rule: tuple[str, bool] | None,
    *,
    whole: bool = False,
) -> Function:
    """(arguments) -> what the function makes of a leaf, and the new moments that it wrote.

    The last arguments are those of a descent, if there is a rule for it: then it is the update.
    Else it is the direction, or the whole result.
    """
    given, update = dict(options), None if rule is None else _update(*rule)

    def program(*args: Any) -> tuple[Any, list[Any]]:
        own, steps = (args, ()) if update is None else (args[:-3], args[-3:])
        result = function(*own, **given)
        new = written([x for x in own if isinstance(x, LeafMoment | KernelMoment)])
        if whole:
            return result, new
        direction, like = result if isinstance(result, tuple) else (result, None)
        return direction if update is None else update(direction, like, *steps), new

    return program


def _kernel(
    no_kernel: str,
    function: Function,
    finish: Function | None,
    follows: Function | None,
    place: Place | None,
) -> Function:
    """A function of one leaf in 8 bits, with all that follows it, as one operation.

    `no_kernel` says why a TPU cannot have the function as a kernel; "" if it can.
    """

    def step(
        arguments: tuple[Any, ...], flag: tuple[jax.Array, ...], rest_args: tuple[Any, ...]
    ) -> tuple[jax.Array, ...]:
        results, _ = function(*(x.array() if isinstance(x, Origin) else x for x in arguments))
        if finish is None or follows is None:
            return results if isinstance(results, tuple) else (results,)
        update = finish(results, *flag)
        return (update, *follows(update, *rest_args))

    def call(*args: Any) -> tuple[Any, list[Any]]:
        values, moments = platforms.run(
            step, args[:3], replaces=args[3], place=place, no_kernel=no_kernel
        )
        return values[0] if len(values) == 1 and finish is None else tuple(values), moments

    return call


# ---- functions of one leaf that several methods have -------------------------------------------


@of_one_leaf
def average_of_leaf(x: jax.Array, moment: Moments, beta: BetaForms) -> jax.Array:
    """The average of arrays, with this one in it."""
    return moment.write(rules.average, x, moment.old, beta.value, beta.complement)
