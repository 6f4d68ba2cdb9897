"""Applies a method, which is written for one leaf, to all leaves: from lists to leaves and back.

A form of moments may make the step of a leaf one operation on accelerators, see `Form.kernels`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leaf_moment import Moments, written
from jgrad._arithmetic.leafwise import Call, Function, PerLeaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.moment import Moment
from jgrad._trees import forms


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
        """What makes the update of one leaf."""
        return leafwise.fixed(rules.update_of_leaf, rule=self.rule, has_rate=self.has_rate)

    def updates(
        self, directions: list[Any], w: list[Any] | None, like: list[Any] | None = None
    ) -> list[Any]:
        """The update of each leaf, from a direction that no function of one leaf returned."""
        return leafwise.apply(self.of_leaf, directions, like, w, self.decay, self.rate)


class LeafFunction:
    """Applies a function of one leaf to all leaves.

    The function gets the gradient, or what stands for it, and then the arrays and numbers of its
    leaf. For an argument that is a `Moment`, it gets the moment of the leaf, into which it writes
    the new one. Options are keyword-only, and static.

    Attributes:
      no_kernel: why a TPU cannot have the function as a kernel; "" where it can.
      made: what forms have made of the function. Kept here instead of globally, because the
        function may be a user's.
    """

    def __init__(self, function: Function, no_kernel: str = "") -> None:
        """See above."""
        # One function object for each choice, so that JAX's caches find it again.
        self._program = functools.cache(functools.partial(_program, function))
        self.no_kernel, self.made = no_kernel, dict[Any, Any]()
        functools.update_wrapper(self, function)

    def __call__(self, g: list[Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        """What the function returns for each leaf, and then the new moments.

        Args:
          g: an entry for each leaf.
          args: lists with an entry per leaf, numbers for all of them, tuples of both, `Moment`s.
          options: of the function.
        """
        program = self._program(tuple(sorted(options.items())), None, whole=True)
        calls: list[Call] = []
        for i, x in enumerate(g):
            arguments = (x, *(_entry(y, i) for y in args))
            kernels = kernels_of(args, i)
            in_kernel = kernels and kernels(self, args).call(i, program, arguments)
            calls.append(in_kernel or (program, arguments))
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
        ending = None if descent is None else (descent.rule, descent.has_rate)
        program = self._program(chosen, ending)
        calls: list[Call] = []
        in_kernels: Any = None
        for i, x in enumerate(g):
            arguments = (x, *(_entry(y, i) for y in args))
            steps: tuple[Any, ...] = ()
            if descent is not None:
                w = None if inputs.w is None else inputs.w[i]
                steps = w, _entry(descent.decay, i), _entry(descent.rate, i)
            kernels = kernels_of(args, i)
            if kernels is None:
                calls.append((program, (*arguments, *steps)))
                continue
            in_kernels = in_kernels or kernels(self, args)
            alone = self._program(chosen, None)
            calls.append(in_kernels.update(inputs, i, program, arguments, steps, alone))
        updates, *new = _results(calls, args)
        if in_kernels is not None:
            in_kernels.finish(inputs, updates, None if descent is None else descent.of_leaf)
        return updates, *new


of_one_leaf = LeafFunction  # as methods are decorated


def kernels_of(args: Sequence[Any], i: int) -> Any:
    """What makes the step of a leaf one operation, if the form of all its moments has it."""
    old = [x.old[i] for x in args if isinstance(x, Moment)]
    kinds = {form and form.kernels(x) for x, form in zip(old, map(forms.find, old), strict=True)}
    return kinds.pop() if len(kinds) == 1 else None


def _results(calls: list[Call], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of functions of one leaf, as a list, and the new moments that they wrote."""
    moments = [x for x in args if isinstance(x, Moment)]
    if not calls:
        return [], *([] for _ in moments)
    values, new = zip(*leafwise.run(calls), strict=True)
    columns = list(map(list, zip(*new, strict=True)))
    for moment, column in zip(moments, columns, strict=True):
        if moment.commit is not None:
            moment.commit.settle(column, moment.old)
    return list(values), *columns


def _entry(x: Any, i: int) -> Any:
    """The entry of an argument for one leaf."""
    if isinstance(x, Moment):
        return x.of_leaf(i)
    if isinstance(x, tuple):
        entries = [_entry(y, i) for y in x]
        return type(x)(*entries) if hasattr(x, "_fields") else tuple(entries)
    return x[i] if isinstance(x, list) else x


def _program(
    function: Function,
    options: tuple[tuple[str, Any], ...],
    ending: tuple[str, bool] | None,
    *,
    whole: bool = False,
) -> Function:
    """(arguments) -> what the function makes of a leaf, and the new moments that it wrote.

    The last arguments are those of a descent, if it is one of that rule, and says that the
    direction has the rate or has not: then it is the update. Else it is the direction, or the whole
    result.
    """
    chosen = dict(options)

    def program(*args: Any) -> tuple[Any, list[Any]]:
        leaf_args, steps = (args, ()) if ending is None else (args[:-3], args[-3:])
        result = function(*leaf_args, **chosen)
        new = written([x for x in leaf_args if isinstance(x, Moments)])
        if whole:
            return result, new
        direction, like = result if isinstance(result, tuple) else (result, None)
        if ending is None:
            return direction, new
        rule, has_rate = ending
        return rules.update_of_leaf(direction, like, *steps, rule=rule, has_rate=has_rate), new

    return program


# ---- functions of one leaf that several methods have -------------------------------------------


@of_one_leaf
def average_of_leaf(x: jax.Array, moment: Moments, beta: BetaForms) -> jax.Array:
    """The average of arrays, with this one in it."""
    return moment.write(rules.average, x, moment.old, beta.value, beta.complement)
