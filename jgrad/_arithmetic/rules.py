"""The arithmetic that several methods share, on the arrays of one leaf.

An *update* is what is added to the weights: w' = w + update.

`on_leaf` widens every argument to float32 or float64 first. Weights, gradients and first moments
may be complex; everything else is real. Arithmetic that only one method uses is in its file under
`_optimizers`. `tests/reference/` has each rule again in float64 NumPy, written from the papers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import PerLeaf, on_leaf
from jgrad._arithmetic.numerics import scaled
from jgrad._trees import checks
from jgrad._trees.protocols import Leaf


@on_leaf(arrays=2)
def average(x: jax.Array, old: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """a' = beta a + (1 - beta) x"""
    return scaled(old, beta) + scaled(x, complement)


@on_leaf(arrays=2)
def add_scaled(direction: jax.Array, x: jax.Array, *factors: jax.Array) -> jax.Array:
    """d + f x: weight decay, momentum m' = d + mu m, and Nesterov's look-ahead d + mu m'

    No finite d overflows: a term beyond 2^102 counts as that. An infinite d stays infinite. The
    rule reads d once: read twice, a direction that is expensive to compute would be written out.
    The clip also keeps product and sum two roundings on every CPU: joined to one in some kernels
    only, a packed tree would not have the bits of the unpacked one.
    """
    return direction + numerics.addable(functools.reduce(scaled, factors, x))


@on_leaf(arrays=3)
def add_cautiously(
    direction: jax.Array, x: jax.Array, like: jax.Array, *factors: jax.Array
) -> jax.Array:
    """d + f x where d and x have one sign, else d: weight decay that never opposes the step

    `like` has the signs of d: where d is expensive to compute, another array, so that the rule
    reads d once, as `add_scaled` does.
    """
    term = numerics.addable(functools.reduce(scaled, factors, x))
    return direction + jnp.where(numerics.same_direction(like, x), term, jnp.zeros_like(term))


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


# ---- weight decay, on the arrays of one leaf ---------------------------------------------------


def optional(decay: PerLeaf, rule: str = "") -> PerLeaf:
    """Decays of leaves with None for the Python number 0, as `update_of_leaf` takes them.

    With the rule "independent", beside others a decay of 0 is an array: a CPU that joins the
    product with the rate to a sum joins it to that with the decay, in each leaf as in a buffer of
    all.
    """
    if not isinstance(decay, list):
        return None if decay is None or is_zero(decay) else decay
    some = rule == "independent" and not all(map(is_zero, decay))
    none = jnp.zeros(()) if some else None
    return [none if is_zero(x) else x for x in decay]


def decayed(
    direction: jax.Array, w: Leaf, decay: Leaf, *rates: Leaf, like: Leaf = None, rule: str = ""
) -> jax.Array:
    """direction + decay w of one leaf; None for no decay"""
    if decay is None:
        return direction
    if rule == "cautious":
        return add_cautiously(direction, w, direction if like is None else like, decay, *rates)
    return add_scaled(direction, w, decay, *rates)


def update_of_leaf(
    direction: jax.Array, like: Leaf, w: Leaf, decay: Leaf, rate: Leaf, *, rule: str, has_rate: bool
) -> jax.Array:
    """-rate (direction + decay w); with the rule "independent" -(rate direction + decay w)

    Args:
      direction: of one leaf.
      like: what has the signs of the direction; None for the direction.
      w: the weight.
      decay: None for none.
      rate: the learning rate.
      rule: where decay acts: "decoupled", "cautious" or "independent".
      has_rate: whether the direction is multiplied by the learning rate already.
    """
    if rule == "independent":
        return negative(decayed(direction if has_rate else scale_by(direction, rate), w, decay))
    if has_rate:
        return negative(decayed(direction, w, decay, rate, like=like, rule=rule))
    return descent(decayed(direction, w, decay, like=like, rule=rule), rate)


# ---- on lists with an entry per leaf -----------------------------------------------------------


def cast_back(new: Sequence[Leaf], old: Sequence[Leaf]) -> list[Leaf]:
    """New values in the dtypes of the old, which stay where there is no new one."""
    pairs = zip(new, old, strict=True)
    return [y if x is None else x if x.dtype == y.dtype else x.astype(y.dtype) for x, y in pairs]


def is_zero(number: object) -> bool:
    """Whether it is the Python number 0, which stands for "none of it"."""
    return bool(checks.is_number(number) and number == 0)
