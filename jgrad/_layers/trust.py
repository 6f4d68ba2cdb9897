"""Trust ratios: the quotients of norms by which directions are scaled layer by layer.

Ratios are computed on vectors with an entry per layer, from `norms`. They are returned as factors
to multiply by one after the other, because the ratio itself may overflow or vanish even if its
product with a gradient doesn't. The division comes last: XLA's CPU backend computes it once, but
fuses whatever follows it into the kernel of every leaf.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Call, Function, PerLeaf, on_leaf, per_leaf
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes

# Ivy adds this to the denominators of its trust ratios; the papers treat a zero norm separately.
IVY_GUARD = 1e-12

# ---- quotients of norms, differentiable at every scale -----------------------------------------


@jax.custom_jvp
def root_of_quotient(a: jax.Array, b: jax.Array, times: jax.Array) -> jax.Array:
    """times sqrt(a / b) for a >= 0 and b > 0, with its derivative, at every scale of a and b."""
    # XLA would multiply by the reciprocal of a root, again for every leaf: here it sees no root.
    root = jnp.where(b > 0, jnp.sqrt(b), b)
    return times * jnp.sqrt(a) / root


@root_of_quotient.defjvp
def _root_of_quotient_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (a, b, times), (da, db, dtimes) = primals, tangents
    root = root_of_quotient(a, b, times)
    slope = 0.5 * root * (da / numerics.positive(a) - db / b)
    return root, slope + dtimes * root_of_quotient(a, b, jnp.ones_like(times))


@jax.custom_jvp
def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, with a derivative that does not square b."""
    return a / b


@quotient.defjvp
def _quotient_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (a, b), (da, db) = primals, tangents
    ratio = quotient(a, b)
    return ratio, (da - ratio * db) / b


def one_where_zero(a: jax.Array, b: jax.Array, otherwise: jax.Array) -> jax.Array:
    """1 where `a` or `b` is 0, else `otherwise`. NaN is not zero, so it is passed on."""
    return jnp.where((a == 0) | (b == 0), jnp.ones_like(otherwise), otherwise)


@on_leaf(arrays=2)
def clamped_ratio(
    w_norm: jax.Array,
    u_norm: jax.Array,
    smallest: jax.Array,
    largest: jax.Array,
    *,
    in_roots: bool = False,
) -> tuple[jax.Array, ...]:
    """clip(|w| / |u|, smallest, largest); 1 where a norm is zero, which the clamps leave alone.

    Clamped before it is divided: where |u| is tiny, the derivative of the quotient overflows. With
    `in_roots` its root, twice: where |u| is huge, the ratio itself vanishes.
    """
    above, below = w_norm >= largest * u_norm, w_norm <= smallest * u_norm
    dividend = jnp.where(above, largest, jnp.where(below, smallest, w_norm))
    divisor = jnp.where(above | below, jnp.ones_like(u_norm), u_norm)
    numbers = (one_where_zero(w_norm, u_norm, x) for x in (dividend, divisor))
    if not in_roots:
        return (quotient(*numbers),)
    return (root_of_quotient(*numbers, jnp.ones_like(w_norm)),) * 2


# ---- directions --------------------------------------------------------------------------------


class TrustLayers(NamedTuple):
    """Where the layers of each array are, and which have a trust ratio.

    Attributes:
      axes: an entry per array.
      mask: True for all; or for each array a bool, or bools of shape (num_layers,). A layer with
        False has the ratio 1.
    """

    axes: list[LayerAxes]
    mask: PerLeaf = True


def scaled_by_trust_ratio(
    w: Sequence[jax.Array],
    directions: Sequence[Call],
    measured: Sequence[Call],
    *,
    ratio: Function,
    numbers: Sequence[PerLeaf],
    layers: TrustLayers,
    rates: Sequence[PerLeaf] = (),
    scale: Function = rules.scale_by,
    scale_free: bool = False,
    run: Callable[[Sequence[Call]], list[jax.Array]] = leafwise.run,
) -> list[jax.Array]:
    """(product of rates) ratio(|w|, |measured|, *numbers) direction, layer by layer.

    Args:
      w: weights; an array for each leaf.
      directions: the calls that compute what is scaled.
      measured: the calls whose norms the ratio takes. Norms read the arguments of a call, so that
        its result need not be written.
      ratio: (|w|, |measured|, *numbers) -> factors, each of shape (num_layers,).
      numbers: what the ratio depends on beside the norms.
      layers: where the layers are.
      rates: factors that multiply the ratio.
      scale: the rule that multiplies a direction by the ratio's factors and the rates.
      scale_free: whether a factor of all norms does not change the ratio. Then those of `measured`
        may be above the largest number.
      run: makes arrays of calls.
    """
    count = len(w)
    columns = [per_leaf(x, count) for x in rates]
    factors = [[column[i] for column in columns] for i in range(count)]
    mask = per_leaf(layers.mask, count)
    in_order = sorted(range(count), key=lambda i: layers.axes[i].sort_key)
    if chosen := [i for i in in_order if np.any(mask[i])]:
        axes = [layers.axes[i] for i in chosen]
        weights = [(leafwise.identity, (w[i],)) for i in chosen]
        gradients = [measured[i] for i in chosen]
        batches = norms.layer_norms(axes, weights, gradients, scale_free=scale_free)
        for x in numbers:
            column = per_leaf(x, count)
            batches.append(norms.join(axes, [column[i] for i in chosen]))
        per_batch = [ratio(*xs) for xs in zip(*batches, strict=True)]
        per_factor = [norms.split(axes, factor) for factor in zip(*per_batch, strict=True)]
        for i, *by_layer in zip(chosen, *per_factor, strict=True):
            if isinstance(mask[i], np.ndarray):
                use = layers.axes[i].to_elements(mask[i])
                by_layer = [jnp.where(use, x, jnp.ones_like(x)) for x in by_layer]
            factors[i] = by_layer + factors[i]
    results = zip(run(directions), factors, strict=True)
    return run([(scale, (d, *by)) for d, by in results])


def computed_once(calls: Sequence[Call], layers: TrustLayers) -> tuple[list[Call], list[Call]]:
    """Expensive directions that are read by the step and by their norm: the calls for each.

    The step takes an array. XLA's CPU backend writes it in any case, and a norm given the array
    does not compute it again. XLA for GPUs and TPUs need not write it, unless the rare branch that
    repeats norms takes it: there, norms compute it from arrays that are written anyway. Sums in
    chunks do without the array.
    """
    directions, measured = list(calls), list(calls)
    whole = [i for i, x in enumerate(layers.axes) if not x.in_chunks]
    for i, x in zip(whole, leafwise.run([calls[i] for i in whole]), strict=True):
        f, arrays = calls[i]
        if f is not leafwise.identity:
            directions[i] = leafwise.identity, (x,)
            measured[i] = _written_or_not(f), (x, *arrays)
    return directions, measured


@functools.cache
def _written_or_not(f: Function) -> Function:
    """The function (f(*arrays), *arrays) -> f(*arrays): given on a CPU, else computed."""
    return functools.partial(
        jax.lax.platform_dependent, cpu=lambda x, *_: x, default=lambda _, *xs: f(*xs)
    )
