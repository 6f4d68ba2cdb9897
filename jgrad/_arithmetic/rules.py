"""The arithmetic that several methods share, on the arrays of one leaf.

`on_leaf` widens every argument to float32 or float64 first. Weights, gradients and first moments
may be complex; everything else is real. The arithmetic of a single method is in its file under
`_optimizers`. `tests/reference/` has each rule again in float64 NumPy, written from the papers.
"""

import functools

import jax

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import on_leaf
from jgrad._arithmetic.numerics import scaled


@on_leaf(arrays=2)
def average(x: jax.Array, old: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """a' = beta a + (1 - beta) x"""
    return scaled(old, beta) + scaled(x, complement)


@on_leaf(arrays=2)
def decayed(direction: jax.Array, w: jax.Array, decay: jax.Array) -> jax.Array:
    """d + lambda w, saturated: no finite direction overflows"""
    return numerics.saturated(direction + scaled(w, decay), direction, w)


@on_leaf(arrays=2)
def momentum(mw: jax.Array, direction: jax.Array, decay: jax.Array) -> jax.Array:
    """m' = mu m + d, saturated; Nesterov's look-ahead is the same rule once more, of m' and d"""
    return numerics.saturated(scaled(mw, decay) + direction, mw, direction)


@on_leaf(arrays=1)
def scale_by(direction: jax.Array, *factors: jax.Array) -> jax.Array:
    """(product of factors) d, one after the other: the product of the factors may overflow"""
    return functools.reduce(scaled, factors, direction)


@on_leaf(arrays=1)
def divide(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / b"""
    return x / by.astype(x.dtype)


@on_leaf(arrays=2)
def descend(w: jax.Array, step: jax.Array) -> jax.Array:
    """w' = w - s"""
    return w - step
