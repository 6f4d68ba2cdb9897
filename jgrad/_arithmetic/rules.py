"""The arithmetic that several methods share, on the arrays of one leaf, and on lists of leaves.

An *update* is what is added to the weights: w' = w + update.

`on_leaf` widens every argument to float32 or float64 first. Weights, gradients and first moments
may be complex; everything else is real. The arithmetic of a single method is in its file under
`_optimizers`. `tests/reference/` has each rule again in float64 NumPy, written from the papers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, PerLeaf, on_leaf
from jgrad._arithmetic.numerics import scaled


@on_leaf(arrays=2)
def average(x: jax.Array, old: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """a' = beta a + (1 - beta) x"""
    return scaled(old, beta) + scaled(x, complement)


@on_leaf(arrays=2)
def add_scaled(direction: jax.Array, x: jax.Array, factor: jax.Array) -> jax.Array:
    """d + f x: weight decay, momentum m' = d + mu m, and Nesterov's look-ahead d + mu m'

    No finite d overflows: a term beyond 2^102 counts as that. An infinite d stays infinite. The
    rule reads d once: read twice, a direction that is expensive to compute would be written out.
    The clip also keeps product and sum two roundings on every CPU: joined to one in some kernels
    only, a packed tree would not have the bits of the unpacked one.
    """
    return direction + numerics.addable(scaled(x, factor))


@on_leaf(arrays=2)
def kept(new: jax.Array, old: jax.Array, commit: jax.Array, *, largest: float) -> jax.Array:
    """The new array, within +-largest, where the update is committed, else the old one."""
    return jnp.where(commit, numerics.clipped(new, largest), old)


@on_leaf(arrays=1)
def kept_update(u: jax.Array, commit: jax.Array, *, largest: float) -> jax.Array:
    """The update, within +-largest, where it is committed, else 0."""
    return jnp.where(commit, numerics.clipped(u, largest), jnp.zeros_like(u))


@on_leaf(arrays=1)
def scale_by(direction: jax.Array, *factors: jax.Array) -> jax.Array:
    """(product of factors) d, one after the other: the product of the factors may overflow"""
    return functools.reduce(scaled, factors, direction)


@on_leaf(arrays=1)
def descent(direction: jax.Array, *factors: jax.Array) -> jax.Array:
    """-(product of factors) d, what is added to the weights; the last factor has the sign"""
    *others, last = factors
    return functools.reduce(scaled, (*others, -last), direction)


@on_leaf(arrays=1)
def negative(x: jax.Array) -> jax.Array:
    """-x"""
    return -x


@on_leaf(arrays=1)
def divide(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / b"""
    return x / by.astype(x.dtype)


@on_leaf(arrays=2)
def add(w: jax.Array, update: jax.Array) -> jax.Array:
    """w' = w + u"""
    return w + update


# ---- on lists with an entry per leaf -----------------------------------------------------------


def decay_call(direction: jax.Array | None, w: jax.Array | None, decay: Any) -> Call | None:
    """The call of direction + decay w; a decay that is the Python number 0 compiles to nothing."""
    if direction is None:
        return None
    if is_zero(decay):
        return (leafwise.identity, (direction,))
    return (add_scaled, (direction, w, decay))


def add_decay(direction: list[Any], w: list[Any] | None, decay: PerLeaf) -> list[Any]:
    """direction + decay w; without weights no decay but the number 0"""
    return leafwise.run([decay_call(*row) for row in leafwise.zip_leaves(direction, w, decay)])


def cast_back(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """New values in the dtypes of the old, which stay where there is no new one."""
    pairs = zip(new, old, strict=True)
    return [y if x is None else x if x.dtype == y.dtype else x.astype(y.dtype) for x, y in pairs]


def is_zero(number: Any) -> bool:
    """Whether it is the Python number 0, which stands for "none of it"."""
    return isinstance(number, (int, float)) and number == 0
