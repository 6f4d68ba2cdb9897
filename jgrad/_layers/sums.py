"""The sum of squares of each layer: plain, or with every layer scaled first.

Compiled functions of what a norm reads, so that no array as large as the parameters is written.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function, Task, compiled
from jgrad._layers.layer_axes import Place
from jgrad._packed import row_sums as buffers
from jgrad._packed.rows import Rows

# Columns of leaves up to this size are rescaled by one operation on a copy; see `rescaled`.
_SMALL = 2**14


class Leaf(NamedTuple):
    """A leaf whose layers are measured: `f(*arguments)`.

    Static: arguments are positions in a list, which also shows what leaves share.
    """

    f: Function
    arguments: tuple[int, ...]
    place: Place


def task(arguments: Sequence[jax.Array], leaf: Leaf, scale: jax.Array | None = None) -> Task:
    """The sums of squares of a leaf, as a vector over its layers, each scaled first."""
    xs = (arguments[i] for i in leaf.arguments)
    return _of_leaf(leaf.f, leaf.place), (scale, *xs)


class Limits(NamedTuple):
    """What sums of squares can hold, with an entry per layer.

    Powers of two, so that scaling rounds nothing.

    Attributes:
      small: sums below this may have lost squares to underflow; 2^-64 in float32.
      tiny: sums below this are scaled once more; 2^-100 in float32.
      down: scale for sums that overflowed. Scaled by 2^-84, the squares of the largest float32 sum
        to a finite number over 2^40 elements.
      up: scale for small sums, 2^50 in float32.
      far_up: scale for tiny sums. Scaled by 2^80, the square of the smallest normal float32 is far
        from 0. Of larger norms, the square of this scale is too much for the slope.
    """

    small: np.ndarray
    tiny: np.ndarray
    down: np.ndarray
    up: np.ndarray
    far_up: np.ndarray

    @classmethod
    def of(cls, sums: Sequence[jax.Array]) -> "Limits":
        exponents = np.array([jnp.finfo(x.dtype).maxexp for x in sums for _ in range(x.size)])
        half, part = exponents // 2, exponents // 64
        powers = (-half, -50 * part, -half - 20, 25 * part, 40 * part)
        return cls(*(np.exp2(power) for power in powers))

    def scale(self, total: jax.Array) -> jax.Array:
        """The scale of each layer, from its plain sum."""
        return _choose(jax.lax.stop_gradient(total), *(jnp.asarray(x, total.dtype) for x in self))


@compiled
def _choose(
    total: jax.Array,
    small: jax.Array,
    tiny: jax.Array,
    down: jax.Array,
    up: jax.Array,
    far_up: jax.Array,
) -> jax.Array:
    scale = jnp.where(total < tiny, far_up, jnp.where(total < small, up, jnp.ones_like(total)))
    return jnp.where(total == jnp.inf, down, scale)


def rescaled(arguments: Sequence[jax.Array], column: Sequence[Leaf], scale: jax.Array) -> jax.Array:
    """The sums of squares of one column again, with a scale for each layer.

    Compiled into every program and run in hardly any step, this must be small above all: leaves
    that are alike, and not large, are stacked and done at once.
    """
    first = column[0]
    own = [arguments[i] for i in first.arguments]
    kinds = {(of.f, of.place, *(jax.typeof(arguments[i]) for i in of.arguments)) for of in column}
    if len(kinds) > 1 or any(x.size > _SMALL or _is_sharded(x) for x in own):
        scales = jax.lax.split(scale, [of.place.layers for of in column])
        each = zip(column, scales, strict=True)
        return concatenate([f(*xs) for f, xs in (task(arguments, of, by) for of, by in each)])
    positions = list(zip(*(of.arguments for of in column), strict=True))  # per argument of f
    shared = tuple(len(set(at)) == 1 for at in positions)
    given = [
        arguments[at[0]] if same else [arguments[i] for i in at]
        for at, same in zip(positions, shared, strict=True)
    ]
    by = scale.reshape(len(column), -1)
    return _of_stack(first.f, shared, first.place)(by, *given)


@functools.cache
def _of_stack(f: Function, shared: tuple[bool, ...], place: Place) -> Function:
    """`_of_leaf` for leaves that are alike: lists of arrays but where all share one."""

    @compiled
    def of_stack(scale: jax.Array, *given: Any) -> jax.Array:
        together = [x if same else _stack(x) for x, same in zip(given, shared, strict=True)]
        axes = [None if same else 0 for same in shared]
        sums = jax.vmap(_of_leaf(f, place), in_axes=(0, *axes))(scale, *together)
        return sums.reshape(-1).astype(scale.dtype)

    return of_stack


@functools.cache
def _of_leaf(f: Function, place: Place) -> Function:
    """The function (scale, *arrays) -> the sums of |scale f(*arrays)|^2, a vector over layers."""

    def squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        x = f(*arrays)
        x = numerics.widen(x, numerics.real_dtype(x))
        return numerics.abs_squared(x if scale is None else numerics.scaled(x, scale))

    @compiled
    def of_leaf(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        by = None if scale is None else place.spread(scale)
        if isinstance(place, Rows):
            return buffers.sums(squares, place, (by, *arrays))
        return _whole(jnp.sum(squares(by, *arrays), axis=place.within)).reshape(-1)

    return of_leaf


def _whole(x: jax.Array) -> jax.Array:
    """`x` on every device of a mesh with explicit axes, so that it can be reshaped and joined."""
    if not _is_sharded(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))


def _is_sharded(x: jax.Array) -> bool:
    """Whether the type of `x` says how it is sharded: it has a mesh with explicit axes."""
    return any(part is not None for part in jax.typeof(x).sharding.spec)


def concatenate(sums: Sequence[jax.Array]) -> jax.Array:
    """Vectors as one, in the widest of their dtypes."""
    real = numerics.real_dtype(*sums)
    return jax.lax.concatenate([numerics.widen(x, real) for x in sums], 0)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, with one operation for all where there is an axis to join along."""
    if arrays[0].ndim == 0:
        return jnp.stack(arrays)
    return jax.lax.concatenate(arrays, 0).reshape(len(arrays), *arrays[0].shape)
