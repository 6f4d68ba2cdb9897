"""Transformations of other libraries that look at more than one element, whatever a user says."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import jgrad
from tests.backward import models
from tests.backward.recipes import AXES, adam
from tests.backward.test_messages import call
from tests.support import messages
from tests.support.errors import assert_error


def stateless(f):
    return optax.stateless(lambda updates, params: jax.tree.map(f, updates))


def refused(who, primitive, ours=""):
    use = f"use {ours}, or the ordinary step" if ours else "use the ordinary step"
    does = f"`{primitive}`, which mixes elements"
    return f"step_in_backward: `tx`: {who} computes {does}. It sees one layer at a time: {use}."


KEY = jax.random.key(0)


MIXING = {name: row for name, *row in messages.read("mixing")}


@pytest.mark.slow(one_in=2, always=["a shape-True"])
@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("name", MIXING)
def test_what_looks_at_more_than_an_element(name, elementwise, standard_promotion):
    """It is refused by name, with or without the promise."""
    _, message, make = MIXING[name]
    tx = eval(make, messages.NAMES | globals())
    assert_error(ValueError, message, call(tx, elementwise=elementwise))


ELEMENTWISE = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(optax.linear_schedule(1e-2, 0.0, 5)),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "norms of ours": lambda: optax.chain(optax.trace(0.9), jgrad.lamb(1e-2, layer_axes=AXES)),
    "a norm of one leaf": lambda: optax.masked(
        optax.clip_by_global_norm(1.0), {"first": True, "layers": False, "last": False}
    ),
    "inside of ours": lambda: jgrad.master_weights(optax.chain(optax.ema(0.9), optax.scale(-0.1))),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.slow(one_in=3, always=["norms of ours", "injected"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_does_not(name, standard_promotion):
    call(ELEMENTWISE[name](), elementwise=True)()


def test_a_mean_over_devices():
    """It is of each element by itself."""
    mean = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "device"))
    tx = optax.chain(mean, adam())
    step = jgrad.step_in_backward(tx, models.loss, elementwise=True)
    params, x = models.params(), jnp.stack([models.batch(), models.batch(1)])
    of_devices = jax.vmap(step, (None, None, 0), axis_name="device")
    new, _, _ = jax.eval_shape(of_devices, params, tx.init(params), x)
    assert new["first"].shape == (2, *params["first"].shape)


def with_a_number(tx):
    """A step of a model in which a weight is one number, in no stack."""
    params = {**models.params(), "scale": jnp.ones(())}
    loss = lambda p, x: p["scale"] * models.loss({k: p[k] for k in p.keys() - {"scale"}}, x)
    return call(tx, loss, params)


def test_a_number_beside_arrays(standard_promotion):
    """What is made of its gradient needs the promise, as of arrays; a rate is no weight."""
    rates = optax.inject_hyperparams(jgrad.adam)(optax.linear_schedule(1e-2, 0.0, 5))
    with_a_number(rates)()
    of_number = optax.masked(optax.scale(2.0), lambda p: {name: name == "scale" for name in p})
    with pytest.raises(ValueError, match="`scale` of another library computes updates"):
        with_a_number(optax.chain(of_number, adam()))()
