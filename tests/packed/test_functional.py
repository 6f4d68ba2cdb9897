"""Functional updates of packed trees: options for the tree; the sizes of arrays stay."""

import jax
import jax.numpy as jnp
import pytest

import jgrad
from tests.support.loops import assert_equal
from tests.support.packed_model import DECAYS, PER_ELEMENT, SMALL, assert_close, normal

T = 3
FUNCTIONAL = {
    "adam_step": lambda w, g, m, v, lr, o: jgrad.adam_step(g, m, v, T, **o),
    "adam_update": lambda w, g, m, v, lr, o: jgrad.adam_update(w, g, lr, m, v, T, **o),
    "adan_update": lambda w, g, m, v, lr, o: jgrad.adan_update(w, g, lr, m, v, g, m, T, **o),
    "lamb_update": lambda w, g, m, v, lr, o: jgrad.lamb_update(w, g, lr, m, v, T, **o),
    "lars_update": lambda w, g, m, v, lr, o: jgrad.lars_update(w, g, lr, **o),
    "gradient_descent_update": lambda w, g, m, v, lr, o: jgrad.gradient_descent_update(w, g, lr),
    "optimizer_update": lambda w, g, m, v, lr, o: jgrad.optimizer_update(w, g, lr),
}
OF_ADAM = {
    "beta1": {"layer": 0.9, "rest": [0.8, 0.5, 0.0]},
    "epsilon": {"layer": 1e-7, "rest": 1e-3},
}
OF_LAMB = {
    **OF_ADAM,
    "max_trust_ratio": {"layer": 10.0, "rest": [1.0, 2.0, 3.0]},
    "decay_lambda": DECAYS,
}
MORE = {
    "adam_step": OF_ADAM,
    "adam_update": OF_ADAM,
    "adan_update": OF_ADAM | {"beta3": {"layer": 0.9, "rest": 0.8}},
    "lamb_update": OF_LAMB,
    "lars_update": {"decay_lambda": DECAYS, "trust_coefficient": {"layer": 1.0, "rest": 0.1}},
}


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("options", ["numbers", "trees"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_updates(name, options):
    """Options for the tree; the sizes of arrays stay."""
    w, g, m = normal(0), normal(1), normal(2)
    v = jax.tree.map(jnp.square, normal(3))
    lr, more = (PER_ELEMENT, MORE.get(name, {})) if options == "trees" else (0.1, {})
    packed = jgrad.pack(w, max_size=SMALL)
    own = [jgrad.pack(tree, like=packed) for tree in (w, g, m, v)]
    found = FUNCTIONAL[name](*own, lr, more)
    expected = FUNCTIONAL[name](w, g, m, v, lr, more)
    exact = name not in ("lamb_update", "lars_update")
    (assert_equal if exact else assert_close)(jgrad.unpack(found), expected)
    assert_equal(jgrad.pack(jgrad.unpack(found), like=found), found)


@pytest.mark.bits
def test_a_packed_rate():
    """A number for each element, as packed as the weights."""
    w, g, lr = normal(0), normal(1), normal(2)
    packed = [jgrad.pack(tree) for tree in (w, g, lr)]
    found = jgrad.gradient_descent_update(*packed)
    assert_equal(jgrad.unpack(found), jgrad.gradient_descent_update(w, g, lr))


@pytest.mark.bits
def test_a_list_of_rates_is_a_tree():
    """As beside a list of weights."""
    w = [jnp.ones(2), jnp.ones(2)]
    packed = jgrad.pack(w)
    found = jgrad.gradient_descent_update(packed, packed, [0.1, 0.2])
    assert_equal(jgrad.unpack(found), jgrad.gradient_descent_update(w, w, [0.1, 0.2]))
