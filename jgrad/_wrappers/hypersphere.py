"""A step on the sphere of all arrays of one norm, layer by layer, from three sums.

With r the norm that a layer keeps, u the direction and eta the rate,

    w' = r n / |n|,  n = w + a u,  a = eta r / |u|

is computed as w' - w = (s - 1) w + s a u with s = r / |n|. The three sums |w|^2, <w, u> and |u|^2
give d = (|n|^2 - r^2) / r^2, and s - 1 = -d / (sqrt(1 + d) (1 + sqrt(1 + d))), in which nothing
cancels; and a norm that has drifted from r comes back. Sums are taken in units, powers of two, so
that they neither overflow nor vanish.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs, on_leaf
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes
from jgrad._trees.shardings import varying_axes, varying_over

# Norms from 2^-40 to 2^40 are measured as they are, smaller ones in the first of these units and
# larger ones in the last: squares of the smallest normal float32, and sums of those of 2^40 of the
# largest, are normal numbers then. And where |w|^2 overflows in the unit of the radius, |w| is 2^24
# times as large or more, as `_factors` asks. Exponents of float32; those of float64 are eight
# times as large.
_LOW, _HIGH = -40, 40
_UNITS = (-76, 0, 86)

Factor = jax.Array | None  # by which an array is multiplied, layer by layer; None for 1


class _Sums(NamedTuple):
    """Of a batch of layers, an entry per layer.

    Attributes:
      ww: |w|^2, in the square of the unit of the radius.
      wu: <w, u>, in the units of both.
      uu: |u|^2, in the square of the unit of u.
      unit: that of u.
    """

    ww: jax.Array
    wu: jax.Array
    uu: jax.Array
    unit: jax.Array

    @classmethod
    def of(cls, stacked: jax.Array, unit: jax.Array) -> "_Sums":
        """From all three in one array."""
        return cls(stacked[0], stacked[1], stacked[2], unit)


def steps(
    w: Sequence[Any],
    u: Sequence[Any],
    radii: Sequence[jax.Array | None],
    rates: Sequence[ArrayLike],
    layers: Sequence[LayerAxes],
) -> list[jax.Array | None]:
    """What is added to each array.

    Args:
      w: weights.
      u: directions, as they are added; None where there is none.
      radii: the norm of each layer, a vector per array. A layer with 0, and an array with None,
        takes `u` as it is.
      rates: an entry per array.
      layers: where the layers are.
    """
    chosen = [i for i, r in enumerate(radii) if u[i] is not None and r is not None]
    chosen.sort(key=lambda i: layers[i].sort_key)
    results = list(u)
    # Batches are of one precision: units in float64 say nothing of squares in float32. And they
    # vary alike, since there is one condition for all of them: see `layer_norms`.
    groups: dict[tuple[np.dtype, tuple[str, ...]], list[int]] = {}
    for i in chosen:
        key = numerics.real_dtype(w[i], u[i]), layers[i].varying
        groups.setdefault(key, []).append(i)
    for members in groups.values():
        columns: list[Any] = [[x[i] for i in members] for x in (w, u, radii, rates, layers)]
        for i, step in zip(members, _steps_alike(*columns), strict=True):
            results[i] = step
    return results


def _steps_alike(
    w: Sequence[jax.Array],
    u: Sequence[jax.Array],
    radii: Sequence[jax.Array],
    rates: Sequence[ArrayLike],
    layers: Sequence[LayerAxes],
) -> list[jax.Array]:
    """What is added to arrays of one precision, which vary alike and all have radii."""
    real = numerics.real_dtype(w[0], u[0])
    radius = list(map(norms.concatenate, norms.in_batches(layers, [r.astype(real) for r in radii])))
    arrays = list(zip(w, u, strict=True))
    batches = _over_devices(layers, _all_sums(arrays, radius, layers=tuple(layers)))
    factors = [
        _factors(*batch, _unit(r), r, rate)
        for batch, r, rate in zip(batches, radius, norms.join(layers, rates), strict=True)
    ]
    per_factor = [norms.split(layers, vectors) for vectors in zip(*factors, strict=True)]
    return leafwise.run([(_moved, args) for args in zip(w, u, *per_factor, strict=True)])


@on_leaf(arrays=2)
def _moved(w: jax.Array, u: jax.Array, shrink: jax.Array, *factors: jax.Array) -> jax.Array:
    """(s - 1) w + (product of factors) u, one after the other: their product may overflow"""
    return numerics.scaled(w, shrink) + functools.reduce(numerics.scaled, factors, u)


@on_leaf(arrays=2)
def _factors(
    ww: jax.Array,
    wu: jax.Array,
    uu: jax.Array,
    unit_of_u: jax.Array,
    unit: jax.Array,
    radius: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, ...]:
    """s - 1, and the factors of u, layer by layer, from the sums."""
    is_kept = radius > 0
    # Where none is kept, a number that slopes can pass: they are 0 times what is finite.
    r = jnp.where(is_kept, radius / unit, jnp.ones_like(radius))
    # Bounds that change nothing beside rounding, and let nothing overflow: where |w| is 2 / eps
    # times the radius, a sum with w rounds new weights to zeros, and a rate that is the square of
    # this leaves the direction of u alone. By a power of four, s - 1 is -1.
    info = jnp.finfo(ww.dtype)
    far = 4 / float(info.eps) ** 2
    rate = jnp.minimum(rate, far)
    old, excess = (jnp.minimum(x / (r * r), far) for x in (ww, ww - r * r))
    wu = jnp.where(old == far, jnp.zeros_like(wu), wu)  # it may not be finite
    along = numerics.safe_divide(rate, numerics.safe_sqrt(uu))  # 0 without a direction
    moved = 2 * along * (wu / r) + rate * rate
    d = excess + moved
    # 1 + d, in which small weights and a small rate do not vanish beside 1. A new weight that
    # vanishes has no direction: below this bound, rounding has chosen one.
    norm = jnp.sqrt(jnp.maximum(old + moved, info.eps * (old + rate * rate) + info.tiny))
    shrink = jnp.where(is_kept & (uu != 0), -d / (norm * (1 + norm)), jnp.zeros_like(d))
    factors = (1 / unit_of_u, along / norm, radius)
    return shrink, *(jnp.where(is_kept, x, jnp.ones_like(d)) for x in factors)


# ---- the sums ----------------------------------------------------------------------------------


@jit_static_kwargs
def _all_sums(
    arrays: list[tuple[jax.Array, jax.Array]],
    radius: list[jax.Array],
    *,
    layers: tuple[LayerAxes, ...],
) -> list[_Sums]:
    """The sums of each batch on this device; `arrays` has w and u."""

    def products(factors: Iterable[tuple[Factor, Factor]]) -> list[jax.Array]:
        calls: list[Call] = [
            (_products_of(axes), (*both, *by))
            for axes, both, by in zip(layers, arrays, factors, strict=True)
        ]
        return [jax.lax.concatenate(x, 1) for x in norms.in_batches(layers, leafwise.run(calls))]

    # Norms of whole layers, beside parts of them.
    arrays, radius = varying_over((arrays, radius), varying_axes(*jax.tree.leaves(arrays)))
    plain = products([(None, None)] * len(arrays))
    units = [(_unit(r), _unit(x[2], squared=True)) for r, x in zip(radius, plain, strict=True)]
    unusual = []
    for (of_w, of_u), r, batch in zip(units, radius, norms.in_batches(layers, layers), strict=True):
        nonempty = jnp.concatenate([axes.nonempty for axes in batch])
        unusual.append(jnp.any(((of_w != 1) | (of_u != 1)) & (r > 0) & nonempty))

    def rescaled() -> list[_Sums]:
        # XLA for GPUs computes both branches at each step, unless one has such a barrier.
        of_w, of_u = zip(*map(jax.lax.optimization_barrier, units), strict=True)
        factors = (
            norms.split(layers, [1 / x for x in unit], as_elements=False) for unit in (of_w, of_u)
        )
        return list(map(_Sums.of, products(zip(*factors, strict=True)), of_u))

    def as_they_are() -> list[_Sums]:
        return [_Sums.of(x, jnp.ones_like(of_u)) for x, (_, of_u) in zip(plain, units, strict=True)]

    return jax.lax.cond(jnp.any(jnp.stack(unusual)), rescaled, as_they_are)


@functools.cache  # one function object for each place of layers, so that JAX's caches find it again
def _products_of(layers: LayerAxes) -> Function:
    """(w, u, by_w, by_u) -> |w|^2, <w, u> and |u|^2 of each layer, with w and u scaled first."""

    @jit_static_kwargs
    def products(w: jax.Array, u: jax.Array, by_w: Factor, by_u: Factor) -> jax.Array:
        real = numerics.real_dtype(w, u)
        if by_w is not None:
            w, u = norms.opaque((w, u))

        def wide(x: jax.Array, by: Factor) -> jax.Array:
            x = numerics.widen(x, real)
            return x if by is None else numerics.scaled(x, by)

        def ww(w: jax.Array, u: jax.Array, by_w: Factor, by_u: Factor) -> jax.Array:
            return numerics.abs_squared(wide(w, by_w))

        def wu(w: jax.Array, u: jax.Array, by_w: Factor, by_u: Factor) -> jax.Array:
            x, y = wide(w, by_w), wide(u, by_u)
            return x.real * y.real + x.imag * y.imag if jnp.iscomplexobj(x) else x * y

        def uu(w: jax.Array, u: jax.Array, by_w: Factor, by_u: Factor) -> jax.Array:
            return numerics.abs_squared(wide(u, by_u))

        by = [None if x is None else layers.to_elements(x) for x in (by_w, by_u)]
        return jnp.stack([layers.sum(f, (w, u, *by)) for f in (ww, wu, uu)])

    return products


def _times(like: jax.Array) -> int:
    """How large its exponents are, in those of float32."""
    return int(jnp.finfo(like.dtype).maxexp) // 128


def _unit(norm: jax.Array, *, squared: bool = False) -> jax.Array:
    """That in which layers of such norms are measured, or of norms with such squares."""
    x, times = jax.lax.stop_gradient(norm), _times(norm)
    small, plain, large = (jnp.full_like(x, 2.0 ** (times * power)) for power in _UNITS)
    low, high = (2.0 ** (times * power * (1 + squared)) for power in (_LOW, _HIGH))
    return jnp.where(x < low, small, jnp.where(x > high, large, plain))


def _over_devices(layers: Sequence[LayerAxes], batches: list[_Sums]) -> list[_Sums]:
    """Sums over whole layers, from those over their shards: one all-reduce for each set of axes.

    A device may have other units than the next. So the sums of each unit are added apart.
    """
    groups: dict[tuple[tuple[str, ...], np.dtype], list[int]] = {}
    for i, axes in enumerate(norms.in_batches(layers, layers)):
        if mesh_axes := axes[0].mesh_axes:
            groups.setdefault((mesh_axes, batches[i].uu.dtype), []).append(i)
    results = list(batches)
    for (mesh_axes, _), members in groups.items():
        columns = jax.lax.concatenate([_by_unit(batches[i]) for i in members], 1)
        sizes = [batches[i].uu.size for i in members]
        whole = jax.lax.split(jax.lax.psum(columns, mesh_axes), sizes, axis=1)
        for i, part in zip(members, whole, strict=True):
            results[i] = _joined(part)
    return results


def _units_of(like: jax.Array) -> jax.Array:
    """All units, as a column."""
    return jnp.asarray([[2.0 ** (_times(like) * power)] for power in _UNITS], like.dtype)


def _by_unit(x: _Sums) -> jax.Array:
    """A row of |w|^2, and for each unit one of <w, u> and one of |u|^2."""
    is_unit = x.unit[None] == _units_of(x.unit)
    wu, uu = (jnp.where(is_unit, y[None], jnp.zeros_like(y)[None]) for y in (x.wu, x.uu))
    return jax.lax.concatenate([x.ww[None], wu, uu], 0)


def _joined(by_unit: jax.Array) -> _Sums:
    """In the largest unit in which something was measured."""
    ww, wu, uu = jax.lax.split(by_unit, (1, len(_UNITS), len(_UNITS)))
    units = _units_of(uu)
    unit = jnp.max(jnp.where(uu != 0, units, units[:1]), axis=0)
    by = jnp.where(units > unit[None], jnp.zeros_like(units), units / unit[None])
    return _Sums(ww[0], jnp.sum(wu * by, axis=0), jnp.sum(uu * by * by, axis=0), unit)
