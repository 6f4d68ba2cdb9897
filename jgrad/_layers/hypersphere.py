"""A step on the sphere of all arrays of one norm, layer by layer, from three sums.

With r the norm that a layer keeps, u the direction and eta the rate,

    w' = r n / |n|,  n = w + a u,  a = eta r / |u|

is computed as w' - w = (s - 1) w + s a u with s = r / |n|. The three sums |w|^2, <w, u> and |u|^2
give d = (|n|^2 - r^2) / r^2, and s - 1 = -d / (sqrt(1 + d) (1 + sqrt(1 + d))), in which nothing
cancels; and a norm that has drifted from r comes back. Sums are taken in units, powers of two, so
that they neither overflow nor vanish.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs, on_leaf
from jgrad._layers import norms, sums
from jgrad._layers.layer_axes import LayerAxes

# Norms from 2^-32 to 2^50 are measured as they are, smaller ones in the first of these units and
# larger ones in the last: squares of the smallest normal float32, and sums of those of 2^40 of the
# largest, are normal numbers then. Exponents of float32; those of float64 are eight times as large.
_LOW, _HIGH = -32, 50
_UNITS = (-80, 0, 96)


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


def steps(
    w: Sequence[Any],
    u: Sequence[Any],
    radii: Sequence[jax.Array | None],
    rates: Sequence[Any],
    layers: Sequence[LayerAxes],
) -> list[Any]:
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
    if not chosen:
        return results
    axes = [layers[i] for i in chosen]
    of_chosen = [r for i in chosen if (r := radii[i]) is not None]
    radius = list(map(sums.concatenate, norms.in_batches(axes, of_chosen)))
    arrays = [(w[i], u[i]) for i in chosen]
    found = _over_devices(axes, _all_sums(arrays, radius, layers=tuple(axes)))
    per_layer = norms.join(axes, [rates[i] for i in chosen])
    rows = zip(found, radius, per_layer, strict=True)
    factors = [_factors(*own, _unit(r), r, rate) for own, r, rate in rows]
    per_factor = [norms.split(axes, batch) for batch in zip(*factors, strict=True)]
    of_array = zip(chosen, *per_factor, strict=True)
    new = leafwise.run([(_moved, (w[i], u[i], *by)) for i, *by in of_array])
    for i, x in zip(chosen, new, strict=True):
        results[i] = x
    return results


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
    r = radius / unit
    along = numerics.safe_divide(rate, numerics.safe_sqrt(uu))  # 0 without a direction
    d = (ww - r * r) / (r * r) + 2 * along * (wu / r) + rate * rate
    # A new weight that vanishes has no direction: below this bound, rounding has chosen one.
    norm = jnp.sqrt(jnp.maximum(1 + d, jnp.finfo(d.dtype).eps))
    is_kept = radius > 0
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
    """Those of each batch on this device; `arrays` has w and u."""

    def products(by_w: Sequence[Any], by_u: Sequence[Any]) -> list[jax.Array]:
        rows = zip(layers, arrays, by_w, by_u, strict=True)
        calls: list[Call] = [(_products_of(own), (*both, *by)) for own, both, *by in rows]
        return [jax.lax.concatenate(x, 1) for x in norms.in_batches(layers, leafwise.run(calls))]

    none = [None] * len(arrays)
    plain = products(none, none)
    units = [
        (_unit(r), _unit(numerics.safe_sqrt(x[2]))) for r, x in zip(radius, plain, strict=True)
    ]
    nonempty = [
        jnp.concatenate([x.nonempty for x in batch]) for batch in norms.in_batches(layers, layers)
    ]
    rows = zip(units, radius, nonempty, strict=True)
    unusual = [jnp.any(((of_w != 1) | (of_u != 1)) & (r > 0) & x) for (of_w, of_u), r, x in rows]

    def rescaled() -> list[_Sums]:
        # XLA for GPUs computes both branches at each step, unless one has such a barrier.
        own = jax.lax.optimization_barrier(units)
        by = [
            norms.split(layers, [1 / x for x in column], as_elements=False)
            for column in zip(*own, strict=True)
        ]
        return [
            _Sums(x[0], x[1], x[2], of_u) for x, (_, of_u) in zip(products(*by), own, strict=True)
        ]

    def as_they_are() -> list[_Sums]:
        return [
            _Sums(x[0], x[1], x[2], jnp.ones_like(of_u))
            for x, (_, of_u) in zip(plain, units, strict=True)
        ]

    return jax.lax.cond(jnp.any(jnp.stack(unusual)), rescaled, as_they_are)


@functools.cache  # one function object for each place of layers, so that JAX's caches find it again
def _products_of(layers: LayerAxes) -> Function:
    """(w, u, by_w, by_u) -> |w|^2, <w, u> and |u|^2 of each layer, with w and u scaled first."""

    @jit_static_kwargs
    def products(
        w: jax.Array, u: jax.Array, by_w: jax.Array | None, by_u: jax.Array | None
    ) -> jax.Array:
        real = numerics.real_dtype(w, u)

        def wide(x: jax.Array, by: jax.Array | None) -> jax.Array:
            x = numerics.widen(x, real)
            return x if by is None else numerics.scaled(x, by)

        def ww(w: jax.Array, u: jax.Array, by_w: Any, by_u: Any) -> jax.Array:
            return numerics.abs_squared(wide(w, by_w))

        def wu(w: jax.Array, u: jax.Array, by_w: Any, by_u: Any) -> jax.Array:
            x, y = wide(w, by_w), wide(u, by_u)
            return x.real * y.real + x.imag * y.imag if jnp.iscomplexobj(x) else x * y

        def uu(w: jax.Array, u: jax.Array, by_w: Any, by_u: Any) -> jax.Array:
            return numerics.abs_squared(wide(u, by_u))

        by = [None if x is None else layers.to_elements(x) for x in (by_w, by_u)]
        return jnp.stack([layers.sum(f, (w, u, *by)) for f in (ww, wu, uu)])

    return products


def _unit(norm: jax.Array) -> jax.Array:
    """That in which layers of such norms are measured."""
    x, times = jax.lax.stop_gradient(norm), jnp.finfo(norm.dtype).maxexp // 128
    small, plain, large = (jnp.full_like(x, 2.0 ** (times * power)) for power in _UNITS)
    low, high = (2.0 ** (times * power) for power in (_LOW, _HIGH))
    return jnp.where(x < low, small, jnp.where(x > high, large, plain))


def _over_devices(layers: Sequence[LayerAxes], found: list[_Sums]) -> list[_Sums]:
    """Sums over whole layers, from those over their shards: one all-reduce for each set of axes.

    A device may have other units than the next. So the sums of each unit are added apart.
    """
    groups: dict[Any, list[int]] = {}
    for i, batch in enumerate(norms.in_batches(layers, layers)):
        if mesh_axes := batch[0].mesh_axes:
            groups.setdefault((mesh_axes, found[i].uu.dtype), []).append(i)
    results = list(found)
    for (mesh_axes, _), members in groups.items():
        rows = jax.lax.concatenate([_by_unit(found[i]) for i in members], 1)
        parts = jax.lax.split(
            jax.lax.psum(rows, mesh_axes), [found[i].uu.size for i in members], axis=1
        )
        for i, part in zip(members, parts, strict=True):
            results[i] = _joined(part)
    return results


def _units_of(like: jax.Array) -> jax.Array:
    """All units, as a column."""
    times = jnp.finfo(like.dtype).maxexp // 128
    return jnp.asarray([[2.0 ** (times * power)] for power in _UNITS], like.dtype)


def _by_unit(x: _Sums) -> jax.Array:
    """A row of |w|^2, and for each unit one of <w, u> and one of |u|^2."""
    own = x.unit[None] == _units_of(x.unit)
    wu, uu = (jnp.where(own, y[None], jnp.zeros_like(y)[None]) for y in (x.wu, x.uu))
    return jax.lax.concatenate([x.ww[None], wu, uu], 0)


def _joined(rows: jax.Array) -> _Sums:
    """In the largest unit in which something was measured."""
    ww, wu, uu = jax.lax.split(rows, (1, len(_UNITS), len(_UNITS)))
    units = _units_of(uu)
    unit = jnp.max(jnp.where(uu != 0, units, units[:1]), axis=0)
    by = jnp.where(units > unit[None], jnp.zeros_like(units), units / unit[None])
    return _Sums(ww[0], jnp.sum(wu * by, axis=0), jnp.sum(uu * by * by, axis=0), unit)
