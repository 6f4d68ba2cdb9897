"""`grad`, `value_and_grad`, `hvp`, `stop_gradient`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages


def cube(x):
    return jnp.sum(x**3)


def finite_difference(f, x, v, epsilon=1e-6):
    return (f(x + epsilon * v) - f(x - epsilon * v)) / (2 * epsilon)


X = jnp.array([1.0, 2.0, 3.0])


def test_grad_is_the_slope(x64):
    rng = np.random.default_rng(0)
    x, v = jnp.asarray(rng.normal(size=(2, 4)))
    f = lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x / 2))
    np.testing.assert_allclose(jnp.vdot(jgrad.grad(f)(x), v), finite_difference(f, x, v), rtol=1e-8)


def test_other_leaves_are_handed_through():
    """Integers, bools, keys and other objects reach `func` as they are, and have no gradient."""
    seen = []

    def f(p):
        seen.append(p)
        return p["n"].sum().astype(float) * jnp.sum(p["w"]) * p["s"]

    p = {"w": X, "n": jnp.arange(3), "flag": jnp.array(True), "key": jax.random.key(0), "s": 2}
    grads = jgrad.grad(f)(p | {"text": "abc", "none": None})
    chex.assert_trees_all_equal(grads.pop("w"), jnp.full(3, 6.0))
    assert grads == dict.fromkeys(["n", "flag", "key", "s", "text", "none"])
    assert seen[0]["n"] is p["n"]
    assert seen[0]["key"] is p["key"]


def test_gradients_keep_dtypes():
    p = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float16), "c": jnp.ones(2)}
    f = lambda p: sum(jnp.sum(x.astype(jnp.float32)) for x in p.values())
    chex.assert_trees_all_equal_shapes_and_dtypes(jgrad.grad(f)(p), p)


def test_argnums():
    f = lambda x, y: jnp.sum(x * x * y)
    y = jnp.array([3.0, 4.0, 5.0])
    chex.assert_trees_all_equal(jgrad.grad(f, 1)(X, y), X * X)
    chex.assert_trees_all_equal(jgrad.grad(f, -1)(X, y), X * X)
    chex.assert_trees_all_equal(jgrad.grad(f, (1, 0))(X, y), (X * X, 2 * X * y))
    chex.assert_trees_all_equal(jgrad.grad(f, [0])(X, y), (2 * X * y,))


def test_keyword_arguments_are_passed():
    f = lambda x, *, power: jnp.sum(x**power)
    chex.assert_trees_all_equal(jgrad.grad(f)(X, power=2), 2 * X)


def test_aux():
    f = lambda x: (cube(x), {"kept": x, "word": "aux"})
    grads, aux = jgrad.grad(f, has_aux=True)(X)
    chex.assert_trees_all_equal(grads, 3 * X**2)
    assert aux["word"] == "aux"
    (value, aux), grads = jgrad.value_and_grad(f, has_aux=True)(X)
    assert value == 36
    chex.assert_trees_all_equal((aux["kept"], grads), (X, 3 * X**2))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_a_scalar(shape):
    value, grads = jgrad.value_and_grad(lambda x: cube(x).reshape(shape))(X)
    assert value.shape == shape
    chex.assert_trees_all_equal(grads, 3 * X**2)


def test_python_floats():
    chex.assert_trees_all_equal(jgrad.grad(lambda p: p["a"] * p["b"])({"a": 2.0, "b": X[0]}),
                                {"a": jnp.float32(1), "b": jnp.float32(2)})  # fmt: skip


def test_gradient_of_a_gradient():
    """The n-th derivative of each element, where elements do not mix."""
    second = jgrad.grad(jgrad.grad(cube))
    chex.assert_trees_all_close(second(X), 6 * X)
    chex.assert_trees_all_close(jgrad.grad(second)(X), jnp.full(3, 6.0))


def test_gradient_of_what_wraps_a_gradient_is_not_summed():
    """`functools.wraps` copies the mark that `grad` leaves; a Jacobian of a gradient is none."""
    with pytest.raises(ValueError, match="one element"):
        jgrad.grad(jgrad.jac(jgrad.grad(cube)))(X)


def test_gradient_through_the_value():
    """The value of `value_and_grad` is part of the graph."""
    f = lambda x: jgrad.value_and_grad(cube)(x)[0]
    chex.assert_trees_all_equal(jax.grad(f)(X), 3 * X**2)


def test_non_finite_gradients_are_kept():
    grads = jgrad.grad(lambda x: jnp.sum(jnp.sqrt(x)))(jnp.array([0.0, 4.0]))
    np.testing.assert_array_equal(grads, [np.inf, 0.25])


def test_complex_leaves_follow_jax():
    """For f = |z|^2 the gradient is 2 conj(z), as `jax.grad` has it: descend along its conjugate."""
    z = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    f = lambda z: jnp.sum(jnp.square(z.real) + jnp.square(z.imag))
    grads = jgrad.grad(f)(z)
    chex.assert_trees_all_equal(grads, jax.grad(f)(z))
    assert f(z - 0.1 * jnp.conj(grads)) < f(z)


TRANSFORMS = {
    "grad": jgrad.grad,
    "value_and_grad": jgrad.value_and_grad,
    "value_and_jac": jgrad.value_and_jac,
    **{f"jac, {mode}": functools.partial(jgrad.jac, mode=mode) for mode in (None, "reverse", "forward")},
    "hvp": lambda f: lambda x: jgrad.hvp(f, (x,), (x,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_func_is_called_once(name):
    calls = []
    TRANSFORMS[name](lambda x: (calls.append(x), cube(x))[1])(X)
    assert len(calls) == 1


def test_value_dependent_control_flow():
    f = lambda x: cube(x) if x[0] > 0 else -cube(x)
    chex.assert_trees_all_equal(jgrad.grad(f)(-X), -3 * X**2)


def test_empty_tree():
    assert jgrad.grad(lambda p: jnp.float32(1))({}) == {}


# ---- hvp ---------------------------------------------------------------------------------------


def test_hvp_is_the_product_with_the_hessian(x64):
    rng = np.random.default_rng(0)
    x, v = jnp.asarray(rng.normal(size=(2, 5)))
    f = lambda x: jnp.sum(jnp.sin(x)) * jnp.sum(x**2)
    np.testing.assert_allclose(jgrad.hvp(f, (x,), (v,)), jax.hessian(f)(x) @ v, rtol=1e-12)
    np.testing.assert_allclose(
        jgrad.hvp(f, (x,), (v,)), finite_difference(jax.grad(f), x, v), rtol=1e-6
    )


def test_hvp_of_trees_and_several_arguments():
    f = lambda a, p: jnp.sum(a * a * p["x"])
    p = {"x": 2 * X, "n": 3}
    found = jgrad.hvp(f, (X, p), (jnp.ones(3), {"x": jnp.zeros(3), "n": None}))
    chex.assert_trees_all_close(found[0], 4 * X)
    chex.assert_trees_all_close(found[1]["x"], 2 * X)
    assert found[1]["n"] is None


# ---- stop_gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("preserve_type", [True, False])
def test_stop_gradient(preserve_type):
    tree = {"x": X, "n": jnp.arange(2), "word": "abc", "none": None, "number": 2.5}
    found = jgrad.stop_gradient(tree, preserve_type=preserve_type)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert (found["word"], found["number"]) == ("abc", 2.5)
    chex.assert_trees_all_equal(found["x"], X)
    grads = jax.grad(lambda x: jnp.sum(jgrad.stop_gradient(x) * x))(X)
    chex.assert_trees_all_equal(grads, X)


# ---- messages ----------------------------------------------------------------------------------


test_messages = messages.test_of("grad", globals())
