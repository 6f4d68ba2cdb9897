"""Newton-Schulz on stacks: every scale, slopes, chunks, and what a program of it holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._muon import newton_schulz
from jgrad._muon.newton_schulz import COEFFICIENTS
from tests.support import messages
from tests.support.loops import assert_equal

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(6, 9)), jnp.float32)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    """Each test draws the same numbers, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state


# Bounds of singular values that were at least a hundredth of |X|.
BOUNDS = {
    "jordan": (0.68, 1.14),
    "you": (0.97, 1.04),
    "polar_express": (0.85, 1.15),
    "deepseek_v4": (0.999, 1.001),
}


def stacked(x, **options):
    return jgrad.orthogonalize(x, layer_axes=0, **options)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_singular_values(coefficients):
    """They go where the published polynomials put them; singular vectors stay."""
    u, _ = np.linalg.qr(RNG.normal(size=(20, 20)))
    v, _ = np.linalg.qr(RNG.normal(size=(30, 30)))
    s = np.geomspace(0.011, 1, 20)
    x = u @ np.diag(s / np.linalg.norm(s)) @ v[:20]
    found = np.asarray(jgrad.orthogonalize(jnp.asarray(x, jnp.float32), coefficients=coefficients))
    values = u.T @ found @ v[:20].T
    low, high = BOUNDS[coefficients]
    large = s / np.linalg.norm(s) >= 0.01
    assert low <= np.diag(values)[large].min()
    assert np.diag(values)[large].max() <= high
    np.testing.assert_allclose(values, np.diag(np.diag(values)), atol=1e-5)


def spectra(rng, rows, columns):
    """Random, of low rank beside noise, and singular values that decay by a million."""
    left, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
    right, _ = np.linalg.qr(rng.normal(size=(columns, rows)))
    low = rng.normal(size=(rows, 4)) @ rng.normal(size=(4, columns))
    yield rng.normal(size=(rows, columns))
    yield low + 1e-3 * rng.normal(size=(rows, columns))
    yield (left * np.logspace(0, -6, rows)) @ right.T


def of_paper(x, coefficients):
    """X <- a X + (b A + c A A) X with A = X X^T, in the dtype of x."""
    x = x / np.asarray(np.linalg.norm(x) * coefficients.divisor, x.dtype)
    for a, b, c in np.asarray(coefficients.triples, x.dtype):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("columns", [24, 47, 48, 96])
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express", "deepseek_v4"])
def test_as_exact_as_step_by_step(coefficients, columns):
    """Wide matrices, whose steps are those of the Gram matrix, lose no more bits than others."""
    named = COEFFICIENTS[coefficients]
    for x in spectra(np.random.default_rng(0), 24, columns):
        expected, plain = of_paper(x, named), of_paper(x.astype(np.float32), named)
        found = jgrad.orthogonalize(jnp.asarray(x, jnp.float32), coefficients=coefficients)
        lost = [np.linalg.norm(y - expected) for y in (np.asarray(found, np.float64), plain)]
        assert lost[0] <= 4 * max(lost[1], 1e-6 * np.linalg.norm(expected))


def test_operations():
    """Of a wide matrix, beside those of five steps; one that is nearly square goes step by step."""

    def operations(rows, columns):
        x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        compiled = jax.jit(jgrad.orthogonalize).lower(x).compile()
        turns = 5 if "while(" in compiled.as_text() else 1  # XLA counts those of a loop once
        return turns * compiled.cost_analysis()["flops"] / (20 * rows**2 * columns + 10 * rows**3)

    assert 1.0 < operations(64, 127) < 1.1
    assert operations(64, 128) < 0.9
    assert operations(64, 512) < 0.6


@pytest.mark.parametrize("exponent", [-118, -60, 0, 60, 124])
def test_every_scale(exponent):
    """A power of two of X has the same X, to the rounding of the norm."""
    found = jgrad.orthogonalize(X * np.float32(2.0**exponent))
    np.testing.assert_allclose(found, jgrad.orthogonalize(X), rtol=1e-4, atol=1e-6)


def test_norms_beyond_the_largest_number():
    """Of 54 elements near it: their norm is no float32."""
    x = jnp.full((6, 9), 3e38) * jnp.sign(X)
    np.testing.assert_allclose(
        jgrad.orthogonalize(x), jgrad.orthogonalize(jnp.sign(X)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_zero(dtype):
    """0 stays 0, and its slopes are finite: those of the identity through the polynomials."""
    zero = jnp.zeros((3, 4), dtype)
    assert_equal(jgrad.orthogonalize(zero), zero)
    slope = jax.grad(lambda x: jnp.sum(jgrad.orthogonalize(x)))(zero.astype(jnp.float32))
    np.testing.assert_allclose(slope, 3.4445**5, rtol=1e-5)


@pytest.mark.slow
def test_slopes(x64):
    """Forward and reverse mode agree with finite differences, through chunks."""
    x = jnp.asarray(RNG.normal(size=(3, 4, 5)))
    direction = jnp.asarray(RNG.normal(size=x.shape))
    weight = jnp.asarray(RNG.normal(size=x.shape))
    f = lambda x: jnp.sum(weight * stacked(x))
    step = 1e-6
    expected = (f(x + step * direction) - f(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(jax.jvp(f, (x,), (direction,))[1], expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(jax.grad(f)(x) * direction), expected, rtol=1e-6)


@pytest.mark.slow(always=["1-1", "1-8", "300-1", "300-8", "1000-1", "1000-8", "300-13"])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 12, 13])
@pytest.mark.parametrize("size", [1, 300, 1000])
def test_chunks(count, size):
    """However a stack is cut, each matrix is its own, and none is left out."""
    x = jnp.asarray(RNG.normal(size=(count, 4, 5)), jnp.float32)
    double = lambda x: 2 * x
    seen = []
    found = newton_schulz._in_chunks(x, lambda x: seen.append(x.shape) or double(x), size)
    assert_equal(found, double(x))
    assert all(math.prod(shape) * 4 <= max(size, 80) for shape in seen)


def test_a_matrix_that_is_not_finite_spoils_no_other():
    x = jnp.stack([X, X.at[2, 3].set(jnp.inf), 2 * X, X.at[0, 0].set(jnp.nan)])
    found = stacked(x)
    assert_equal(found[::2], stacked(jnp.stack([X, X, 2 * X, X]))[::2])
    assert not np.any(np.isfinite(found[1]).all())
    assert not np.any(np.isfinite(found[3]))


@pytest.mark.not_in_jax_0_8("temporaries")
@pytest.mark.parametrize("count", [8, 64])
def test_temporaries_are_bounded_in_bytes(count):
    """2.5 chunks and a few numbers beside the stack: results are written where they were read."""
    x = jax.ShapeDtypeStruct((count, 256, 1024), jnp.float32)
    used = jax.jit(stacked).lower(x).compile().memory_analysis().temp_size_in_bytes
    matrix = 256 * 1024 * 4
    assert used <= 2.5 * matrix + 1024  # a chunk is one matrix


test_messages = messages.test_of("orthogonalize", globals())
