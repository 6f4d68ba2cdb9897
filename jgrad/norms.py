"""The norm of each layer, right at every scale, for a whole model at once.

A norm is asked for as a function and the arrays that it reads, not as an array: given `u`, XLA
would write a temporary as large as the parameters. Norms come back as *columns*, vectors with an
entry per layer, so that a trust ratio is one operation for many layers.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad import leafwise, numerics
from jgrad.leafwise import Function, Task, compiled

T = TypeVar("T")

# A task with the positions of its arguments in a list: it is static so, and shows what layers
# share.
_Static = tuple[Function, tuple[int, ...]]

# Layers per column. XLA's CPU backend compiles equal kernels once, but a scalar cut from a vector
# makes a kernel of its own for each position: 1000 of them, 18 ms each, for one vector of 1000.
_COLUMN = 16

# Columns of layers up to this size are rescaled by one operation on a copy; see `_scaled_sums`.
_SMALL = 2**14


def layer_norms(*groups: Sequence[Task]) -> list[list[jax.Array]]:
    """|f(*arrays)| of each layer of each group, as columns, in float32 or wider.

    The plain sum of squares overflows from 1e19 and vanishes below 1e-23 in float32. A scaled sum
    for every layer would be dear at each step, to run and to compile. So the plain sums come first,
    and one `lax.cond` for the whole model repeats them, each layer scaled by a power of two of its
    own, in the rare step in which some sum is not a normal number. Zero counts as such: a sum does
    not tell a layer of zeros from one too small. The derivative of a norm at zero is zero.

    Quickest to compile where layers of one shape stand side by side.
    """
    arguments = {id(x): x for group in groups for _, xs in group for x in xs}
    position = {key: i for i, key in enumerate(arguments)}
    static = [
        _in_columns([(f, tuple(position[id(x)] for x in xs)) for f, xs in group])
        for group in groups
    ]
    columns = tuple(tuple(column) for group in static for column in group)
    norms = iter(_norms(list(arguments.values()), columns=columns) if columns else [])
    return [[next(norms) for _ in group] for group in static]


def join(numbers: Sequence[ArrayLike]) -> list[jax.Array]:
    """One number per layer as columns, or as scalars where all layers share it."""
    columns = _in_columns(numbers)
    if all(x is numbers[0] for x in numbers):
        return [jnp.asarray(numbers[0], dtype=float)] * len(columns)
    return [jnp.stack([jnp.asarray(x, dtype=float) for x in column]) for column in columns]


def split(columns: Sequence[jax.Array]) -> list[jax.Array]:
    """The entries of the columns, as scalars."""
    return [
        jax.lax.squeeze(x, (0,))
        for column in columns
        for x in jax.lax.split(column, (1,) * column.size)
    ]


def _in_columns(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + _COLUMN] for i in range(0, len(items), _COLUMN)]


@compiled
def _norms(
    arguments: list[jax.Array], *, columns: tuple[tuple[_Static, ...], ...]
) -> list[jax.Array]:
    layers = [
        (_sum_of_squares(f), (None, *(arguments[i] for i in at)))
        for column in columns
        for f, at in column
    ]
    each = iter(leafwise.run(layers))
    sums = [[next(each) for _ in column] for column in columns]
    totals = [_concatenate(column) for column in sums]
    limits = [_Limits.of(column) for column in sums]

    every = _concatenate(totals)
    small = np.concatenate([limit.small for limit in limits]).astype(every.dtype)
    has_elements = [all(x.size for x in xs if x is not None) for _, xs in layers]
    unusual = ((every < small) & np.array(has_elements)) | (every == jnp.inf)

    def rescaled() -> list[jax.Array]:
        found = []
        for column, total, limit in zip(columns, totals, limits, strict=True):
            scale = _scale(total, *(jnp.asarray(x, total.dtype) for x in limit))
            found.append(_root(_scaled_sums(arguments, column, scale)) / scale)
        return found

    return jax.lax.cond(jnp.any(unusual), rescaled, lambda: [_root(total) for total in totals])


class _Limits(NamedTuple):
    """What sums of squares can hold, with an entry per layer.

    Powers of two, so that scaling rounds nothing.

    Attributes:
      small: sums below this may have lost squares to underflow; 2^-64 in float32.
      down: scale for sums that overflowed. Scaled by 2^-84, the squares of the largest float32 sum
        to a finite number over 2^40 elements.
      up: scale for small sums. Scaled by 2^89, the square of the smallest normal float32 is far
        from 0.
    """

    small: np.ndarray
    down: np.ndarray
    up: np.ndarray

    @classmethod
    def of(cls, sums: Sequence[jax.Array]) -> "_Limits":
        exponents = np.array([jnp.finfo(x.dtype).maxexp for x in sums])  # 128 in float32
        half = exponents // 2
        return cls(np.exp2(-half), np.exp2(-half - 20), np.exp2(exponents * 7 // 10))


@compiled
def _scale(total: jax.Array, small: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.where(total == jnp.inf, down, jnp.where(total < small, up, jnp.ones_like(total)))


_root = compiled(numerics.safe_sqrt)


def _scaled_sums(
    arguments: list[jax.Array], column: Sequence[_Static], scale: jax.Array
) -> jax.Array:
    """The sums of squares of one column again, with a scale for each layer.

    Compiled into every program and run in hardly any step, this must be small above all: layers
    that are alike, and not large, are stacked and done at once.
    """
    kinds = {(f, *((arguments[i].shape, arguments[i].dtype) for i in at)) for f, at in column}
    f, first = column[0]
    if len(kinds) > 1 or any(arguments[i].size > _SMALL for i in first):
        each = zip(split([scale]), column, strict=True)
        return _concatenate(
            [_sum_of_squares(f)(by, *(arguments[i] for i in at)) for by, (f, at) in each]
        )
    positions = list(zip(*(at for _, at in column), strict=True))  # an entry per argument of f
    shared = tuple(len(set(at)) == 1 for at in positions)
    given = [
        arguments[at[0]] if same else [arguments[i] for i in at]
        for at, same in zip(positions, shared, strict=True)
    ]
    return _sums_of_squares(f, shared)(scale, *given)


@functools.cache
def _sums_of_squares(f: Function, shared: tuple[bool, ...]) -> Function:
    """`_sum_of_squares` for layers that are alike: lists of arrays but where all share one."""

    @compiled
    def sums_of_squares(scale: jax.Array, *given: Any) -> jax.Array:
        stacked = [x if same else _stack(x) for x, same in zip(given, shared, strict=True)]
        axes = [None if same else 0 for same in shared]
        sums = jax.vmap(_sum_of_squares(f), in_axes=(0, *axes))(scale, *stacked)
        return sums.reshape(-1).astype(scale.dtype)

    return sums_of_squares


@functools.cache
def _sum_of_squares(f: Function) -> Function:
    """The function (scale, *arrays) -> the sum of |scale f(*arrays)|^2, of shape (1,)."""

    @compiled
    def sum_of_squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        x = f(*arrays)
        x = numerics.widen(x, numerics.real_dtype(x))
        if scale is not None:
            x = numerics.scaled(x, scale)
        return jnp.sum(numerics.abs_squared(x)).reshape(1)

    return sum_of_squares


def _concatenate(sums: Sequence[jax.Array]) -> jax.Array:
    real = numerics.real_dtype(*sums)
    return jax.lax.concatenate([numerics.widen(x, real) for x in sums], 0)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, with one operation for all where there is an axis to join along."""
    if arrays[0].ndim == 0:
        return jnp.stack(arrays)
    return jax.lax.concatenate(arrays, 0).reshape(len(arrays), *arrays[0].shape)
