"""`variable`, `is_variable`, `variable_data`, and the in-place functions of Ivy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.support import messages

X = {"a": jnp.array([1.0, 2.0]), "n": jnp.arange(3)}


def test_variable():
    found = jgrad.variable({"n": np.arange(2), "h": jnp.ones(2, jnp.float16), "x": 3, "none": None})
    chex.assert_trees_all_equal(
        found,
        {
            "n": jnp.array([0.0, 1.0]),
            "h": jnp.ones(2, jnp.float16),
            "x": jnp.float32(3),
            "none": None,
        },
    )


def test_lists_of_numbers_are_arrays():
    """As in the functional updates; lists of arrays are trees."""
    chex.assert_trees_all_equal(jgrad.variable([1, 2]), jnp.array([1.0, 2.0]))
    chex.assert_trees_all_equal(jgrad.inplace_increment(jnp.arange(2), [3, 4]), jnp.array([3, 5]))
    found = jgrad.inplace_update([jnp.ones(2), jnp.ones(3)], [jnp.zeros(2), 4])
    chex.assert_trees_all_equal(found, [jnp.zeros(2), jnp.full(3, 4.0)])


def test_is_variable():
    assert jgrad.is_variable(X["a"])
    assert not jgrad.is_variable(X["a"], exclusive=True)
    assert not jgrad.is_variable(X["a"], True)
    assert not jgrad.is_variable([1.0])
    seen = []
    jax.jit(lambda x: seen.append(jgrad.is_variable(x)))(X["a"])
    assert seen == [True]


def test_variable_data():
    assert jgrad.variable_data(X) is X


@pytest.mark.parametrize(("function", "expected"),
    [(jgrad.inplace_update, {"a": [0.5, 0.25], "n": [3, 4, 5]}),
    (jgrad.inplace_increment, {"a": [1.5, 2.25], "n": [3, 5, 7]}),
    (jgrad.inplace_decrement, {"a": [0.5, 1.75], "n": [-3, -3, -3]})])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_inplace(function, expected, wrap):
    """New values with the dtypes of the old, and the old as they were."""
    val = {"a": jnp.array([0.5, 0.25], jnp.bfloat16), "n": jnp.array([3, 4, 5])}
    found = wrap(function)(X, val)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, X)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.tolist(), found), expected)
    assert X["a"].tolist() == [1.0, 2.0]


def test_values_broadcast_but_do_not_enlarge():
    found = jgrad.inplace_increment({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}, 1)
    chex.assert_trees_all_equal(found, {"a": jnp.ones((2, 3)), "b": jnp.ones(2)})


test_nothing_is_cast_silently = messages.test_of("variables", globals())
