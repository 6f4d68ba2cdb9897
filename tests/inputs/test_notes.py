"""What transformations note: learning rates, and the factor of clipping, beside NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.cases import gradients, params

RATES = {"layer": 0.1, "rest": [0.01, 0.2, 0.3]}


def noted(tx, w, g, packed=False, **extra):
    """What `watch` knows beside its norms."""
    if packed:
        w, g = jgrad.pack(w), jgrad.pack(g)
    tx = jgrad.watch(tx)
    _, state = jax.jit(tx.update)(g, tx.init(w), w, **extra)
    own = ("calls", "measured", "nonfinite", "grad", "update", "param")
    found = jax.device_get(jgrad.report(state))
    return {key: x for key, x in found.items() if not key.startswith(own)}


def size_of(x):
    return np.linalg.norm(np.asarray(x, np.float64))


def close(found, truth, rtol=1e-5):
    assert found.keys() == truth.keys()
    for key, x in truth.items():
        np.testing.assert_allclose(found[key], x, rtol=rtol, err_msg=key)


forms = pytest.mark.parametrize("packed", [False, True], ids=["tree", "packed"])


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


def test_rates_of_two_groups():
    """The last of a name."""
    w, (g,) = params(), gradients(1)
    labels = {"layer": "a", "rest": "b"}
    tx = optax.partition({"a": jgrad.adam(0.1), "b": jgrad.adam(0.2)}, labels)
    close(noted(tx, w, g), {"learning_rate": 0.2})


@pytest.mark.slow(one_in=4)
@forms
@pytest.mark.parametrize("largest", [1e-3, 1e6])
def test_clipping(packed, largest):
    (g,) = gradients(1)
    norm = size_of(np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]))
    found = noted(jgrad.clip_by_global_norm(largest), params(), g, packed)
    close(found, {"clip_factor": min(1, largest / norm)})


@pytest.mark.parametrize(
    "inner",
    [jgrad.accumulate(jgrad.adam(0.1), 1), jgrad.skip_nonfinite(jgrad.adam(0.1), branch=True)],
)
def test_a_branch_of_another_library_around_a_branch_of_ours(inner):
    """No traced value leaves it."""
    w = {"a": jnp.ones(3)}
    tx = jgrad.watch(optax.apply_if_finite(inner, 3))
    state = tx.init(w)
    for _ in range(2):
        _, state = jax.jit(tx.update)(w, state, w)
    assert float(jgrad.report(state)["update_norm"]) > 0
