"""Numbers and axes of layers, which `scan_layers` knows: rates of each layer, norms, matrices.

The truth is the ordinary step of the same rates, and of the same method with `layer_axes`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgrad
from tests.backward import models
from tests.backward.models import AXES, LAYERS, assert_equal
from tests.backward.recipes import NORMS, adam
from tests.backward.test_messages import call
from tests.backward.test_xs import jitted
from tests.support.private import forced

PARAMS, X = models.params(), models.batch()
OF_LAYERS = jnp.asarray([1e-2, 0.0, 1e-3])
RATES = {"first": 1e-3, "layers": {"up": OF_LAYERS[:, None, None], "down": 1e-2}, "last": 1e-3}
LIKE_LEAF = RATES | {"layers": jnp.ones((LAYERS, 1, 16)) * OF_LAYERS[:, None, None]}


def both(tx, expected_tx=None, *, loss=models.loss, params=PARAMS, **extra):
    """A step in the backward pass, and the ordinary one."""
    given = params, tx.init(params), X
    found = jitted(lambda *args: jgrad.step_in_backward(tx, loss)(*args, **extra))(*given)
    ordinary = models.ordinary(tx if expected_tx is None else expected_tx, loss)
    return found, jitted(lambda *args: ordinary(*args, **extra))(*given)


def muon(learning_rate, **axes):
    matrices = jgrad.hidden_matrices(exclude=("first", "last"), layer_axes=AXES)
    return jgrad.muon(learning_rate, matrices=matrices, adam_learning_rate=1e-3, **axes)


OF_RATES = {
    "factory": (lambda: jgrad.adam(RATES), {}),
    "call": (lambda: jgrad.adam(1e-2), {"learning_rate": RATES}),
    "schedule": (lambda: jgrad.adam(lambda step: jax.tree.map(lambda x: x * jnp.where(step < 5, 1.0, 0.0), RATES)), {}),
    "muon": (lambda: muon(RATES), {}),
}  # fmt: skip


@pytest.mark.slow(always=["factory"])
@pytest.mark.parametrize("name", OF_RATES)
def test_a_rate_for_each_layer(name):
    make, extra = OF_RATES[name]
    axes = {"layer_axes": AXES} if name == "muon" else {}
    expected = muon(RATES, **axes) if axes else None
    found, expected = both(make(), expected, **extra)
    assert_equal(found, expected, NORMS if name == "muon" else 4)
    if name == "factory":
        moved = np.asarray(found[0]["layers"]["up"] != PARAMS["layers"]["up"]).any(axis=(1, 2))
        np.testing.assert_array_equal(moved, [True, False, True])


def test_a_rate_for_each_layer_along_another_axis():
    params = PARAMS | {"layers": jax.tree.map(lambda w: jnp.moveaxis(w, 0, 1), PARAMS["layers"])}

    def loss(params, x):
        x = jgrad.scan_layers(models.block, params["layers"], x @ params["first"], axis=1)
        return jnp.mean(jnp.square(x @ params["last"]))

    rates = RATES | {"layers": OF_LAYERS[:, None]}
    assert_equal(*both(jgrad.adam(rates), loss=loss, params=params), 4)


METHODS = {"lamb": jgrad.lamb, "lars": jgrad.lars, "muon": muon}


@pytest.mark.slow(always=["lars-True", "lamb-False"])
@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_methods_know_the_layers(name, is_forced):
    """In both forms of the step, without `layer_axes`."""
    make = METHODS[name]
    with forced(is_forced):
        found, expected = both(make(1e-2), make(1e-2, layer_axes=AXES))
    assert_equal(found, expected, NORMS)


LEAVES = {"first": False, "layers": True, "last": False}
OTHER_STATES = {
    "adafactor": lambda **axes: jgrad.adafactor(1e-2, min_side=4, **axes),
    "watch": lambda **axes: jgrad.watch(adam(), **axes),
    "hyperball": lambda **axes: jgrad.hyperball(jgrad.adam(1.0), 1e-2, leaves=LEAVES, **axes),
    "normuon": lambda **axes: jgrad.muon(
        1e-2, matrices=LEAVES, adam_learning_rate=1e-3, rule="normuon", **axes
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_STATES)
def test_states_that_depend_on_layers(name):
    """There the factory has to be told, too, since `init` knows no loss."""
    make = OTHER_STATES[name]
    with pytest.raises(
        ValueError, match="the method needs `layer_axes`, such as 0, for this stack"
    ):
        call(make())()
    call(make(layer_axes=AXES))()


def test_the_axis_that_a_state_needs():
    params = {"layers": jnp.ones((4, 3, 4))}
    loss = lambda p, x: jnp.sum(jgrad.scan_layers(lambda w, x: x @ w, p["layers"], x, axis=1))
    tx = jgrad.adafactor(1e-2, min_side=4)
    state = jax.eval_shape(tx.init, params)  # of shapes that a share has, too
    with pytest.raises(ValueError, match="`layer_axes`, such as 1, for this stack"):
        jax.eval_shape(jgrad.step_in_backward(tx, loss), params, state, jnp.ones((2, 4)))
