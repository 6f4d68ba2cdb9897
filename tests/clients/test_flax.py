"""flax: linen with `TrainState`, and nnx with `nnx.Optimizer`."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jgrad
from tests.clients import swap
from tests.clients.pairs import RATE, SCHEDULE, Counted, X, Y, both, every_pair, repeated

pytestmark = pytest.mark.clients


def mean_square(outputs):
    return jnp.mean((outputs[:, 0] - Y) ** 2)


# ---- linen -------------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))


LINEN = Linen()


def start(tx):
    return TrainState.create(apply_fn=LINEN.apply, params=LINEN.init(jax.random.key(0), X), tx=tx)


def steps(state, count):
    """The last state, the losses, and how often the loss was traced."""
    loss = Counted(lambda params: mean_square(state.apply_fn(params, X)))

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return *repeated(step, state, count), loss.count


@every_pair("clip, adamw, schedule", "lamb", "pack_small")
def test_train_state(pair):
    both(pair, lambda tx: steps(start(tx), 30)[1:])


@pytest.mark.parametrize("wrap", [jgrad.pack_small, swap.wrapped])
def test_train_state_saved(wrap):
    """As bytes in the middle of a run, which goes on from them as if nothing had been."""
    tx = wrap(swap.adam(RATE))
    state, *_ = steps(start(tx), 3)
    restored = serialization.from_bytes(start(tx), serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    np.testing.assert_array_equal(steps(restored, 3)[1], steps(state, 3)[1])


# ---- nnx ---------------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(2, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.tanh(self.a(x)))


def optimized(tx):
    """A model and its optimizer."""
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@every_pair("clip, adamw, schedule", "all wrappers")
def test_nnx_optimizer(pair):
    def run(tx):
        model, optimizer = optimized(tx)
        loss = Counted(lambda model: mean_square(model(X)))

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(lambda model: loss(model))(model)
            optimizer.update(model, grads)
            return value

        return [step(model, optimizer) for _ in range(20)], loss.count

    both(pair, run)


def test_state_by_optax_names():
    _, optimizer = optimized(swap.adam(RATE))
    assert optimizer.opt_state.count[...] == 0
    assert "a" in optimizer.opt_state.mu


@every_pair("momentum", "lamb", "all wrappers")
def test_hijax_variables(pair):
    """`init` is given the variables themselves, which are no arrays but become some."""

    def run(tx):
        with nnx.var_defaults(hijax=True):
            model, optimizer = optimized(tx)

            def step():  # eager: flax 0.12.12 changes them in no other
                graphdef, params, rest = nnx.split(model, nnx.Param, ...)
                loss = lambda params: mean_square(nnx.merge(graphdef, params, rest)(X))
                arrays = nnx.with_vars(params, hijax=False)  # JAX does not differentiate the others
                value, grads = jax.jit(jax.value_and_grad(loss))(arrays)
                optimizer.update(params, grads)
                return value

            return [step() for _ in range(2)]

    both(pair, run)


# ---- schedules that are trees ------------------------------------------------------------------


@flax.struct.dataclass
class Dataclass:
    scale: float

    def __call__(self, count):
        return self.scale * SCHEDULE(count)


class NnxSchedule(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, count):
        return self.scale[...] * SCHEDULE(count)


@pytest.mark.parametrize("make", [lambda: Dataclass(1.0), NnxSchedule], ids=["struct", "nnx"])
def test_a_schedule_that_is_a_tree(make):
    found = [steps(start(adam(make())), 5)[1] for adam in (optax.adam, swap.adam)]
    np.testing.assert_allclose(*found, rtol=1e-5)
