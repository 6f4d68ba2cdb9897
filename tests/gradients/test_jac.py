"""`jac` and `value_and_jac`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages

MODES = [None, "reverse", "forward"]
X = jnp.array([0.3, 0.8, -0.5])

every_mode = pytest.mark.parametrize("mode", MODES)


def wide(x):
    """More outputs than inputs: forward mode is the shorter way."""
    return jnp.outer(jnp.sin(x), x)


def narrow(x):
    return jnp.stack([jnp.prod(x), jnp.sum(x**2)])


@pytest.mark.slow(one_in=10)
@every_mode
@pytest.mark.parametrize("func", [wide, narrow, jnp.sum], ids=["wide", "narrow", "scalar"])
def test_finite_differences(func, mode, x64):
    x = X.astype("float64")
    found = jgrad.jac(func, mode=mode)(x)
    assert found.shape == (*func(x).shape, 3)
    for j, e in enumerate(jnp.eye(3)):
        expected = (func(x + 1e-6 * e) - func(x - 1e-6 * e)) / 2e-6
        np.testing.assert_allclose(found[..., j], expected, atol=1e-8)


@pytest.mark.slow
@every_mode
def test_trees(mode):
    """A block for each output and input leaf; `None` for inputs that are not differentiated."""
    p = {"w": X, "v": jnp.ones((2, 2)), "n": jnp.arange(2), "word": "abc"}
    f = lambda p: {"a": wide(p["w"]), "b": [p["w"][0] * p["v"], jnp.sum(p["v"])]}
    value, found = jgrad.value_and_jac(f, mode=mode)(p)
    expected = jax.jacrev(lambda q: f(p | q))({"w": p["w"], "v": p["v"]})
    chex.assert_trees_all_close(value, f(p))
    blocks = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dict) and "w" in x)
    for block in blocks:
        assert (block.pop("n"), block.pop("word")) == (None, None)
    chex.assert_trees_all_close(found, expected, atol=1e-7)


@every_mode
def test_argnums(mode):
    f = lambda x, y: x * y
    found = jgrad.jac(f, (1, 0), mode=mode)(X, 2 * X)
    chex.assert_trees_all_close(found, (jnp.diag(X), jnp.diag(2 * X)))


@pytest.mark.slow
@every_mode
def test_hessian(mode, x64):
    x = X.astype("float64")
    f = lambda x: jnp.sum(jnp.sin(x)) * jnp.sum(x**2)
    np.testing.assert_allclose(
        jgrad.jac(jgrad.jac(f, mode=mode), mode=mode)(x), jax.hessian(f)(x), atol=1e-12
    )
    np.testing.assert_allclose(
        jgrad.jac(jgrad.grad(f), mode=mode)(x), jax.hessian(f)(x), atol=1e-12
    )


@every_mode
def test_aux(mode):
    """As in JAX; and aux may hold what is no array, in the forward way, too."""
    aux = lambda x: {"sum": jnp.sum(x), "integers": jnp.arange(3), "number": 2, "none": None}
    f = lambda x: (narrow(x), aux(x))
    reference = jax.jacfwd if mode == "forward" else jax.jacrev
    expected, same = reference(f, has_aux=True)(X)
    with_word = lambda x: (narrow(x), {"word": "abc", **aux(x)})
    (value, found), jacobian = jgrad.value_and_jac(with_word, mode=mode, has_aux=True)(X)
    assert found.pop("word") == "abc"
    chex.assert_trees_all_close((value, found, jacobian), (narrow(X), same, expected), atol=1e-7)
    assert jgrad.jac(with_word, mode=mode, has_aux=True)(X)[1]["word"] == "abc"


@every_mode
def test_derivatives_of_aux(mode):
    """It is differentiated by what is around, as the value is."""
    g = lambda x: jnp.sum(jgrad.jac(lambda x: (x**2, x**3), mode=mode, has_aux=True)(x)[1])
    np.testing.assert_allclose(jax.grad(g)(X), 3 * X**2, rtol=1e-6)


def passes(func, x, mode):
    """Which way a Jacobian went: the width of the batch of passes."""
    jaxpr = str(jax.make_jaxpr(jgrad.jac(func, mode=mode))(x))
    return {n for n in (2, 3, 7) if f"f32[{n},{n}]" in jaxpr}


def test_mode_is_chosen_by_shape():
    """One pass per element of the smaller side."""
    seven = lambda x: jnp.sin(jnp.concatenate([x, x, x[:1]]))
    two = lambda x: jnp.sin(x[:2])
    assert passes(seven, X, None) == passes(seven, X, "forward") == {3}
    assert passes(seven, X, "reverse") == {7}
    assert passes(two, X, None) == passes(two, X, "reverse") == {2}


def test_custom_vjp_in_the_forward_way():
    """The forward mode that `None` picks is a transposed pullback, so a custom pullback will do."""

    @jax.custom_vjp
    def f(x):
        return jnp.tile(jnp.sin(x), 3)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.sum(ct.reshape(3, 3), 0) * jnp.cos(x),))
    chex.assert_trees_all_close(jgrad.jac(f)(X), jax.jacrev(f)(X))


def test_forward_differentiates_what_reverse_cannot():
    def f(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: 2 * c, x)

    x = jnp.array([1.0, 2.0])
    chex.assert_trees_all_close(jgrad.jac(f, mode="forward")(x), 4 * jnp.eye(2))


@pytest.mark.slow
def test_complex_inputs_go_in_reverse():
    z = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    f = lambda z: jnp.concatenate([z.real, z.imag, jnp.abs(z)])
    chex.assert_trees_all_close(jgrad.jac(f)(z), jax.jacrev(f)(z))
    with pytest.raises(TypeError, match="'forward' with a complex argument"):
        jgrad.jac(f, mode="forward")(z)


def test_a_backward_pass_without_a_transpose():
    """Gradient clipping, as JAX documents it: with fewer inputs than outputs, still in reverse."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.75, 0.75),))
    f = lambda x: jnp.stack([jnp.sin(clipped(x)), clipped(x), 2 * clipped(x)])
    x = jnp.float32(1.0)
    expected = [np.cos(1.0), 0.75, 0.75]
    np.testing.assert_allclose(jgrad.jac(f)(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jgrad.jac(f, mode="reverse")(x), expected, rtol=1e-6)


@pytest.mark.slow(one_in=10)
@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
@every_mode
def test_blocks_have_the_dtype_of_the_input(mode, outputs):
    f = lambda x: jnp.repeat(x[:1], outputs).astype(jnp.bfloat16)
    assert jgrad.jac(f, mode=mode)(jnp.ones(2)).dtype == jnp.float32


@every_mode
def test_empty(mode):
    assert jgrad.jac(lambda x: x**2, mode=mode)(jnp.ones(0)).shape == (0, 0)
    assert jgrad.jac(lambda p: X, mode=mode)({}) == {}
    assert jgrad.jac(lambda x: {}, mode=mode)(X) == {}


test_messages = messages.test_of("jac", globals())
