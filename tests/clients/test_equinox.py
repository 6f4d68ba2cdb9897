"""equinox: filtered models, whole models, schedules that are modules, ensembles, files."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.clients import swap
from tests.clients.pairs import RATE, SCHEDULE, Counted, X, Y, both, every_pair, repeated

pytestmark = pytest.mark.clients

arrays = functools.partial(eqx.filter, filter_spec=eqx.is_inexact_array)


def mlp(seed=0):
    return eqx.nn.MLP(2, "scalar", 8, 1, activation=jax.nn.tanh, key=jax.random.key(seed))


class Scaled(eqx.Module):
    """With leaves that are no arrays: a function, a number that Python branches on, a flag."""

    inner: eqx.nn.MLP
    activation: object
    scale: float = 2.0
    flag: bool = True

    def __call__(self, x):
        y = self.activation(self.inner(x))
        return self.scale * y if self.scale > 1 and self.flag else y


def stepped(tx, params_of=arrays):
    """A step as in the documentation, and its loss; `update` is given `params_of(model)`."""
    loss = Counted(lambda model: jnp.mean((jax.vmap(model)(X) - Y) ** 2))

    def step(carry):
        model, state = carry
        value, grads = eqx.filter_value_and_grad(lambda model: loss(model))(model)
        updates, state = tx.update(grads, state, params_of(model))
        return (eqx.apply_updates(model, updates), state), value

    return step, loss


def losses(tx, model, params_of=arrays, count=20):
    """Of each step, how often the loss was traced, and the last model."""
    step, loss = stepped(tx, params_of)
    (model, _), values = repeated(eqx.filter_jit(step), (model, tx.init(arrays(model))), count)
    return values, loss.count, model


@every_pair("clip, adamw, schedule", "lamb")
def test_filtered_model(pair):
    _, ours = both(pair, lambda tx: losses(tx, mlp())[:2])
    assert ours[1] == 1


@every_pair("clip, adamw, schedule", "pack_small", "all wrappers")
def test_whole_model(pair):
    """Leaves that are no arrays have no gradient: they stay, and nothing is traced again."""

    def run(tx):
        values, count, model = losses(tx, Scaled(mlp(), jnp.tanh), params_of=lambda model: model)
        assert (model.scale, model.flag, model.activation) == (2.0, True, jnp.tanh)
        assert type(model.scale) is float
        return values, count

    _, ours = both(pair, run)
    assert ours[1] == 1


class Schedule(eqx.Module):
    scale: jax.Array

    def __call__(self, count):
        return self.scale * SCHEDULE(count)


SCHEDULES = {
    "module": lambda: Schedule(jnp.ones(())),
    "module without leaves": lambda: eqx.nn.Lambda(SCHEDULE),
    "filter_jit": lambda: eqx.filter_jit(SCHEDULE),
    "partial": lambda: eqx.Partial(SCHEDULE),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_a_tree(name):
    make = SCHEDULES[name]
    found = [losses(adam(make()), mlp(), count=5)[0] for adam in (optax.adam, swap.adam)]
    np.testing.assert_allclose(*found, rtol=1e-5)


@every_pair("pack_small")
def test_ensemble(pair):
    """`filter_vmap` over models, states and updates."""

    def run(tx):
        models = eqx.filter_vmap(mlp)(jnp.arange(3))
        states = eqx.filter_vmap(lambda model: tx.init(arrays(model)))(models)
        step = eqx.filter_vmap(stepped(tx)[0], in_axes=eqx.if_array(0))
        return repeated(eqx.filter_jit(step), (models, states), 5)[1]

    both(pair, run)


def test_files(tmp_path):
    tx, params = jgrad.pack_small(swap.adam(RATE)), arrays(mlp())
    _, state = tx.update(params, tx.init(params), params)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    again = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", tx.init(params))
    assert eqx.tree_equal(again, state)
