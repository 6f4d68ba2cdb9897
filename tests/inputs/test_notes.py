"""What transformations note of learning rates; `tests/wrappers/test_watch.py` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params

RATES = {"layer": 0.1, "rest": [0.01, 0.2, 0.3]}


def noted(tx, w, g, **extra):
    """What `watch` knows beside its norms."""
    tx = jgrad.watch(tx)
    _, state = jax.jit(tx.update)(g, tx.init(w), w, **extra)
    own = ("calls", "measured", "nonfinite", "grad", "update", "param")
    found = jax.device_get(jgrad.report(state))
    return {key: x for key, x in found.items() if not key.startswith(own)}


def close(found, truth, rtol=1e-5):
    assert found.keys() == truth.keys()
    for key, x in truth.items():
        np.testing.assert_allclose(found[key], x, rtol=rtol, err_msg=key)


@pytest.mark.slow
def test_rates_of_leaves():
    """No number is that of all leaves; in one call, the old one stays."""
    (g,) = gradients(1)
    close(noted(jgrad.adam(RATES), params(), g), {})
    close(noted(jgrad.adam(RATES), params(), g, learning_rate=0.5), {})
    close(noted(jgrad.adam(0.1), params(), g, learning_rate=RATES), {"learning_rate": 0.0})


def test_rates_of_elements():
    """Their mean."""
    w, rate = {"w": jnp.ones((2, 3))}, jnp.asarray([[1.0, 2.0, 6.0]])
    close(noted(jgrad.adam(rate), w, w), {"learning_rate": 3.0})


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "inner",
    [jgrad.accumulate(jgrad.adam(0.1), 1), jgrad.skip_nonfinite(jgrad.adam(0.1), branch=True)],
)
def test_a_branch_of_another_library_around_a_branch_of_ours(inner):
    """No traced value leaves it."""
    w = {"a": jnp.ones(3)}
    tx = jgrad.watch(optax.apply_if_finite(inner, 3))
    state, update = tx.init(w), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(w, state, w)
    assert float(jgrad.report(state)["update_norm"]) > 0
