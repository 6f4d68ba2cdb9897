"""The arithmetic of each method, once, on the arrays of one leaf.

No trees, no checks, no state. `on_leaf` widens every argument to float32 or float64 first; weights,
gradients and first moments may be complex, all else is real. `tests/reference/` has each rule again
in float64 NumPy, written from the papers.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import compiled
from jgrad._arithmetic.numerics import scaled

BiasCorrection = Literal["step_size", "moments"] | None
BIAS_CORRECTIONS = ("step_size", "moments", None)


def on_leaf(arrays: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a rule work on leaves of any float dtype, and on shapes that broadcast.

    The first `arrays` arguments are the leaf's own: they decide dtype and shape. The others are
    scalars, or arrays that broadcast to that shape, and follow. Keyword-only arguments are static.
    """

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        @compiled
        @functools.wraps(rule)
        def call(*args: jax.Array, **options: Any) -> Any:
            own = args[:arrays]
            real = numerics.real_dtype(*own)
            shape = np.broadcast_shapes(*(x.shape for x in own))
            wide = [_spread(numerics.widen(x, real), shape) for x in args]
            return rule(*wide, **options)

        return call

    return decorate


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Explicit, since `rank_promotion="raise"` forbids the other way; scalars may stay scalars."""
    return x if x.ndim == 0 or x.shape == shape else jnp.broadcast_to(x, shape)


# ---- elementwise -------------------------------------------------------------------------------


@on_leaf(arrays=2)
def average(x: jax.Array, old: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """a' = beta a + (1 - beta) x"""
    return scaled(old, beta) + scaled(x, complement)


@on_leaf(arrays=2)
def first_moment(g: jax.Array, mw: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """m' = beta m + (1 - beta) g

    A gradient with a square beyond the largest number counts as the largest that has one, in both
    moments: an infinite v would hold its weight for ever.
    """
    return scaled(mw, beta) + scaled(numerics.squarable(g), complement)


@on_leaf(arrays=2)
def second_moment(g: jax.Array, vw: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """v' = beta v + (1 - beta) |g|^2"""
    return beta * vw + complement * numerics.abs_squared(numerics.squarable(g))


@on_leaf(arrays=2)
def adam_delta(mw: jax.Array, vw: jax.Array, alpha: jax.Array, epsilon: jax.Array) -> jax.Array:
    """alpha m / (sqrt(v) + epsilon)

    A v below the smallest normal number counts as that number: near 0 `sqrt` has no derivative to
    speak of, and without an epsilon 0 / 0 becomes 0, the step after gradients that were all zero.
    """
    root = jnp.sqrt(jnp.maximum(vw, jnp.finfo(vw.dtype).tiny))
    return scaled(mw, alpha) / (root + epsilon).astype(mw.dtype)


@on_leaf(arrays=2)
def decayed(direction: jax.Array, w: jax.Array, decay: jax.Array) -> jax.Array:
    """d + lambda w, for directions of any size"""
    return numerics.saturated(direction + scaled(w, decay), direction, w)


@on_leaf(arrays=3)
def lamb_direction(
    mw: jax.Array,
    vw: jax.Array,
    w: jax.Array,
    alpha: jax.Array,
    epsilon: jax.Array,
    decay: jax.Array,
) -> jax.Array:
    """u = Adam's delta + lambda w, as one function of what it reads; no delta makes it overflow"""
    return adam_delta(mw, vw, alpha, epsilon) + scaled(w, decay)


@on_leaf(arrays=1)
def step(direction: jax.Array, *rates: jax.Array) -> jax.Array:
    """(product of rates) d, one after the other: a product of the rates alone may overflow."""
    return functools.reduce(scaled, rates, direction)


@on_leaf(arrays=2)
def momentum(mw: jax.Array, direction: jax.Array, decay: jax.Array) -> jax.Array:
    """m' = mu m + d; Nesterov's look-ahead is the same rule once more, of m' and d."""
    return numerics.saturated(scaled(mw, decay) + direction, mw, direction)


@on_leaf(arrays=2)
def add_if(total: jax.Array, g: jax.Array, use: jax.Array) -> jax.Array:
    """t + g where `use` is not 0, else t"""
    return jnp.where(use != 0, numerics.saturated(total + g, total, g), total)


@on_leaf(arrays=1)
def divide(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / b"""
    return x / by.astype(x.dtype)


@on_leaf(arrays=2)
def descend(w: jax.Array, step: jax.Array) -> jax.Array:
    """w' = w - s"""
    return w - step


# ---- scalars of Adam's bias correction ---------------------------------------------------------


@on_leaf(arrays=4)
def adam_scalars(
    t: jax.Array,
    log_beta1: jax.Array,
    log_beta2: jax.Array,
    epsilon: jax.Array,
    *,
    bias_correction: BiasCorrection,
) -> tuple[jax.Array, jax.Array]:
    """The step size alpha and the epsilon that turn `adam_delta` into each published form.

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t:
      "step_size": sqrt(c2) / (c1 + eps) m / (sqrt(v) + eps)
      "moments":   (m / c1) / (sqrt(v / c2) + eps) = sqrt(c2) / c1 m / (sqrt(v) + sqrt(c2) eps)
      None:        m / (sqrt(v) + eps)
    Step 0 gives alpha = 0, except without correction.
    """
    if bias_correction is None:
        return jnp.ones_like(epsilon), epsilon
    c1 = numerics.one_minus_power(log_beta1, t)
    root = numerics.safe_sqrt(numerics.one_minus_power(log_beta2, t))
    if bias_correction == "moments":
        epsilon = jnp.where(root > 0, root, jnp.ones_like(root)) * epsilon
        return numerics.safe_divide(root, c1), epsilon
    return numerics.safe_divide(root, c1 + epsilon), epsilon
