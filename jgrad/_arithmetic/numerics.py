"""Arithmetic that stays accurate where the textbook formula does not.

Three things go wrong in single and half precision when an optimizer is written as in its paper:
half-precision arrays round every intermediate result, `1 - beta**t` suffers from cancellation, and
`sqrt` has no derivative at zero. This file has the remedies.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jgrad._trees import shardings

# log(0), finite so that `step * log(beta)` is 0 and not NaN at step 0, and still e^-infinity
# elsewhere.
LOG_OF_ZERO = -1e30


def real_dtype(*arrays: jax.Array) -> np.dtype:
    """The real dtype to work in: float64 where one of the arrays has it, else float32."""
    for a in arrays:
        if jnp.finfo(a.dtype).bits == 64:
            return np.dtype(np.float64)
    return np.dtype(np.float32)


def floating(x: ArrayLike) -> jax.Array:
    """`x` as an array; integers and bools in the default float dtype."""
    x = jnp.asarray(x)
    return strong(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float))


def strong(x: jax.Array) -> jax.Array:
    """`x` without a weak type: a weakly typed argument is traced again after one update."""
    # `weak_type` is not documented, checked in JAX 0.8 to 0.12.
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def complex_dtype(real: np.dtype) -> np.dtype:
    """The complex dtype whose parts are `real`, or wider."""
    return np.dtype(np.complex128 if real == np.float64 else np.complex64)


def widen(x: jax.Array, real: np.dtype) -> jax.Array:
    """`x` in the dtype `real`, or in its complex counterpart.

    Explicit, since strict promotion forbids bfloat16 + float32.
    """
    dtype = complex_dtype(real) if jnp.iscomplexobj(x) else real
    return x if x.dtype == dtype else x.astype(dtype)


def wide(x: ArrayLike) -> jax.Array:
    """An inexact array in float32 or wider, any other as it is."""
    x = jnp.asarray(x)
    return widen(x, real_dtype(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`factor * x` for a real `factor` and a real or complex `x` of the same precision."""
    return factor.astype(x.dtype) * x


def abs_squared(x: jax.Array) -> jax.Array:
    """|x|^2, real for complex `x` too (`x * x` of a complex gradient is not a second moment).

    Not `jnp.square`: its derivative is computed as 2 x, which overflows before x does.
    """
    if jnp.iscomplexobj(x):
        return x.real * x.real + x.imag * x.imag
    return x * x


def clipped(x: jax.Array, largest: float) -> jax.Array:
    """`x`, its parts within [-largest, largest]; NaN stays NaN."""
    if jnp.iscomplexobj(x):
        return jax.lax.complex(clipped(x.real, largest), clipped(x.imag, largest))
    return jax.lax.clamp(jnp.asarray(-largest, x.dtype), x, jnp.asarray(largest, x.dtype))


def squarable(x: jax.Array, terms: int = 1) -> jax.Array:
    """`x`, its parts clipped to the largest power of two whose square is finite (2^63 in float32).

    For sums of `terms` squares, to the root of what is the largest in `bounded_square`. Infinities
    stay infinite, so that a fault is seen.
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(squarable(x.real, terms), squarable(x.imag, terms))
    largest = 2.0 ** (jnp.finfo(x.dtype).maxexp // 2 - 1) / math.sqrt(terms)
    return jax.lax.select(jnp.isfinite(x), clipped(x, largest), x)


def bounded_square(x: jax.Array, terms: int = 1) -> jax.Array:
    """|x|^2, or 2^126 / terms in float32 where that is less, so that a sum of `terms` is finite."""
    square = abs_squared(x)
    largest = 2.0 ** (jnp.finfo(square.dtype).maxexp - 2) / terms
    return jnp.minimum(square, jnp.asarray(largest, square.dtype))


def positive(x: jax.Array) -> jax.Array:
    """`x`, or the smallest normal number of its dtype where it is less; NaN stays NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def saturated(x: jax.Array, *sources: jax.Array) -> jax.Array:
    """`x`, or the largest number of its sign where it overflowed from finite `sources`."""
    if jnp.iscomplexobj(x):
        parts = (saturated(part(x), *(part(y) for y in sources)) for part in (jnp.real, jnp.imag))
        return jax.lax.complex(*parts)
    finite = functools.reduce(operator.and_, map(jnp.isfinite, sources))
    return jnp.where(finite, clipped(x, float(jnp.finfo(x.dtype).max)), x)


