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
from tests.clients.pairs import RATE, SCHEDULE, Counted, both, every_pair

pytestmark = pytest.mark.clients

X = jnp.linspace(-1, 1, 32).reshape(16, 2)
Y = jnp.sin(3 * X.sum(1))


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


def losses(tx, model, *, whole, count=20):
    """As in the documentation, `update` with the filtered model, or with the whole model."""
    loss = Counted(lambda model: jnp.mean((jax.vmap(model)(X) - Y) ** 2))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(lambda model: loss(model))(model)
        params = model if whole else eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(count):
        model, state, value = step(model, state)
        values.append(value)
    return values, loss.count, model


@every_pair("clip, adamw, schedule", "lamb")
def test_filtered_model(pair):
    theirs, ours = both(pair, lambda tx: losses(tx, mlp(), whole=False)[:2])
    assert theirs[1] == ours[1] == 1


@every_pair("clip, adamw, schedule", "pack_small", "all wrappers")
def test_whole_model(pair):
    """Leaves that are no arrays have no gradient: they stay, and nothing is traced again."""
    models = []

    def run(tx):
        values, count, model = losses(tx, Scaled(mlp(), jnp.tanh), whole=True)
        models.append(model)
        return values, count

    theirs, ours = both(pair, run)
    assert theirs[1] == ours[1] == 1
    for model in models:
        assert (model.scale, model.flag, model.activation) == (2.0, True, jnp.tanh)
        assert type(model.scale) is float


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
    found = [losses(f(make()), mlp(), whole=False, count=5)[0] for f in (optax.adam, swap.adam)]
    np.testing.assert_allclose(*found, rtol=1e-5)


@every_pair("pack_small")
def test_ensemble(pair):
    """`filter_vmap` over models, states and updates."""

    def run(tx):
        models = eqx.filter_vmap(mlp)(jnp.arange(3))
        state = eqx.filter_vmap(lambda m: tx.init(eqx.filter(m, eqx.is_array)))(models)

        @eqx.filter_jit
        @functools.partial(eqx.filter_vmap, in_axes=(eqx.if_array(0), eqx.if_array(0)))
        def step(model, state):
            loss = lambda model: jnp.mean((jax.vmap(model)(X) - Y) ** 2)
            value, grads = eqx.filter_value_and_grad(loss)(model)
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state, value

        values = []
        for _ in range(5):
            models, state, value = step(models, state)
            values.append(value)
        return values

    both(pair, run)


@pytest.mark.parametrize("wrap", [jgrad.pack_small])
def test_files(wrap, tmp_path):
    tx, params = wrap(swap.adam(RATE)), eqx.filter(mlp(), eqx.is_array)
    _, state = tx.update(params, tx.init(params), params)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    again = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", tx.init(params))
    assert eqx.tree_equal(again, state)
