"""Stochastic rounding of float32 numbers to bfloat16."""

import jax
import jax.numpy as jnp

_DROPPED = 16  # bits of a float32 that a bfloat16 has not


@jax.custom_jvp
def rounded(x: jax.Array, random: jax.Array) -> jax.Array:
    """`x` in bfloat16: the neighbour away from zero with the probability of what is dropped.

    The mean is x. Numbers of bfloat16, infinities and NaN stay as they are, and no finite number
    becomes infinite. By operations on bits: XLA may skip a conversion to bfloat16 and back.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = (bits + (random >> _DROPPED)) >> _DROPPED
    nearest = bits >> _DROPPED
    # Beyond the largest number the next one is infinity; and the mantissa of a NaN must not be 0.
    largest = (nearest & 0x7FFF) >= 0x7F7F
    kept = jnp.where(jnp.isnan(x), nearest | 0x40, nearest)
    upper = jnp.where(largest, kept, up).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


@rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The slope of a conversion, as if nothing were rounded."""
    return rounded(*primals), tangents[0].astype(jnp.bfloat16)
