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


def of_call(
    call: Call, layers: LayerAxes, scale: jax.Array | None = None, *, is_opaque: bool = False
) -> Call:
    """The call of the sums of squares of what another call returns, of shape (num_layers,).

    Args:
      call: what is measured.
      layers: where its layers are.
      scale: what each layer is multiplied by first, a number per layer; None for 1.
      is_opaque: whether the arrays may be constants that are hidden from XLA, see `opaque`.
    """
    f, arrays = call
    return _of_array(f, layers, is_opaque), (scale, *arrays)


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
        real = numerics.real_dtype(*sums)
        return cls(*(np.exp2(power).astype(real) for power in powers))

    @jit_static_kwargs
    def unit(self, total: jax.Array) -> jax.Array:
        """The unit in which each layer is measured, from its plain sum: 1 where this is normal."""
        total = jax.lax.stop_gradient(total)
        unit = jnp.where(total < self.small, self.small_unit, jnp.ones_like(total))
        unit = jnp.where(total < self.tiny, self.tiny_unit, unit)
        return jnp.where(total == jnp.inf, self.large_unit, unit)


def rescaled(calls: Sequence[Call], layers: Sequence[LayerAxes], unit: jax.Array) -> jax.Array:
    """The sums of squares of one batch again, in a unit for each layer.

    This is compiled into every program and hardly ever runs, so it must be small above all. A
    division is what XLA's CPU backend computes once for all kernels that read it. Small arrays that
    are alike are stacked, and one operation computes them: array by array, a CPU's program of LAMB
    on 300 leaves takes a third longer to build. Arrays that may be sharded are taken one by one,
    since their parts would be moved between devices.
    """
    scale = 1 / unit
    f, arrays = calls[0]
    kinds = {(f, axes, *map(jax.typeof, xs)) for (f, xs), axes in zip(calls, layers, strict=True)}
    if len(kinds) > 1 or any(x.size > _SMALL or may_be_sharded(x) for x in arrays):
        scales = jax.lax.split(scale, [axes.num_layers for axes in layers])
        of_layers = zip(calls, layers, scales, strict=True)
        return concatenate(leafwise.run([of_call(*x, is_opaque=True) for x in of_layers]))
    columns = list(zip(*(xs for _, xs in calls), strict=True))  # for each argument of f
    shared = tuple(all(x is column[0] for x in column) for column in columns)
    arguments = [x[0] if same else x for x, same in zip(columns, shared, strict=True)]
    return _of_stack(f, shared, layers[0])(scale.reshape(len(calls), -1), *arguments)


@functools.cache
def _of_stack(f: Function, shared: tuple[bool, ...], layers: LayerAxes) -> Function:
    """`_of_array` for arrays that are alike: each argument is a tuple, or one that all share."""

    @jit_static_kwargs
    def of_stack(scale: jax.Array, *columns: Any) -> jax.Array:
        together = [x if same else _stack(x) for x, same in zip(columns, shared, strict=True)]
        axes = [None if same else 0 for same in shared]
        of_one = _of_array(f, layers, True)
        sums = jax.vmap(of_one, in_axes=(0, *axes))(scale, *together)
        return sums.reshape(-1).astype(scale.dtype)

    return of_stack


@functools.cache  # one function object for each call, so that JAX's caches find it again
def _of_array(f: Function, layers: LayerAxes, is_opaque: bool) -> Function:
    """The function (scale, *arrays) -> sums of |scale f(*arrays)|^2, of shape (num_layers,)."""

    def squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        x = f(*arrays)
        x = numerics.widen(x, numerics.real_dtype(x))
        return numerics.abs_squared(x if scale is None else numerics.scaled(x, scale))

    @jit_static_kwargs
    def of_array(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        by = None if scale is None else layers.to_elements(scale)
        return layers.sum(squares, (by, *(opaque(arrays) if is_opaque else arrays)))

    return of_array


def opaque(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays, in which XLA sees no constants.

    It computes (s c)^2 as s^2 c^2 for a constant c, such as weights that a jitted function closes
    over. A scale is there because one of these squares is infinite or zero.
    """
    # One by one: joined, all would vary over the mesh axes over which one does.
    return list(map(jax.lax.optimization_barrier, arrays))


def concatenate(sums: Sequence[jax.Array]) -> jax.Array:
    """Vectors as one, in the widest of their dtypes."""
    real = numerics.real_dtype(*sums)
    return jax.lax.concatenate([numerics.widen(x, real) for x in sums], 0)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """The arrays along a new axis, which is not sharded where an axis of theirs is."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in arrays], 0)
