"""Bias correction, roots and dtypes at the ends of their ranges."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._arithmetic import numerics
from jgrad._inputs import numbers
from tests.support.compilations import compilations

BETAS = [0.5, 0.9, 0.999, 0.9999, 0.999999, 1 - 1e-7]
STEPS = [1, 2, 10, 100, 10**3, 10**4, 10**5, 10**6, 2**24, 2**31 - 1]


def exact(beta, step):
    """1 - beta^step for the double that Python has for beta."""
    with decimal.localcontext() as context:
        context.prec = 60
        return float(1 - decimal.Decimal(beta) ** step)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("step", STEPS)
def test_bias_correction(beta, step):
    """Right to 1e-6 in float32 where `1 - beta**t` is wrong in the second digit."""
    log = jnp.float32(numbers.forms(beta).log)
    found = float(numerics.one_minus_power(log, jnp.asarray(step, jnp.float32)))
    assert found == pytest.approx(exact(beta, step), rel=1e-6)


def test_the_textbook_form_is_worse():
    """The test above can fail: the plain power is off by a percent."""
    beta = 0.999999
    plain = float(1 - jnp.float32(beta) ** jnp.float32(1))
    assert abs(plain / exact(beta, 1) - 1) > 1e-2


@pytest.mark.parametrize("step", [0.0, 0.5, 1.0, 3.0])
def test_beta_zero(step):
    """0^t is 0 for t > 0 and 1 at 0."""
    for beta in (numbers.forms(0.0), numerics.beta_from_array(jnp.float32(0))):
        found = numerics.one_minus_power(jnp.float32(beta.log), jnp.float32(step))
        assert float(found) == (0.0 if step == 0 else 1.0)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_forms_of_an_array(beta):
    """A traced beta has been rounded to its dtype; its forms are right for what is left."""
    found = jax.jit(numerics.beta_from_array)(jnp.float32(beta))
    b = float(np.float32(beta))
    np.testing.assert_allclose(found.complement, 1 - b, rtol=1e-7)
    if b:
        np.testing.assert_allclose(found.log, np.log(b), rtol=2e-7)


def test_derivative_of_a_traced_beta(x64):
    """d/db (1 - b^t) = -t b^(t-1), and finite at 0."""
    f = lambda b: numerics.one_minus_power(numerics.beta_from_array(b).log, jnp.float64(3))
    np.testing.assert_allclose(jax.grad(f)(jnp.float64(0.9)), -3 * 0.81, rtol=1e-12)
    assert np.isfinite(jax.grad(f)(jnp.float64(0)))


def test_safe_sqrt():
    x = jnp.array([0.0, 4.0, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(numerics.safe_sqrt(x), [0, 2, np.nan, np.inf])
    slopes = jax.vmap(jax.grad(numerics.safe_sqrt))(x[:2])
    np.testing.assert_array_equal(slopes, [0, 0.25])


@pytest.mark.parametrize(
    ("dtype", "real"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64"),
     ("complex64", "float32"), ("complex128", "float64")],
)  # fmt: skip
def test_working_dtype(dtype, real, x64):
    x = jnp.ones(2, dtype)
    assert numerics.real_dtype(x) == real
    wide = numerics.wide(x)
    assert jnp.iscomplexobj(wide) == jnp.iscomplexobj(x)
    assert jnp.finfo(wide.dtype).bits == jnp.finfo(real).bits


def test_abs_squared():
    z = jnp.array([3 - 4j], jnp.complex64)
    np.testing.assert_allclose(numerics.abs_squared(z), [25.0], rtol=1e-6)
    assert numerics.abs_squared(z).dtype == jnp.float32


@pytest.mark.slow(always=["float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_squarable(dtype, x64):
    """Finite numbers get finite squares; smaller ones, NaN and infinity stay as they are."""
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([0, 1.5, -1e18, jnp.inf, -jnp.inf, jnp.nan, largest, -largest], dtype)
    found = numerics.squarable(x)
    np.testing.assert_array_equal(found[:6], x[:6])
    assert jnp.all(jnp.isfinite(numerics.abs_squared(found[6:])))
    assert found[6] == -found[7] == 2.0 ** (jnp.finfo(dtype).maxexp // 2 - 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_bounded_square(dtype, x64):
    """That of `squarable`, for all finite numbers; NaN stays NaN. Its slope is finite, too."""
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([0, 1.5, -1e18, 1e19, largest, -largest], dtype)
    found = numerics.bounded_square(x)
    np.testing.assert_array_equal(found, numerics.abs_squared(numerics.squarable(x)))
    assert jnp.isnan(numerics.bounded_square(jnp.asarray(jnp.nan, dtype)))
    assert numerics.bounded_square(jnp.asarray(-jnp.inf, dtype)) == jnp.max(found)
    if dtype != "complex64":
        assert jnp.all(jnp.isfinite(jax.vmap(jax.grad(numerics.bounded_square))(x)))


def test_once():
    """The same number, of any kind, with its slope."""
    x = jnp.asarray([0.0, -0.0, 1.5, 1e-30, jnp.inf, -jnp.inf, jnp.nan])
    found = jax.jit(numerics.once)(x)
    np.testing.assert_array_equal(found, jax.jit(lambda x: x)(x))
    assert jax.jit(jax.grad(numerics.once))(3.0) == 1.0
    assert jax.jit(jax.grad(numerics.once))(jnp.inf) == 1.0


def test_saturated():
    x = jnp.asarray([1.0, jnp.inf, -jnp.inf, jnp.inf, jnp.nan])
    of = jnp.asarray([1.0, 3e38, -3e38, jnp.inf, jnp.nan])
    largest = jnp.finfo(jnp.float32).max
    np.testing.assert_array_equal(
        numerics.saturated(x, of, of), [1, largest, -largest, jnp.inf, jnp.nan]
    )


def test_slope_of_a_square_at_the_largest_number():
    assert jnp.isfinite(
        jax.grad(lambda x: 1e-38 * numerics.abs_squared(1e-19 * x))(jnp.float32(3e38))
    )
    assert jax.grad(lambda x: 0.0 * numerics.abs_squared(x))(jnp.float32(3e38)) == 0


def test_strong():
    weak = jnp.full(3, 0.5)
    assert weak.weak_type
    assert not numerics.strong(weak).weak_type
    assert not numerics.floating(0.5).weak_type


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e38])
def test_sign(scale):
    """NumPy's, of real and complex numbers of every size; its slope is 0, at 0 too."""
    x = np.asarray([-2.5, -0.0, 0.0, 1.5, np.nan], np.float32) * np.float32(scale)
    np.testing.assert_array_equal(numerics.sign(jnp.asarray(x)), np.sign(x))
    z = (x[:4] + 1j * x[:4][::-1]).astype(np.complex64)
    expected = np.asarray([0 if v == 0 else v / abs(v) for v in z.astype(complex)])
    np.testing.assert_allclose(numerics.sign(jnp.asarray(z)), expected, rtol=1e-6)
    for at in (jnp.asarray(x[:4]), jnp.asarray(z)):
        _, slope = jax.jvp(numerics.sign, (at,), (jnp.ones_like(at),))
        np.testing.assert_array_equal(slope, 0)


