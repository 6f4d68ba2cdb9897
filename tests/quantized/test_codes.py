"""Codes of 8 bits: the grid, stochastic rounding, scales, and numbers at the ends of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._quantized import codec
from tests.reference import eight_bits

RANDOM = (0, 1, 2**20, 2**31, 2**32 - 1)
SCALES = 2.0 ** np.array([-126, -100, -31, -1, 0, 1, 64, 125, 126])
both = pytest.mark.parametrize("second", [False, True], ids=["first", "second"])


def every_code(second):
    """0 and up; first moments have each sign."""
    return np.arange(256, dtype=np.uint8) if second else np.arange(-127, 128, dtype=np.int8)


def codec_of(*, second):
    return codec.UNSIGNED if second else codec.SIGNED


def encode(x, scale, random, *, second):
    function = codec_of(second=second).encode
    x, scale = jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32)
    random = jnp.broadcast_to(jnp.asarray(random, jnp.uint32), x.shape)
    inverse = codec.inverse(jnp.broadcast_to(scale, x.shape))
    return np.asarray(jax.jit(function)(x, inverse, random))


def decode(codes, scale):
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), np.shape(codes))
    function = codec.BY_DTYPE[np.asarray(codes).dtype].decode
    return np.asarray(jax.jit(function)(jnp.asarray(codes), scale))


def scale_of(x):
    largest = jnp.max(codec.magnitude(jnp.asarray(x, jnp.float32)), axis=-1, keepdims=True)
    return np.asarray(jax.jit(codec.scale_of)(largest))


def stored(x, random, *, second):
    """Codes and scales of blocks, a row each."""
    scale = scale_of(x)
    return encode(x, scale, random, second=second), scale


def draws(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


# ---- the grid ----------------------------------------------------------------------------------


@both
def test_x64(second, x64):
    """Python's numbers are int64 there: the same codes, in their dtypes."""
    codes = every_code(second)
    found = encode(decode(codes, 1.0), 1.0, 0, second=second)
    np.testing.assert_array_equal(found, codes)
    assert found.dtype == codes.dtype


@both
@pytest.mark.parametrize("scale", SCALES)
def test_codes_decode_to_the_grid(second, scale):
    """Exactly; below the smallest normal number they are that small in float32, or 0."""
    codes = every_code(second)
    found, expected = decode(codes, scale), eight_bits.decode(codes, scale)
    normal = np.abs(expected) >= eight_bits.TINY
    np.testing.assert_array_equal(found[normal], expected[normal])
    assert np.all(np.abs(found[~normal]) < eight_bits.TINY)


@both
def test_range_of_the_grid(second):
    """Three mantissa bits: 6 to 12% apart, from 2^-30 or 2^-14 to 3.75 times the scale."""
    numbers = decode(every_code(second), 1.0)
    positive = numbers[numbers > 0].astype(float)
    assert positive[0] == 1.125 * 2.0 ** (-30 if second else -14)
    assert positive[-1] == 3.75
    ratios = positive[1:] / positive[:-1]
    assert 1 + 1 / 15 <= ratios.min() <= ratios.max() <= 1.125
    if not second:
        np.testing.assert_array_equal(numbers, -numbers[::-1])


@both
@pytest.mark.parametrize("scale", SCALES)
def test_every_code_is_encoded_as_itself(second, scale):
    """Whatever the random bits."""
    codes = every_code(second)
    numbers = decode(codes, scale)
    kept = (np.abs(numbers) >= eight_bits.TINY) | (codes == 0)
    for random in RANDOM:
        found = encode(numbers, scale, random, second=second)
        np.testing.assert_array_equal(found[kept], codes[kept])
        assert found.dtype == codes.dtype


# ---- rounding ----------------------------------------------------------------------------------


@both
def test_a_number_is_rounded_to_a_neighbour(second):
    """Numbers over all octaves of the grid, both signs of first moments."""
    rng = np.random.default_rng(1)
    x = np.float32(2.0 ** rng.uniform(-30 if second else -14, 1.8, 20_000))
    x = x if second else x * rng.choice([-1, 1], x.size).astype(np.float32)
    below, above = eight_bits.neighbours(x, 1.0, second=second)
    size = np.abs(decode(encode(x, 1.0, draws(x.size), second=second), 1.0))
    smallest = eight_bits.grid(second=second)[1] if second else 0
    assert np.all((size == np.maximum(below, smallest)) | (size == above))
    assert 0.4 < np.mean(size == above) < 0.6
    found = decode(encode(x, 1.0, codec.HALF, second=second), 1.0)
    nearest = np.where(np.abs(x) - below < above - np.abs(x), below, above)
    halfway = np.abs(x) - below == above - np.abs(x)
    chosen = (np.abs(x) >= eight_bits.grid(second=second)[1]) & ~halfway
    np.testing.assert_array_equal(np.abs(found)[chosen], nearest[chosen])


@both
@pytest.mark.parametrize("value", [1.0001, 1.06, 1.9999, 1.3e-3])
def test_rounding_is_unbiased(second, value):
    """The mean of 40,000 draws, within four standard deviations."""
    count = 40_000
    for sign in (1,) if second else (1, -1):
        x = np.full(count, sign * value, np.float32)
        found = decode(encode(x, 1.0, draws(count), second=second), 1.0).astype(float)
        below, above = eight_bits.neighbours(x[:1], 1.0, second=second)
        share = (abs(float(x[0])) - below[0]) / (above[0] - below[0])
        deviation = (above[0] - below[0]) * np.sqrt(share * (1 - share) / count)
        assert abs(found.mean() - float(x[0])) <= 4 * deviation + 2**-20 * value


