"""What a strict checker accepts, and the types that it reads."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import jgrad

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] @ x)


def loss_and_count(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return jnp.sum(params["w"] @ x), 1


class Rates(NamedTuple):
    w: float
    b: float


class Module(eqx.Module):
    w: jax.Array


params: Params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
x = jnp.ones((2, 3))

# Learning rates: numbers, schedules, rules by path, and trees of any kind.
schedule: optax.Schedule = optax.cosine_decay_schedule(1e-3, 100)
tx = jgrad.adam(schedule, weight_decay=0.1, weight_decay_mask={"w": True, "b": False})
tx = jgrad.skip_nonfinite(jgrad.accumulate(tx, 4), loss_scale=2.0**15)
jgrad.adam(lambda step: 1e-3 / (1 + step))
jgrad.adam(jnp.asarray(1e-3), beta1=jgrad.by_path({"w": 0.8}, rest=0.9))
jgrad.lamb(jgrad.by_path({"w": 1e-3}, rest=1e-4))
jgrad.lion({"w": 1e-3, "b": schedule})
jgrad.lars(Rates(1e-3, 1e-4))
jgrad.adam(Module(jnp.ones(3)))
jgrad.muon(0.02, matrices=jgrad.hidden_matrices(), adam_learning_rate=3e-4)
jgrad.soap(3e-3, matrices=jgrad.hidden_matrices(), adam_learning_rate=1e-3)
jgrad.hyperball(jgrad.lars(1.0), 0.01, leaves=True)
jgrad.pack_small(jgrad.offload(jgrad.watch(jgrad.gradient_descent(0.1))))
optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.scale_by_adam(), optax.scale(-1e-3))

# Gradients have the type of the parameters.
assert_type(jgrad.grad(loss)(params, x), Params)
assert_type(jgrad.value_and_grad(loss)(params, x), tuple[jax.Array, Params])
assert_type(jgrad.grad(loss_and_count, has_aux=True)(params, x), tuple[Params, int])
assert_type(
    jgrad.value_and_grad(loss_and_count, has_aux=True)(params, x),
    tuple[tuple[jax.Array, int], Params],
)
of_both: Any = jgrad.grad(loss, argnums=(0, 1))(params, x)

# So have new parameters, and what was packed.
grads = jgrad.grad(loss)(params, x)
state: jgrad.OptState = jgrad.adam(1e-3).init(params)
assert_type(jgrad.apply_gradients(tx, grads, state, params), tuple[Params, jgrad.OptState])
packed = jgrad.pack(params)
assert_type(packed, "jgrad.Packed[Params]")
assert_type(jgrad.unpack(packed), Params)
assert_type(jgrad.pack(params, like=packed), "jgrad.Packed[Params]")
assert_type(packed.layout.width, int)
step = jgrad.step_in_backward(tx, loss)
assert_type(step(params, state, x), tuple[Params, jgrad.OptState, jax.Array])

# States say what they have.
count: int = int(state.step)
window: jgrad.WeightedAccumulateState = jgrad.accumulate(tx, 2, weighted=True).init(params)
assert_type(window.has_updated, jax.Array)
assert_type(window.gradient_step, jax.Array)
norms: dict[str, jax.Array] = jgrad.report(state)
new, account = jgrad.carry_over(state, like=state)
kept: tuple[str, ...] = account.kept


@jgrad.optimizer_of_leaf
def signum(g: jax.Array, mw: jax.Array, *, beta: Any = 0.9) -> tuple[jax.Array, jax.Array]:
    mw = beta.value * mw + g
    return jnp.sign(mw), mw


signum(1e-3, beta=0.8, moment_dtype="8bit")