def addable(x: jax.Array) -> jax.Array:
    """`x`, its parts clipped so that no finite number overflows when `x` is added.

    The bound is 2^102 in float32, a quarter of the distance between the largest number and the next
    below, which rounding removes.
    """
    return clipped(x, largest_addable(x.dtype))


def largest_addable(dtype: DTypeLike) -> float:
    """The bound of `addable`: 2^102 in float32."""
    info = jnp.finfo(dtype)
    return float(2.0 ** (info.maxexp - info.nmant - 3))


def largest_update(dtype: DTypeLike) -> float:
    """The bound of updates that can be added to any parameter; float16 has no room for one."""
    return largest_addable(dtype) if has_room(dtype) else math.inf


def largest_number(dtype: DTypeLike) -> float:
    """The bound of what saturates; not of float16, in which overflow is looked for instead."""
    return float(jnp.finfo(dtype).max) if has_room(dtype) else math.inf


def has_room(dtype: DTypeLike) -> bool:
    """Whether any update of a training can be added to any parameter; not in float16."""
    return bool(jnp.finfo(dtype).maxexp >= 128)


def same_direction(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether a and b have one sign, or, complex, Re(a conj(b)) > 0; False for NaN.

    By signs, and for complex numbers by their directions, since a product of two small or two large
    numbers vanishes or overflows. Real zeros have one sign. By comparisons, since a kernel lowered
    on a machine without a TPU has no `sign`.
    """
    if jnp.iscomplexobj(a):
        a, b = _in_unit_square(a), _in_unit_square(b)
        return a.real * b.real + a.imag * b.imag > 0
    return ((a > 0) & (b > 0)) | ((a < 0) & (b < 0)) | ((a == 0) & (b == 0))


def sign(x: jax.Array) -> jax.Array:
    """x / |x|, and 0 for 0, with derivative 0. NaN stays.

    Of real numbers by comparisons, see `same_direction`; without `stop_gradient`, for which older
    versions of JAX have no kernel.
    """
    if jnp.iscomplexobj(x):
        x = jax.lax.stop_gradient(_in_unit_square(x))
        root = safe_sqrt(abs_squared(x))
        return jax.lax.complex(safe_divide(x.real, root), safe_divide(x.imag, root))
    one = jnp.ones_like(x)
    zero = jnp.where(x == x, jnp.zeros_like(x), x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, zero))


def _in_unit_square(x: jax.Array) -> jax.Array:
    """x, divided by the larger of its parts; 0 for 0"""
    largest = jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))
    return jax.lax.complex(safe_divide(x.real, largest), safe_divide(x.imag, largest))


def saturating_float32(x: jax.Array) -> jax.Array:
    """In float32, at most its largest number where it is finite."""
    if x.dtype == jnp.float32:
        return x
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isinf(x), x, clipped(x, largest)).astype(jnp.float32)


def magnitude(x: jax.Array) -> jax.Array:
    """|x|, or of complex numbers the larger part, which does not overflow."""
    return jnp.maximum(abs(x.real), abs(x.imag)) if jnp.iscomplexobj(x) else abs(x)


def normal_scale(sizes: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest of magnitudes over some axes; 1 for zeros, whose derivatives are then finite.

    It is a normal number, and so is its reciprocal, by which matrices may be multiplied.
    """
    largest = jnp.max(sizes, axis=axes, keepdims=True)
    tiny = jnp.finfo(largest.dtype).tiny
    return jnp.where(largest == 0, jnp.ones_like(largest), jnp.clip(largest, tiny, 1 / tiny))


def product(
    x: jax.Array, y: jax.Array, *, adjoint_x: bool = False, adjoint_y: bool = False, **options: Any
) -> jax.Array:
    """X Y of matrices or stacks of them, or with X^H, or Y^H; options are of `dot_general`."""
    ndim = x.ndim
    over = ((ndim - 2 if adjoint_x else ndim - 1,), (ndim - 1 if adjoint_y else ndim - 2,))
    stacked = tuple(range(ndim - 2))
    x = x.conj() if adjoint_x and jnp.iscomplexobj(x) else x
    y = y.conj() if adjoint_y and jnp.iscomplexobj(y) else y
    return jax.lax.dot_general(x, y, (over, (stacked, stacked)), **options)


def zeros_like(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Zeros with the sharding of `x`.

    XLA puts constants on the first device, and constants inside a `jax.lax.cond` have no sharding;
    zeros computed from `x` keep its sharding. The comparison is not in the compiled program.
    """
    if 0 in x.shape:  # eagerly, JAX has no devices for an empty array with explicit axes
        return jnp.array(x, dtype, copy=True)
    zero = jnp.zeros((), x.dtype if dtype is None else dtype)
    # Without `jit`, a copy of 4 MB takes less time than two programs take to be compiled for a
    # shape. On a mesh, a program says what has which type.
    if (
        not (isinstance(x, jax.core.Tracer) or isinstance(zero, jax.core.Tracer))
        and x.size <= 2**20
        and isinstance(x.sharding, jax.sharding.SingleDeviceSharding)
        and jax.sharding.get_abstract_mesh().empty
        and x.aval.memory_space == jax.memory.Space.Device
    ):
        in_numpy = np.zeros(x.shape, zero.dtype)
        return jax.device_put(in_numpy, x.sharding if x.committed else None)
    zeros = jnp.where(x == x, zero, zero)
    # As of 0.12, JAX gives a choice between constants their type, whatever chooses.
    is_typed = jax.typeof(zeros).sharding.spec == jax.typeof(x).sharding.spec
    return zeros if is_typed else shardings.sharded_as(zeros, x)


def once(x: jax.Array) -> jax.Array:
    """`x`, a scalar or one per layer, so that XLA's CPU backend computes it once.

    It fuses cheap operations into the kernel of every leaf that reads them: those of a schedule are
    20 to 30 per leaf to compile. It never repeats a division, and this one is by 1.
    """
    if not isinstance(x, jax.core.Tracer):
        return x
    one = jnp.where(x == x, jnp.ones_like(x), x)
    return x / jax.lax.stop_gradient(one)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(x) with derivative 0 at 0. NaN stays NaN."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))


def safe_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, and 0 where b is 0, with derivatives that are finite there."""
    zero = b == 0
    return jnp.where(zero, jnp.zeros_like(b), a / jnp.where(zero, jnp.ones_like(b), b))


class BetaForms(NamedTuple):
    """A decay rate in the forms that the arithmetic needs: `beta`, `1 - beta` and `log(beta)`.

    Each is rounded by itself. Computed from a beta already rounded to float32, the other two are
    wrong in the fifth digit (at 0.999) or the second (at 0.999999), and so is the bias correction.
    Each field is a number, a tree of numbers, or a list with an entry per leaf.
    """

    value: Any
    complement: Any
    log: Any


def beta_from_array(beta: jax.Array) -> BetaForms:
    """The three forms of a scalar array, traced or not, in its own precision (float32 at least)."""
    beta = floating(beta)
    beta = widen(beta, real_dtype(beta))
    positive = beta > 0
    complement = 1.0 - beta
    log = jnp.log1p(-jnp.where(positive, complement, jnp.zeros_like(beta)))
    return BetaForms(beta, complement, jnp.where(positive, log, jnp.full_like(beta, LOG_OF_ZERO)))


def one_minus_power(log_beta: jax.Array, step: jax.Array) -> jax.Array:
    """1 - beta^step, to the last digit or two at every step; `step` may be fractional."""
    return -jnp.expm1(step * log_beta)
