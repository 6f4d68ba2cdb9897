"""Options of the leaves of a tree, as options of the buffer that holds them."""

import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from jgrad._packed import array_spec

(SPEC,) = array_spec.specs(
    jgrad.pack({"a": jnp.ones(3), "b": jnp.ones((2, 300))})
)  # three rows of b, one of a


@pytest.mark.parametrize("kind", [float, jnp.float32, lambda x: np.full(1, x)])
def test_numbers_that_differ_are_a_column(kind):
    found = SPEC.per_array([kind(2.0), kind(3.0)])
    np.testing.assert_array_equal(found, [[3.0], [3.0], [3.0], [2.0]])


@pytest.mark.parametrize("entries", [[2.0, 2.0], [jnp.float32(2.0)] * 2])
def test_a_number_that_all_share_is_one_number(entries):
    assert np.shape(SPEC.per_array(entries)) == ()


def test_no_number_for_one_is_none_for_all():
    assert SPEC.per_array([2.0, None]) is None


@pytest.mark.slow
def test_a_number_for_each_element():
    row = jnp.arange(300.0)
    found = SPEC.per_array([2.0, row])
    assert found.shape == (4, 256)
    np.testing.assert_array_equal(found[3, :3], 2.0)
    np.testing.assert_array_equal(found[:3].reshape(-1)[:600], np.tile(np.arange(300.0), 2))
