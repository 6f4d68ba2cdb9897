"""Gradient descent: the step is the rate times the gradient, rounded once."""

import chex
import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

import jgrad


def test_only_what_is_stored_is_rounded():
    """bfloat16 weights take the nearest value to the exact step."""
    w = jnp.array([1.0, 2.0, 3.0], jnp.bfloat16)
    found = jgrad.gradient_descent_update(w, jnp.ones(3, jnp.bfloat16), 0.123456)
    chex.assert_trees_all_equal(found, (jnp.array([1.0, 2, 3]) - 0.123456).astype(jnp.bfloat16))


numbers = hnp.arrays(np.float32, 3, elements=st.floats(-8, 8, width=32))


@given(w=numbers, g=numbers, rate=st.floats(-2, 2, width=32))
def test_descent_is_linear_in_the_rate(w, g, rate):
    """To the rounding of w - rate g, computed in double precision."""
    found = jgrad.gradient_descent_update(jnp.asarray(w), jnp.asarray(g), rate)
    expected = np.asarray(w, np.float64) - rate * np.asarray(g, np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-6)
