"""The sum of squares of each layer: plain, or with every layer scaled first.

A sum is asked for as a function and the arrays that it reads, so that no array as large as the
parameters is written.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs
from jgrad._layers.layer_axes import LayerAxes
from jgrad._trees.shardings import may_be_sharded

# Arrays of up to this many elements are rescaled together, on a stacked copy; see `rescaled`.
# On larger ones the copy costs more memory than the smaller program is worth.
_SMALL = 2**14


class Measured(NamedTuple):
    """An array whose layers are measured: `f(*arguments)`.

    Static: arguments are positions in a list, which also shows what arrays share.
    """

    f: Function
    arguments: tuple[int, ...]
    layers: LayerAxes


def call(arguments: Sequence[jax.Array], measured: Measured) -> Call:
    """The call of the sums of squares, of shape (num_layers,)."""
    xs = tuple(arguments[i] for i in measured.arguments)
    return of_call((measured.f, xs), measured.layers, None)


def of_call(inner: Call, layers: LayerAxes, scale: jax.Array | None) -> Call:
    """The call of the sums of squares of what another call returns, each layer scaled first."""
    f, xs = inner
    return _of_array(f, layers), (scale, *xs)


class SquareRange(NamedTuple):
    """The range in which sums of squares are exact enough, with an entry per layer.

    All are powers of two, so that scaling rounds nothing.

    Attributes:
      small: sums below this may have lost squares to underflow; 2^-64 in float32.
      tiny: sums below this are scaled once more; 2^-100 in float32.
      large_unit: unit for sums that overflowed, 2^84 in float32: then 2^40 elements as large as the
        largest float32 have a finite sum of squares.
      small_unit: unit for small sums, 2^-50 in float32.
      tiny_unit: unit for tiny sums, 2^-80 in float32: then the square of the smallest normal
        float32 is far from 0. For larger norms the derivative, which is divided by the square of
        this unit, would overflow.
    """

    small: np.ndarray
    tiny: np.ndarray
    large_unit: np.ndarray
    small_unit: np.ndarray
    tiny_unit: np.ndarray

    @classmethod
    def of(cls, sums: Sequence[jax.Array]) -> "SquareRange":
        exponents = np.array([jnp.finfo(x.dtype).maxexp for x in sums for _ in range(x.size)])
        half, part = exponents // 2, exponents // 64
        powers = (-half, -50 * part, half + 20, -25 * part, -40 * part)
        return cls(*(np.exp2(power) for power in powers))

    def unit(self, total: jax.Array) -> jax.Array:
        """That in which each layer is measured, from its plain sum: 1 where this is normal."""
        return _choose(jax.lax.stop_gradient(total), *(jnp.asarray(x, total.dtype) for x in self))


@jit_static_kwargs
def _choose(
    total: jax.Array,
    small: jax.Array,
    tiny: jax.Array,
    large_unit: jax.Array,
    small_unit: jax.Array,
    tiny_unit: jax.Array,
) -> jax.Array:
    unit = jnp.where(total < small, small_unit, jnp.ones_like(total))
    unit = jnp.where(total < tiny, tiny_unit, unit)
    return jnp.where(total == jnp.inf, large_unit, unit)


def rescaled(
    arguments: Sequence[jax.Array], batch: Sequence[Measured], unit: jax.Array
) -> jax.Array:
    """The sums of squares of one batch again, in a unit for each layer.

    This is compiled into every program and hardly ever runs, so it must be small above all. A
    division is what XLA's CPU backend computes once for all kernels that read it. Small arrays that
    are alike are stacked, and one operation computes them: array by array, a CPU's program of LAMB
    on 300 leaves takes a third longer to build. Arrays that may be sharded are taken one by one,
    since their parts would be moved between devices.
    """
    scale = 1 / unit
    first = batch[0]
    xs = [arguments[i] for i in first.arguments]
    kinds = {(m.f, m.layers, *(jax.typeof(arguments[i]) for i in m.arguments)) for m in batch}
    if len(kinds) > 1 or any(x.size > _SMALL or may_be_sharded(x) for x in xs):
        scales = jax.lax.split(scale, [m.layers.num_layers for m in batch])
        calls: list[Call] = [
            (_of_opaque(m.f, m.layers), (by, *(arguments[i] for i in m.arguments)))
            for m, by in zip(batch, scales, strict=True)
        ]
        return concatenate(leafwise.run(calls))
    positions = list(zip(*(m.arguments for m in batch), strict=True))  # per argument of f
    shared = tuple(len(set(at)) == 1 for at in positions)
    columns = [
        arguments[at[0]] if same else [arguments[i] for i in at]
        for at, same in zip(positions, shared, strict=True)
    ]
    by = scale.reshape(len(batch), -1)
    return _of_stack(first.f, shared, first.layers)(by, *columns)


@functools.cache
def _of_stack(f: Function, shared: tuple[bool, ...], layers: LayerAxes) -> Function:
    """`_of_opaque` for arrays that are alike: each argument is a list, or one that all share."""

    @jit_static_kwargs
    def of_stack(scale: jax.Array, *columns: Any) -> jax.Array:
        together = [x if same else _stack(x) for x, same in zip(columns, shared, strict=True)]
        axes = [None if same else 0 for same in shared]
        sums = jax.vmap(_of_opaque(f, layers), in_axes=(0, *axes))(scale, *together)
        return sums.reshape(-1).astype(scale.dtype)

    return of_stack


@functools.cache
def _of_array(f: Function, layers: LayerAxes) -> Function:
    """The function (scale, *arrays) -> sums of |scale f(*arrays)|^2, of shape (num_layers,)."""

    def squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        x = f(*arrays)
        x = numerics.widen(x, numerics.real_dtype(x))
        return numerics.abs_squared(x if scale is None else numerics.scaled(x, scale))

    @jit_static_kwargs
    def of_array(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        by = None if scale is None else layers.to_elements(scale)
        return layers.sum(squares, (by, *arrays))

    return of_array


@functools.cache
def _of_opaque(f: Function, layers: LayerAxes) -> Function:
    """`_of_array` of what may be constants."""
    of_array = _of_array(f, layers)
    return lambda scale, *arrays: of_array(scale, *opaque(arrays))


def opaque(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays, in which XLA sees no constants.

    It computes (s c)^2 as s^2 c^2 for a constant c, such as weights that a jitted function closes
    over. A scale is there because one of these squares is infinite or zero.
    """
    # One by one: joined, all would vary over the mesh axes over which one does.
    return [jax.lax.optimization_barrier(x) for x in arrays]


def concatenate(sums: Sequence[jax.Array]) -> jax.Array:
    """Vectors as one, in the widest of their dtypes."""
    real = numerics.real_dtype(*sums)
    return jax.lax.concatenate([numerics.widen(x, real) for x in sums], 0)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """The arrays along a new axis, which is not sharded where an axis of theirs is."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in arrays], 0)
