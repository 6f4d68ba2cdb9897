"""Stochastic rounding from float32 to bfloat16.

It uses bit operations, because XLA may skip a conversion to bfloat16 and back.
"""

import jax
import jax.numpy as jnp

LARGEST = float(jnp.finfo(jnp.bfloat16).max)

_DROPPED = 16  # bits of a float32 that a bfloat16 does not have
_QUIET = 0x400000  # with it, the mantissa of a NaN is not 0


@jax.custom_jvp
def rounded(x: jax.Array, random: jax.Array) -> jax.Array:
    """`x` in bfloat16: the neighbour away from zero with the probability of what is dropped.

    The mean is x. Numbers of bfloat16, infinities and NaN stay as they are, and no finite number
    becomes infinite.
    """
    added = jnp.where(jnp.abs(x) < LARGEST, random >> _DROPPED, jnp.uint32(0))
    bits = bits_of(x) + added
    return from_bits(jnp.where(jnp.isnan(x), bits | _QUIET, bits))


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of float32 numbers."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """The bfloat16 numbers whose bits are the upper half of these."""
    return jax.lax.bitcast_convert_type((bits >> _DROPPED).astype(jnp.uint16), jnp.bfloat16)


@rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The derivative of a conversion, as if nothing were rounded."""
    return rounded(*primals), tangents[0].astype(jnp.bfloat16)