@pytest.mark.slow
def test_a_second_moment_above_zero_is_never_zero():
    """From the smallest normal number up, beside any larger one and with any random bits."""
    x = np.float32(10.0 ** np.linspace(-37.9, 38.4, 500))
    for largest in (1e-37, 1e-20, 1.0, 1e20, 3e38):
        chosen = x[x <= np.float32(largest)]
        scale = scale_of(np.float32([largest]))
        for random in RANDOM:
            codes = encode(chosen, scale, random, second=True)
            assert codes.min() >= 1
            assert decode(codes, scale).min() > 0
    zeros = encode(np.zeros(3, np.float32), 1.0, 2**32 - 1, second=True)
    np.testing.assert_array_equal(zeros, 0)


@both
def test_zero_is_zero(second):
    """0 with any scale and any random bits; and a block of zeros has scale 0, with no 0 / 0."""
    for scale in (0.0, *SCALES):
        for random in RANDOM:
            codes = encode(np.float32([0.0, -0.0]), scale, random, second=second)
            np.testing.assert_array_equal(codes, 0)
            np.testing.assert_array_equal(decode(codes, scale), 0.0)
    assert scale_of(np.zeros((1, 256)))[0] == 0


# ---- scales ------------------------------------------------------------------------------------


def test_scales_are_powers_of_two():
    """Beside NumPy's, over all of float32; those of negative maxima are those of positive ones."""
    x = np.float32(10.0 ** np.random.default_rng(2).uniform(-37.5, 38.4, (4000, 1)))
    edges = [
        [np.nextafter(np.float32(2.0**k), np.float32(s))]
        for k in range(-125, 128)
        for s in (0, 9e9)
    ]
    exact = [[m * 2.0**k] for k in range(-126, 128) for m in (1, 1.75, 1.875, 1.9)]
    x = np.concatenate([x, np.float32(edges), np.float32(exact)])
    expected = [[eight_bits.scale_of(row)] for row in x]
    np.testing.assert_array_equal(scale_of(x), expected)
    np.testing.assert_array_equal(scale_of(-x), expected)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, 100, 255])
def test_a_scale_shows_what_is_not_finite(bad, place):
    """NaN as NaN and infinity as infinity, and no number of the block is finite."""
    x = np.ones((1, 256), np.float32)
    x[0, place] = bad
    scale = scale_of(x)
    np.testing.assert_array_equal(np.abs(scale), [[np.abs(bad)]])
    for codes in every_code(second=False), every_code(second=True):
        assert not np.any(np.isfinite(decode(codes, scale[0])))


@both
def test_e37_stored_again_a_thousand_times(second):
    """No value changes, whatever the random bits; also in blocks just below a power of two."""
    rng = np.random.default_rng(3)
    x = np.float32(rng.normal(size=(40, 256)) * np.exp(2 * rng.normal(size=(40, 256))))
    x /= np.max(np.abs(x), axis=1, keepdims=True)
    x *= np.float32(2.0 ** rng.uniform(-60, 60, (40, 1)))
    for i, factor in enumerate((1, 1 - 1e-7, 0.999, 0.97, 0.9375, 0.93)):
        x[i] *= np.float32(factor * 2.0**i / np.max(np.abs(x[i])))
    x[20:] *= -1
    x = np.abs(x) if second else x
    own = codec_of(second=second)

    @jax.jit
    def again(x, random):
        def body(x, random):
            scale = codec.scale_of(jnp.max(codec.magnitude(x), axis=-1, keepdims=True))
            scale = jnp.broadcast_to(scale, x.shape)
            codes = own.encode(x, codec.inverse(scale), jnp.full(x.shape, random))
            return own.decode(codes, scale), None

        return jax.lax.scan(body, x, random)[0]

    once = again(jnp.asarray(x), jnp.asarray(draws(1)))
    assert not np.array_equal(once, x)
    np.testing.assert_array_equal(again(once, jnp.asarray(draws(1000, 1))), once)


def test_e37_negative_maxima_as_positive_ones():
    x = np.float32(np.random.default_rng(4).normal(size=(8, 256)))
    random = draws(256)
    codes, scale = stored(x, random, second=False)
    mirrored, same = stored(-x, random, second=False)
    np.testing.assert_array_equal(mirrored, -codes)
    np.testing.assert_array_equal(same, scale)


@both
@pytest.mark.parametrize("random", RANDOM)
def test_the_largest_numbers_stay_finite(second, random):
    """Near the largest float32, where no power of two above is a number; off by an eighth at most."""
    largest = np.finfo(np.float32).max
    x = np.float32([[largest, largest * 0.97, largest / 2, largest / 4]])
    codes, scale = stored(x, random, second=second)
    found = decode(codes, scale)
    assert scale[0, 0] == 2.0**126
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(found, x, rtol=1 / 8)


@both
def test_no_slope_goes_through_codes(second):
    own, random = codec_of(second=second), jnp.zeros(4, jnp.uint32)

    def total(x):
        return jnp.sum(own.decode(own.encode(x, jnp.ones(4), random), jnp.ones(4)))

    with pytest.raises(TypeError, match="no derivative goes through moments stored in 8 bits"):
        jax.grad(total)(jnp.ones(4))
