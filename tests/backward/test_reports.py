"""What `watch` reports of a step in the backward pass: the numbers of the ordinary step, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.backward import models
from tests.backward.recipes import adam, clipped

# ---- names of rates, and numbers of stacks -------------------------------------------------------

AXES = {"layers": 0, "head": None}
RATES = {"layers": {"w": 1e-2, "b": 2e-2}, "head": 3e-2}


def in_groups():
    """A method for some leaves, of which a share has one or none."""
    methods = {
        "head": clipped(jgrad.lion(1e-3)),
        "w": clipped(adam(1e-2)),
        "b": jgrad.gradient_descent(2e-2),
    }
    return optax.partition(methods, {"layers": {"w": "w", "b": "b"}, "head": "head"})


METHODS = {
    "a tree": (lambda: jgrad.lamb(RATES, layer_axes=AXES), {}),
    "a tree in the call": (adam, {"learning_rate": RATES}),
    "groups": (in_groups, {}),
    "a number in the call, of groups": (in_groups, {"learning_rate": 0.5}),
}


def small_loss(params, x):
    def block(layer, x):
        return x + jnp.tanh(x @ layer["w"] + layer["b"][None])

    return jnp.mean(jnp.square(jgrad.scan_layers(block, params["layers"], x) @ params["head"]))


def small_model():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    return {"layers": {"w": draw(3, 4, 4), "b": draw(3, 4)}, "head": draw(4, 2)}, draw(2, 4)


def reports(tx, loss, params, x, **extra):
    """Of both forms of the step."""
    steps = jgrad.step_in_backward(tx, loss, first_pass=True), models.ordinary(tx, loss)
    states = [models.run(step, params, tx.init(params), [x], **extra)[1] for step in steps]
    return [jax.device_get(jgrad.report(state)) for state in states]


def assert_same(found, expected, rtol):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].shape == x.shape, name
        np.testing.assert_allclose(found[name], x, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.slow(always=["a tree in the call"])
@pytest.mark.parametrize("name", METHODS)
def test_rates(name, x64):
    make, extra = METHODS[name]
    tx = jgrad.watch(make(), layer_axes=AXES)
    found, expected = reports(tx, small_loss, *small_model(), **extra)
    assert_same(found, expected, 1e-6)
    assert ("learning_rate" in found) == (name != "a tree")


# ---- numbers of a stack in other states ----------------------------------------------------------


def of_leaves(change):
    """Keeps a number for each leaf."""

    def init(params):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {jax.tree_util.keystr(path): jnp.zeros(()) for path, _ in leaves}

    def update(updates, state, params=None):
        return updates, {key: change(x, updates) for key, x in state.items()}

    return optax.GradientTransformation(init, update)


def test_a_number_of_a_stack_is_read_as_it_was_before_the_step():
    """A count is one more afterwards, and not one more for each layer."""
    params, x = jax.tree.map(jnp.float32, small_model())
    tx = optax.chain(jgrad.gradient_descent(0.1), of_leaves(lambda n, _: n + 1))
    step = jgrad.step_in_backward(tx, small_loss)
    assert {float(n) for n in step(params, tx.init(params), x)[1][1].values()} == {1}
