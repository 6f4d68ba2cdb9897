"""Options of the whole model inside of `optax.partition`, which takes whole nodes away.

The truth is the same transformation with the option of its own group alone.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.choice import mostly_slow
from tests.support.errors import assert_error

PARAMS = {name: {"w": jnp.full((2, 4, 4), 0.5), "v": jnp.ones((2, 4, 4))} for name in ("a", "z")}
GRADS = jax.tree.map(lambda x: x + jnp.arange(4.0).reshape(1, 4, 1), PARAMS)


def tree(w, v, other=None):
    """Of the group that is updated, and of the other one, whose entries should not matter."""
    other = w if other is None else other
    return {"a": {"w": w, "v": v}, "z": {"w": other, "v": other}}


OPTIONS = {
    "rates": lambda of: jgrad.adam(of(0.1, 0.2)),
    "a mask": lambda of: jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=of(True, False)),
    "layers": lambda of: jgrad.lamb(0.1, layer_axes=of(0, None)),
    "layers of a state": lambda of: jgrad.adafactor(0.1, min_side=2, layer_axes=of(0, None)),
    "matrices": lambda of: jgrad.soap(0.1, matrices=of(True, False), layer_axes=of(0, None)),
    "precision": lambda of: jgrad.adam(0.1, moment_dtype="8bit", full_precision=of(True, False)),
}


@pytest.mark.parametrize("name", mostly_slow(OPTIONS, "rates", "a mask", "layers of a state"))
def test_entries_of_the_other_group_are_left_out(name):
    tx = OPTIONS[name](tree)
    both = optax.partition({"t": tx, "f": optax.set_to_zero()}, {"a": "t", "z": "f"})
    alone = OPTIONS[name](lambda *entries: {"a": tree(*entries)["a"]})
    own, of_own = {"a": PARAMS["a"]}, {"a": GRADS["a"]}
    found, _ = jax.jit(both.update)(GRADS, both.init(PARAMS), PARAMS)
    expected, _ = jax.jit(alone.update)(of_own, alone.init(own), own)
    jax.tree.map(np.testing.assert_array_equal, found["a"], expected["a"])
    assert not any(map(np.any, jax.tree.leaves(found["z"])))


class Rates(eqx.Module):
    """Rates in a model that can be called."""

    a: dict
    z: dict

    def __call__(self, count):
        raise AssertionError("a tree of rates, not a schedule")


def test_a_model_of_rates_that_can_be_called():
    params, grads, rates = (Rates(**x) for x in (PARAMS, GRADS, tree(0.0, 1.0)))
    tx = jgrad.gradient_descent(rates)
    both = optax.partition({"t": tx, "f": optax.set_to_zero()}, lambda _: Rates("t", "f"))
    found, _ = both.update(grads, both.init(params), params)
    np.testing.assert_array_equal(found.a["w"], 0.0)
    np.testing.assert_array_equal(found.a["v"], -grads.a["v"])


def test_what_is_missing_in_the_own_group_is_said():
    tx = jgrad.adam({"a": {"w": 0.1}, "z": {"w": 0.1, "v": 0.1}})
    both = optax.partition({"t": tx, "f": optax.set_to_zero()}, {"a": "t", "z": "f"})
    message = (
        "adam: `learning_rate` does not have the structure of `params`: only `params` has "
        "['a']['v']."
    )
    assert_error(ValueError, message, lambda: both.update(GRADS, both.init(PARAMS), PARAMS))