# ---- zeros -----------------------------------------------------------------------------------


def test_zeros_of_new_shapes_are_no_new_programs():
    """An `init` without `jit` would compile two for each shape."""
    arrays = [jnp.asarray(np.ones((n, 2), np.float32)) for n in range(40, 45)]
    numerics.zeros_like(arrays[0])
    assert compilations(numerics.zeros_like, *arrays) == 0
    large = jnp.ones((2**20 + 1,))
    assert compilations(numerics.zeros_like, large) > 0  # it is not copied to its device


def test_zeros_stay_where_the_array_is():
    """Beside arrays of another device, too, where it may move."""
    other = jax.devices()[1]
    here, there = jnp.ones(3), jax.device_put(jnp.ones(3), other)
    for x in (here, there):
        zeros = numerics.zeros_like(x, jnp.bfloat16)
        assert zeros.dtype == jnp.bfloat16
        assert not zeros.any()
        assert (zeros.committed, zeros.devices()) == (x.committed, x.devices())
    assert (numerics.zeros_like(here) + there).devices() == {other}


def test_zeros_in_a_program_are_computed_there():
    """Of a constant as of an argument: of large ones a program would have copies."""
    x = jnp.ones((3, 2))
    for f, args in ((lambda: numerics.zeros_like(x), ()), (numerics.zeros_like, (x,))):
        found = [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns]
        assert "eq" in found
        assert "device_put" not in found
