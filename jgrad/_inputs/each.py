"""A method, written for one leaf, of every leaf: the way from lists to leaves and back."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jgrad._arithmetic import leafwise
from jgrad._inputs.moment import LeafMoment, Moment


def of_one_leaf(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `each` of a function of one leaf: of its gradient, first, then of anything else.

    It is called where there is a gradient. An argument is a list with an entry per leaf, a number
    for all of them, a tuple of both, or a `Moment`, of which `f` gets a `LeafMoment` and writes the
    new one into it. Returns what `f` returns, and the new moments in order.
    """

    @functools.wraps(f)
    def traced(*args: Any) -> tuple[Any, list[Any]]:
        result = f(*args)
        return result, [x.new for x in args if isinstance(x, LeafMoment)]

    def each(g: list[Any], *args: Any) -> tuple[Any, ...]:
        rows = [
            None if x is None else tuple(_entry(a, i) for a in (g, *args)) for i, x in enumerate(g)
        ]
        done = leafwise.run([None if row is None else (traced, row) for row in rows])
        moments = [x for x in args if isinstance(x, Moment)]
        new = [[None if x is None else x[1][k] for x in done] for k in range(len(moments))]
        return [None if x is None else x[0] for x in done], *map(Moment.settled, moments, new)

    return each


def _entry(x: Any, i: int) -> Any:
    if isinstance(x, Moment):
        return x.of_leaf(i)
    if isinstance(x, tuple):
        return jax.tree.unflatten(_structure(x), [_entry(y, i) for y in x])
    return x[i] if isinstance(x, list) else x


def _structure(x: tuple[Any, ...]) -> Any:
    return jax.tree.structure(x, is_leaf=lambda y: y is not x)
