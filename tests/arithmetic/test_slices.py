"""Results in slices: bit for bit the slices of the result, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgrad._arithmetic.slices import SlicedResult, Unknown

COUNT = 4
X = jnp.sin(jnp.arange(8.0 * 6 * 4)).reshape(8, 6, 4)


@jax.jit
def chosen(condition, x):
    """A program by itself, which computes of a whole array, too."""
    return jnp.where(condition, x, 2.0 * jnp.linalg.norm(x))


KNOWN = {
    "the input": lambda x, y: x,
    "a cast": lambda x, y: x.astype(jnp.bfloat16),
    "zeros": lambda x, y: jnp.zeros_like(x),
    "zeros of it": lambda x, y: jnp.where(x == x, 0.0, 0.0),
    "two inputs": lambda x, y: 2.0 * x + y,
    "its norm": lambda x, y: x / jnp.linalg.norm(x),
    "a program inside": lambda x, y: chosen(x > 0, y),
    "a matrix, repeated": lambda x, y: x + jnp.broadcast_to(jnp.eye(6, 4), x.shape),
    "a row, repeated": lambda x, y: x + jnp.broadcast_to(x[:1], x.shape),
    "blocks": lambda x, y: x.reshape(8, 3, 8)[..., :1].reshape(8, 3),
    "merged rows": lambda x, y: x.reshape(48, 4),
    "transposed within rows": lambda x, y: jnp.swapaxes(x, 1, 2),
    "words": lambda x, y: jax.lax.bitcast_convert_type(x.astype(jnp.int8), jnp.uint32),
}
UNKNOWN = {
    "reversed": lambda x, y: x[::-1],
    "transposed": lambda x, y: jnp.swapaxes(x, 0, 1),
    "sums of rows": lambda x, y: x - jnp.sum(x, axis=1, keepdims=True),
    "random": lambda x, y: jax.random.normal(jax.random.key(0), x.shape),
    "numbered": lambda x, y: jnp.broadcast_to(jnp.arange(8.0)[:, None, None], x.shape),
    "some rows": lambda x, y: jnp.concatenate([x, x])[4:12],
    "an array from outside": lambda x, y: x + X,
    "a branch": lambda x, y: jax.lax.cond(x[0, 0, 0] > 0, lambda x: x, lambda x: -x, x),
    "rows in other places": lambda x, y: x.reshape(2, 4, 24).swapaxes(0, 1).reshape(8, 24),
}


@pytest.mark.parametrize("name", KNOWN)
def test_slices_of_a_result(name, standard_promotion):
    """Each from its slices of the inputs alone, and of what is needed whole."""
    f, y = KNOWN[name], jnp.cos(X)
    closed, expected = jax.make_jaxpr(f)(X, y), f(X, y)
    sliced = SlicedResult(closed, closed.jaxpr.outvars[0], COUNT)
    assert (sliced.shape, sliced.count) == (expected.shape, COUNT)
    inputs = [(X, y)[i] for i in sliced.inputs]
    whole = sliced.whole(*((X, y)[i] for i in sliced.whole.inputs))
    found = [
        sliced.one([x[i : i + 2] for x in inputs], whole) for i in range(0, len(X), len(X) // COUNT)
    ]
    for x, part in zip(found, np.split(np.asarray(expected), COUNT), strict=True):
        assert x.dtype == part.dtype
        np.testing.assert_array_equal(x, part)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name, standard_promotion):
    closed = jax.make_jaxpr(UNKNOWN[name])(X, X)
    with pytest.raises(Unknown):
        SlicedResult(closed, closed.jaxpr.outvars[0], COUNT)
