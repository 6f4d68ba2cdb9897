"""The ratios of norms by which steps are scaled, as factors to multiply by in turn.

On vectors with an entry per layer, from `norms`. A ratio comes in several factors where it may
itself overflow or vanish, and its product with what it scales is an ordinary number.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._arithmetic.rules import on_leaf

# Ivy adds this to the denominators of its trust ratios, where the papers treat a zero norm apart.
_IVY_GUARD = 1e-12


@on_leaf(arrays=2)
def lars_ratio(
    w_norm: jax.Array, g_norm: jax.Array, eta: jax.Array, decay: jax.Array, epsilon: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """eta |w| / (|g| + lambda |w| + epsilon); 1 where a norm is zero.

    Its root twice, and eta between: the ratio itself may overflow or vanish where its product with
    g is an ordinary number.
    """
    root = _root_of_ratio(
        _where_zero(w_norm, g_norm, w_norm),
        _where_zero(w_norm, g_norm, g_norm + decay * w_norm + epsilon),
    )
    return root, _where_zero(w_norm, g_norm, jnp.broadcast_to(eta, w_norm.shape)), root


@jax.custom_jvp
def _root_of_ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """sqrt(a / b) for a, b > 0, and its slope, at every scale of a and b."""
    return jnp.sqrt(a) / jnp.sqrt(b)


@_root_of_ratio.defjvp
def _root_of_ratio_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    root = _root_of_ratio(a, b)
    return root, 0.5 * root * (da / a - db / b)


@jax.custom_jvp
def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b, with a slope that does not square b."""
    return a / b


@_quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    ratio = _quotient(a, b)
    return ratio, (da - ratio * db) / b


@on_leaf(arrays=2)
def clip_ratio(root: jax.Array, unit: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """min(1, largest / norm), norm = root unit, as its square root twice; NaN for infinite norms.

    The ratio itself may vanish where its product with a gradient is an ordinary number.
    """
    above = ~(root * unit <= largest)  # of NaN too
    safe = jnp.where(above, root, jnp.ones_like(root))
    factor = numerics.safe_sqrt(largest) / jnp.sqrt(safe) / jnp.sqrt(unit)
    factor = jnp.where(root == jnp.inf, jnp.full_like(factor, jnp.nan), factor)
    factor = jnp.where(above, factor, jnp.ones_like(factor))
    return factor, factor


@on_leaf(arrays=2)
def lars_ratio_ivy(
    w_norm: jax.Array, g_norm: jax.Array, eta: jax.Array, decay: jax.Array
) -> tuple[jax.Array]:
    """eta |w| / |g|, divided by lambda |w| where lambda > 0; 0 where the weights are."""
    ratio = eta * w_norm / (g_norm + _IVY_GUARD)
    return (jnp.where(decay > 0, numerics.safe_divide(ratio, decay * w_norm), ratio),)


@on_leaf(arrays=2)
def lamb_ratio(
    w_norm: jax.Array, u_norm: jax.Array, smallest: jax.Array, largest: jax.Array
) -> tuple[jax.Array]:
    """|w| / |u|, clamped; 1 where a norm is zero, which the clamp leaves alone.

    Clamped before it is divided: where |u| is tiny, the slope of the quotient is no number.
    """
    above, below = w_norm >= largest * u_norm, w_norm <= smallest * u_norm
    ratio = _quotient(w_norm, jnp.where(above | below, jnp.ones_like(u_norm), u_norm))
    clamped = jnp.where(above, largest, jnp.where(below, smallest, ratio))
    return (_where_zero(w_norm, u_norm, clamped),)


@on_leaf(arrays=2)
def lamb_ratio_ivy(
    w_norm: jax.Array, u_norm: jax.Array, smallest: jax.Array, largest: jax.Array
) -> tuple[jax.Array]:
    """|w| / |u|, clamped; 0 where the weights are."""
    return (jnp.clip(w_norm / (u_norm + _IVY_GUARD), smallest, largest),)


def _where_zero(a: jax.Array, b: jax.Array, otherwise: jax.Array) -> jax.Array:
    """1 where `a` or `b` is 0. NaN is not zero: it goes on."""
    return jnp.where((a == 0) | (b == 0), jnp.ones_like(otherwise), otherwise)
