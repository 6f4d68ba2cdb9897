"""Norms of two arrays and the product of both, layer by layer, in one pass and at every scale."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes


class Pair(NamedTuple):
    """Of the layers of two arrays, their norms, and their products in the scales of both."""

    x: norms.ScaledNorm
    y: norms.ScaledNorm
    product: jax.Array


@jit_static_kwargs
def norms_and_products(
    xs: list[jax.Array], ys: list[jax.Array], *, layers: tuple[LayerAxes, ...]
) -> list[Pair]:
    """|x|, |y| and <x, y> of layers, in batches; arrays have one precision, and vary alike."""
    xs, ys = norms.alike((xs, ys))
    of_x, of_y = (
        norms.measured([(leafwise.identity, (z,)) for z in zs], layers) for zs in (xs, ys)
    )

    def products(scales: Iterable[tuple[jax.Array | None, ...]]) -> list[jax.Array]:
        rows = zip(layers, scales, xs, ys, strict=True)
        of_arrays = leafwise.run([(_product_of(axes), (*by, x, y)) for axes, by, x, y in rows])
        return list(map(norms.concatenate, norms.in_batches(layers, of_arrays)))

    plain = products([(None, None)] * len(xs))

    def rescaled() -> list[Pair]:
        x, y = ([batch.rescaled() for batch in batches] for batches in (of_x, of_y))
        scales = [
            norms.split(layers, [1 / z.scale for z in batches], as_elements=False)
            for batches in (x, y)
        ]
        return list(map(Pair, x, y, products(zip(*scales, strict=True))))

    def as_they_are() -> list[Pair]:
        x, y = ([norms.plain_norm(batch.total) for batch in batches] for batches in (of_x, of_y))
        return list(map(Pair, x, y, plain))

    results = jax.lax.cond(norms.any_unusual([*of_x, *of_y]), rescaled, as_they_are)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, batch in enumerate(of_x):
        groups.setdefault(batch.layers[0].mesh_axes, []).append(i)
    for mesh_axes, members in groups.items():
        if mesh_axes:
            whole = _pairs_over_devices([results[i] for i in members], mesh_axes)
            for i, pair in zip(members, whole, strict=True):
                results[i] = pair
    return results


def _pairs_over_devices(pairs: Sequence[Pair], mesh_axes: tuple[str, ...]) -> list[Pair]:
    """Pairs of whole layers, from those of their shards: two maxima and one sum for all batches."""
    x, y = (
        norms.ScaledNorm(*map(norms.concatenate, zip(*columns, strict=True)))
        for columns in zip(*((pair.x, pair.y) for pair in pairs), strict=True)
    )
    both = norms.ScaledNorm(*map(norms.concatenate, zip(x, y, strict=True)))
    mantissas, top, scale = both.aligned(lambda x: jax.lax.pmax(x, mesh_axes))
    halves = [x.mantissa.size, y.mantissa.size]
    by_x, by_y = jax.lax.split(jax.lax.stop_gradient(both.scale) / scale / top, halves)
    product = norms.concatenate([pair.product for pair in pairs]) * by_x * by_y
    sums = jax.lax.psum(norms.concatenate([jnp.square(mantissas / top), product]), mesh_axes)
    squares, product = jax.lax.split(sums, [mantissas.size, product.size])
    tops, scales, roots = (
        jax.lax.split(x, halves) for x in (top, scale, top * numerics.safe_sqrt(squares))
    )
    columns = *zip(roots, scales, strict=True), product * tops[0] * tops[1]
    sizes = [pair.product.size for pair in pairs]
    parts = zip(*(jax.lax.split(x, sizes) for x in jax.tree.leaves(columns)), strict=True)
    return [Pair(norms.ScaledNorm(a, b), norms.ScaledNorm(c, d), e) for a, b, c, d, e in parts]


@functools.cache  # one function object for each place of layers, so that JAX's caches find it again
def _product_of(layers: LayerAxes) -> Function:
    """The function (scale of x, scale of y, x, y) -> Re <x, y> of each layer."""

    def product(*args: Any) -> jax.Array:
        by_x, by_y, x, y = args
        x, y = (numerics.widen(z, numerics.real_dtype(z)) for z in (x, y))
        x, y = (z if by is None else numerics.scaled(z, by) for z, by in ((x, by_x), (y, by_y)))
        return x.real * y.real + x.imag * y.imag if jnp.iscomplexobj(x) else x * y

    @jit_static_kwargs
    def of_arrays(by_x: Any, by_y: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        scales = [None if by is None else layers.to_elements(by) for by in (by_x, by_y)]
        return layers.sum(product, (*scales, *((x, y) if by_x is None else norms.opaque((x, y)))))

    return of_arrays
