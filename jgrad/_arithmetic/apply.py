"""The shared rules on lists of leaves.

A list has an entry for each leaf; anything else, a scalar of the model, is for all leaves. Where an
entry is `None` there is nothing to compute, and the result is `None`. Results are in float32 or
float64, not yet in the dtypes of state and parameters.

An *update* is what is added to the weights: w' = w + update.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leafwise import Call, Function

# A list with an entry per leaf, or one scalar for all of them.
PerLeaf = list[Any] | Any


def per_leaf(x: PerLeaf, count: int) -> list[Any]:
    """`x` as a list with an entry for each of `count` leaves."""
    return x if isinstance(x, list) else [x] * count


def side_by_side(*args: PerLeaf) -> list[tuple[Any, ...]]:
    """For each leaf, its entries; at least one argument is a list."""
    count = next(len(x) for x in args if isinstance(x, list))
    return list(zip(*(per_leaf(x, count) for x in args), strict=True))


def calls(rule: Function, *args: PerLeaf) -> list[Call | None]:
    """The call of `rule` on each leaf's entries."""
    rows = side_by_side(*args)
    return [None if any(x is None for x in row) else (rule, row) for row in rows]


def apply(rule: Function, *args: PerLeaf) -> list[Any]:
    """`rule` of each leaf's entries."""
    return leafwise.run(calls(rule, *args))


def decay_call(direction: jax.Array | None, w: jax.Array | None, decay: Any) -> Call | None:
    """The call of direction + decay w; a decay that is the Python number 0 compiles to nothing."""
    if direction is None:
        return None
    if is_zero(decay):
        return (leafwise.identity, (direction,))
    return (rules.add_scaled, (direction, w, decay))


def add_decay(direction: list[Any], w: list[Any] | None, decay: PerLeaf) -> list[Any]:
    """direction + decay w; without weights no decay but the number 0"""
    return leafwise.run([decay_call(*row) for row in side_by_side(direction, w, decay)])


def cast_back(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """New values in the dtypes of the old, which stay where there is no new one."""
    pairs = zip(new, old, strict=True)
    return [y if x is None else x if x.dtype == y.dtype else x.astype(y.dtype) for x, y in pairs]


def is_zero(number: Any) -> bool:
    """Whether it is the Python number 0, which stands for "none of it"."""
    return isinstance(number, (int, float)) and number == 0
