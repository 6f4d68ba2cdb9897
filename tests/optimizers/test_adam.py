"""Adam: bias correction, betas and steps at the ends of their ranges, and complex weights."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad

X = jnp.array([1.0, 2.0, 3.0])


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.999999, 1 - 1e-7])
@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_e09_bias_correction(name, beta):
    """Below 1e-6 of the exact value, for each step from 1 to 2^31 - 1."""
    log = math.log(beta) if beta else -math.inf
    for t in (1, 2, 10, 1000, 123_456, 10_000_019, 2**31 - 1):
        c1 = c2 = -math.expm1(t * log)
        step = getattr(jgrad, f"{name}_update")
        # Moments of 1 after this step; with a second moment of 1, delta is sqrt(c2) / c1.
        m = jnp.ones(1)
        options = {"beta1": beta, "beta2": beta, "epsilon": 0.0, "bias_correction": "step_size"}
        if name == "lamb":
            options |= {"max_trust_ratio": 1.0, "min_trust_ratio": 1.0}
        w, mw, vw = step(jnp.zeros(1), m, 1.0, m, m, t, **options)
        np.testing.assert_allclose([mw[0], vw[0]], 1, rtol=3e-7)
        np.testing.assert_allclose(-w[0], math.sqrt(c2) / c1, rtol=1e-6)


def test_betas_keep_their_digits():
    """A Python beta of 0.999999 loses nothing on its way into float32."""
    delta, _, vw = jgrad.adam_step(X, jnp.zeros(3), jnp.zeros(3), 1, beta2=0.999999, epsilon=0.0)
    np.testing.assert_allclose(vw, 1e-6 * np.square(X), rtol=1e-6)
    np.testing.assert_allclose(delta, 1.0, rtol=1e-6)


@pytest.mark.parametrize("step", [3, 3.0, np.int64(3), jnp.int32(3), jnp.array([[3.0]])])
def test_kinds_of_steps(step):
    of = lambda t: jgrad.adam_step(X, jnp.zeros(3), jnp.zeros(3), t)
    chex.assert_trees_all_close(of(step), of(3), rtol=1e-6)
    chex.assert_trees_all_close(jax.jit(of)(step), of(3), rtol=1e-6)


def test_step_zero_moves_nothing():
    for correction in ("step_size", "moments"):
        delta, _, _ = jgrad.adam_step(X, jnp.zeros(3), jnp.zeros(3), 0, bias_correction=correction)
        chex.assert_trees_all_equal(delta, jnp.zeros(3))


def test_fractional_steps_count(x64):
    x = X.astype("float64")
    delta, _, _ = jgrad.adam_step(x, 0 * x, 0 * x, 2.5)
    alpha = np.sqrt(1 - 0.999**2.5) / (1 - 0.9**2.5 + 1e-7)
    np.testing.assert_allclose(delta, alpha * 0.1 * x / (np.sqrt(0.001) * x + 1e-7), rtol=1e-12)


@pytest.mark.slow
def test_slopes_with_respect_to_betas(x64):
    rng = np.random.default_rng(0)
    g, m = jnp.asarray(rng.normal(size=(2, 4)))
    f = lambda b1, b2: jnp.sum(jnp.sin(jgrad.adam_step(g, m, m**2, 3, beta1=b1, beta2=b2)[0]))
    slopes = jax.grad(f, argnums=(0, 1))(jnp.float64(0.9), jnp.float64(0.99))
    np.testing.assert_allclose(
        slopes[0], (f(0.9 + 1e-6, 0.99) - f(0.9 - 1e-6, 0.99)) / 2e-6, rtol=1e-6
    )
    np.testing.assert_allclose(
        slopes[1], (f(0.9, 0.99 + 1e-6) - f(0.9, 0.99 - 1e-6)) / 2e-6, rtol=1e-6
    )


def test_complex_weights():
    """The second moment is |g|^2, real; the step goes along the gradient that is given."""
    z = jnp.array([1 + 2j, -3j], jnp.complex64)
    w, mw, vw = jgrad.adam_update(z, z, 0.1, jnp.zeros_like(z), jnp.zeros(2), 1)
    assert (w.dtype, mw.dtype, vw.dtype) == (jnp.complex64, jnp.complex64, jnp.float32)
    z = np.asarray(z)
    np.testing.assert_allclose(vw, 0.001 * np.abs(z) ** 2, rtol=1e-5)
    np.testing.assert_allclose(w, z - 0.1 * z / np.abs(z), rtol=1e-5)
