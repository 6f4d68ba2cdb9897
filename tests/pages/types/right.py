"""What a strict checker accepts, and the types that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import PartitionSpec as P

import jgrad

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] @ x)


def loss_and_count(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return jnp.sum(params["w"] @ x), 1


def cube(x: jax.Array) -> jax.Array:
    return x**3


class Rates(NamedTuple):
    w: float
    b: float


class Module(eqx.Module):
    w: jax.Array


params: Params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
x = jnp.ones((2, 3))
spec = P("x")  # type: ignore[no-untyped-call]

# Learning rates: numbers, schedules, rules by path, and trees of any kind.
schedule: optax.Schedule = optax.cosine_decay_schedule(1e-3, 100)
tx: jgrad.Transformation = jgrad.adam(schedule, weight_decay_mask={"w": True}, weight_decay=0.1)
tx = jgrad.skip_nonfinite(jgrad.accumulate(tx, np.int64(4)), loss_scale=2.0**15)
rates = {"w": schedule, "b": {"x": jnp.ones(3)}, "c": None}
jgrad.adam(rates, weight_decay={"w": 0.1, "b": 0}, beta1=np.float32(0.9))
jgrad.adam(np.float64(1e-3), moment_dtype="bfloat16")
jgrad.lion(1, moment_dtype=jnp.bfloat16)
jgrad.lion(np.float32(1), moment_dtype=np.dtype("float32"), mesh_axes={"w": spec, "b": None})
jgrad.adam(1e-3, mesh_axes="data")
jgrad.adam(lambda step: 1e-3 / (1 + step))
jgrad.adam(jnp.asarray(1e-3), beta1=jgrad.by_path({"w": 0.8}, rest=0.9))
jgrad.lamb(jgrad.by_path({"w": 1e-3}, rest=1e-4))
jgrad.lion({"w": 1e-3, "b": schedule})
jgrad.lars(Rates(1e-3, 1e-4))
jgrad.adam(Module(jnp.ones(3)))
jgrad.muon(0.02, matrices=jgrad.hidden_matrices(), adam_learning_rate=3e-4)
jgrad.soap(3e-3, matrices=jgrad.hidden_matrices(), adam_learning_rate=1e-3)
jgrad.muon(0.02, matrices=lambda w: {"w": True}, scale="match_rms_adamw", output_axes=0)
jgrad.muon(
    0.1, matrices={"w": True}, scale=lambda out, into: 0.2 * out, adam_learning_rate=schedule
)
jgrad.muon(0.1, matrices=True, coefficients="polar_express", split=(512, 128), layer_axes={"w": 0})
jgrad.muon(0.1, matrices=True, coefficients=[(2.0, -1.5, 0.5)], split=jgrad.by_path({"w": 64}))
jgrad.lamb(1e-3, mesh_axes="data", layer_axes=jgrad.by_path({"w": 0}, rest=None), beta2=schedule)
jgrad.lars(1e-3, mesh_axes=("x", "y"), trust_ratio_mask=lambda w: jax.tree.map(jnp.ndim, w))
jgrad.hyperball(jgrad.lars(1.0), 0.01, leaves=True, radius=lambda shape: shape[0] ** 0.5)
jgrad.hidden_matrices(exclude=["norm"], layer_axes=0)
optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.scale_by_adam(), optax.scale(-1e-3))
optax.masked(jgrad.adam(1e-3), jgrad.by_path({"w": True}, rest=False))

# Gradients have the type of the parameters; of a lambda, checkers know nothing.
assert_type(jgrad.grad(loss)(params, x), Params)
assert_type(jgrad.value_and_grad(loss)(params, x), tuple[jax.Array, Params])
assert_type(jgrad.grad(loss_and_count, has_aux=True)(params, x), tuple[Params, int])
assert_type(
    jgrad.value_and_grad(loss_and_count, has_aux=True)(params, x),
    tuple[tuple[jax.Array, int], Params],
)
assert_type(jgrad.grad(loss, 0)(params, x), Params)
assert_type(jgrad.value_and_grad(loss, 0)(params, x), tuple[jax.Array, Params])
of_both: Any = jgrad.grad(loss, argnums=(0, 1))(params, x)
of_x: Any = jgrad.grad(loss_and_count, 1, has_aux=True)(params, x)
of_lambda: Any = jgrad.grad(lambda w: jnp.sum(w))(x)
of_two: Any = jgrad.grad(lambda w, *, scale: jnp.sum(w * scale))(x, scale=2.0)
slope = jgrad.grad(cube)
assert_type(jgrad.grad(slope)(x), jax.Array)
compiled: Any = jax.jit(jgrad.grad(loss))(params, x)
both: Any = jgrad.value_and_grad(lambda w: jnp.sum(w))(x)
aux: Any = jgrad.value_and_grad(lambda w: (jnp.sum(w), w), has_aux=True)(x)
assert_type(jgrad.jac(cube)(x), jax.Array)
assert_type(jgrad.value_and_jac(cube)(x), tuple[jax.Array, jax.Array])
of_lambda = jgrad.jac(lambda w: w**2, mode="forward")(x)
of_lambda = jgrad.value_and_jac(lambda w: (w**2, w), has_aux=True)(x)
assert_type(jgrad.hvp(cube, (x,), (x,)), jax.Array)
assert_type(jgrad.hvp(loss, (params, x), (params, x)), tuple[Params, jax.Array])
arrays: tuple[jax.Array, ...] = (x,)
of_arrays: Any = jgrad.hvp(lambda *w: w[0].sum(), arrays, arrays)


def with_flag(function: Callable[[Params], tuple[jax.Array, int]], *, has_aux: bool) -> Any:
    return jgrad.value_and_grad(function, has_aux=has_aux)


# So have updates with explicit state, and what else returns the tree that it is given.
number = jgrad.variable(3)
assert_type(number, jax.Array)
assert_type(jgrad.variable(params), Params)
assert_type(jgrad.variable_data(params), Params)
assert_type(jgrad.inplace_update(params, 5), Params)
assert_type(jgrad.inplace_increment(x, 5), jax.Array)
assert_type(jgrad.stop_gradient(params), Params)
assert_type(jgrad.orthogonalize(params), Params)
assert_type(jgrad.optimizer_update(params, params, 0.1), Params)
assert_type(jgrad.gradient_descent_update(params, params, 0.1), Params)
assert_type(jgrad.lars_update(params, params, {"w": 0.1, "b": 0}, layer_axes=0), Params)
assert_type(jgrad.adam_step(params, x, params, 1), tuple[Params, jax.Array, Params])
assert_type(jgrad.adam_update(x, x, 0.1, x, x, 1), tuple[jax.Array, jax.Array, jax.Array])
assert_type(jgrad.adan(1e-3).init(params), jgrad.AdanState)
assert_type(jgrad.lion_update(params, params, 0.1, params), tuple[Params, Params])
assert_type(jgrad.lamb_update(x, x, 0.1, x, x, 1), tuple[jax.Array, jax.Array, jax.Array])

# So have new parameters, and what was packed.
grads = jgrad.grad(loss)(params, x)
state = jgrad.adam(1e-3).init(params)
assert_type(state, jgrad.OptState)
assert_type(jgrad.apply_gradients(tx, grads, state, params), tuple[Params, jgrad.OptState])
packed = jgrad.pack(params)
assert_type(packed, "jgrad.Packed[Params]")
assert_type(jgrad.unpack(packed), Params)
assert_type(jgrad.pack(params, like=packed), "jgrad.Packed[Params]")
assert_type(packed.layout.width, int)
step: jgrad.TrainStep[Params, jax.Array] = jgrad.step_in_backward(tx, loss)
assert_type(step(params, state, x), tuple[Params, jgrad.OptState, jax.Array])
with_aux = jgrad.step_in_backward(tx, loss_and_count, has_aux=True)
assert_type(with_aux(params, state, x), tuple[Params, jgrad.OptState, tuple[jax.Array, int]])

# States say what they have, and what is inside.
count: int = int(state.step)
updates, state = jgrad.adam(1e-3).update(grads, state, params, learning_rate=0.1)
assert_type(updates, Params)
assert_type(state, jgrad.OptState)
of_soap = jgrad.soap(1e-3, matrices=True).init(params)
assert_type(of_soap, jgrad.SoapState)
assert_type(jgrad.adafactor(1e-3).init(params), jgrad.AdafactorState)
own = jgrad.adam(1e-3)
around = jgrad.skip_nonfinite(jgrad.accumulate(jgrad.watch(jgrad.lion(1e-3)), 4))
skipped, accumulated = around.init(params).skipped, around.init(params).inner
assert_type(accumulated.inner.inner, jgrad.OptState)
assert_type(jgrad.zero(jgrad.pack_small(jgrad.offload(own)), "data").init(params), jgrad.OptState)
assert_type(jgrad.skip_spikes(own).init(params).inner, jgrad.OptState)
assert_type(jgrad.master_weights(own).init(params).inner, jgrad.OptState)
assert_type(jgrad.stochastic_rounding(own).init(params).inner, jgrad.OptState)
assert_type(jgrad.schedule_free(own).init(params).inner, jgrad.OptState)
assert_type(jgrad.average_params(own, schedule, start=10).init(params).inner, jgrad.OptState)
assert_type(jgrad.hyperball(own, 0.1, leaves=True).init(params).inner, jgrad.OptState)
assert_type(jgrad.clip_by_global_norm(1.0, of="previous").init(params), jgrad.ClipState)
of_optax = jgrad.skip_nonfinite(optax.adam(1e-3)).init(params).inner[0].count
window = jgrad.accumulate(own, 2, weighted=True).init(params)
assert_type(window.weight, jax.Array)
assert_type(window.has_updated, jax.Array)
assert_type(window.gradient_step, jax.Array)
norms: dict[str, jax.Array] = jgrad.report(state)
new, account = jgrad.carry_over(of_soap, like=state, reset=True)
assert_type(new, jgrad.OptState)
kept: tuple[str, ...] = account.kept


@jgrad.optimizer_of_leaf
def signum(g: jax.Array, mw: jax.Array, *, beta: Any = 0.9) -> tuple[jax.Array, jax.Array]:
    mw = beta.value * mw + g
    return jnp.sign(mw), mw


@jgrad.optimizer_of_leaf(magnitudes=("peak",))
def bounded(g: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    peak = jnp.maximum(peak, jnp.abs(g))
    return g / (peak + 1e-8), peak


# What moments it has, checkers cannot see.
of_leaf: jgrad.OptState = signum(1e-3, beta=0.8, moment_dtype="8bit").init(params)
peaks = bounded(1e-3).init(params).peak
kind_of_state: type = bounded.State

# What has a name for annotations.
matrices: jgrad.HiddenMatrices = jgrad.hidden_matrices()
decays: jgrad.ByPath = jgrad.by_path({"w": 0.1, "b": None})
methods: list[jgrad.Transformation[jgrad.OptState]] = [own, jgrad.adafactor(1e-3)]
