"""Stochastic rounding to bfloat16: the mean, and what must not move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._quantized import bfloat16

RANDOM = (0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1)


def bits_as_float(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def rounded(x, random):
    x = jnp.asarray(x, jnp.float32)
    random = jnp.broadcast_to(jnp.asarray(random, jnp.uint32), x.shape)
    found = jax.jit(bfloat16.rounded)(x, random)
    assert found.dtype == jnp.bfloat16
    return np.asarray(found.astype(jnp.float32))


@pytest.mark.parametrize("value", [1.001, 1 + 2**-20, 3.99, 1e-30, 1e30, 6.7e-5])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_number(value, sign):
    """Over 40,000 draws within four standard deviations; each is a neighbour."""
    count = 40_000
    x = np.float32(sign * value)
    random = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    found = rounded(np.full(count, x), random).astype(float)
    bits = np.abs(x).view(np.uint32) & 0xFFFF0000
    below, above = (float(bits_as_float([b])[0]) for b in (bits, bits + 0x10000))
    assert set(np.abs(found)) <= {below, above}
    share = (abs(float(x)) - below) / (above - below)
    deviation = (above - below) * np.sqrt(share * (1 - share) / count)
    assert abs(found.mean() - float(x)) <= 4 * deviation + 1e-12 * abs(float(x))


@pytest.mark.parametrize("random", RANDOM)
def test_every_number_of_bfloat16_stays(random):
    """All 65536 patterns of bits, subnormal numbers and both infinities among them; NaN stays NaN."""
    x = bits_as_float(np.arange(2**16, dtype=np.uint32) << 16)
    found = rounded(x, random)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found.view(np.uint32)[numbers], x.view(np.uint32)[numbers])
    assert np.all(np.isnan(found[~numbers]))


@pytest.mark.parametrize("random", RANDOM)
def test_nan_with_payload_in_the_low_bits(random):
    """Cut off, it would be infinity; rounded up, minus 0."""
    x = bits_as_float([0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFFFFFFF])
    assert np.all(np.isnan(rounded(x, random)))


@pytest.mark.parametrize("random", RANDOM)
def test_the_largest_numbers_stay_finite(random):
    """Above the largest bfloat16 there is only infinity."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = np.float32(
        [np.finfo(np.float32).max, np.nextafter(np.float32(largest), np.float32(np.inf))]
    )
    np.testing.assert_array_equal(rounded(x, random), [largest] * 2)
    np.testing.assert_array_equal(rounded(-x, random), [-largest] * 2)


def test_the_slope_is_that_of_a_conversion():
    """As if nothing were rounded."""
    x = jnp.asarray([0.3, -2.7, 100.1])
    random = jnp.asarray([0, 2**31, 2**32 - 1], jnp.uint32)
    f = lambda x: jnp.sum(bfloat16.rounded(x, random).astype(jnp.float32) * jnp.arange(3.0))
    np.testing.assert_array_equal(jax.grad(f)(x), jnp.arange(3.0))
