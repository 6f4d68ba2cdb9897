"""Quotients of norms, with a slope at every scale: what trust ratios are made of.

The ratio of each method is in its own file under `_optimizers`. It works on vectors with an entry
per layer, from `norms`, and returns factors to multiply by in turn: the ratio itself may overflow
or vanish where its product with a gradient is an ordinary number. A division comes last: XLA's CPU
backend computes it once, and fuses what follows it into the kernel of every leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Ivy adds this to the denominators of its trust ratios, where the papers treat a zero norm apart.
IVY_GUARD = 1e-12


@jax.custom_jvp
def root_of_quotient(a: jax.Array, b: jax.Array, times: jax.Array) -> jax.Array:
    """times sqrt(a / b) for a, b > 0, and its slope, at every scale of a and b."""
    # XLA would multiply by the reciprocal of a root, for every leaf anew: here it sees no root.
    root = jnp.where(b > 0, jnp.sqrt(b), b)
    return times * jnp.sqrt(a) / root


@root_of_quotient.defjvp
def _root_of_quotient_jvp(primals: Any, tangents: Any) -> Any:
    (a, b, times), (da, db, dtimes) = primals, tangents
    root = root_of_quotient(a, b, times)
    slope = 0.5 * root * (da / a - db / b)
    return root, slope + dtimes * root_of_quotient(a, b, jnp.ones_like(times))


@jax.custom_jvp
def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, with a slope that does not square b."""
    return a / b


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    ratio = quotient(a, b)
    return ratio, (da - ratio * db) / b


def one_where_zero(a: jax.Array, b: jax.Array, otherwise: jax.Array) -> jax.Array:
    """1 where `a` or `b` is 0, else `otherwise`. NaN is not zero: it goes on."""
    return jnp.where((a == 0) | (b == 0), jnp.ones_like(otherwise), otherwise)
