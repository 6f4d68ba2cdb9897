"""Skips steps whose loss is far above recent losses."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jgrad._inputs import numbers
from jgrad._inputs.pair import counter, pair
from jgrad._trees import checks
from jgrad._trees.annotations import Count, Inner, MeshAxes, Scalar
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import told
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.decisions import computed_once
from jgrad._wrappers.hand_over import RejectingInputs

_NAME = "skip_spikes"
_DEVIATION = 1.4826  # standard deviations of a normal distribution in its MAD
_LEAST = 4  # losses in a window: one loss is a quarter of it


@state_of("skip_spikes", losses="zero")
class SpikeState(NamedTuple, Generic[Inner]):
    """State of `skip_spikes`. Field names are part of the checkpoint format.

    Attributes:
      skipped: number of skipped steps (around `accumulate`, of mini-batches) since the start, an
        int32 scalar; it saturates.
      inner: state of the transformation inside.
      losses: the last accepted losses, a float32 vector of length `window`, newest last, padded
        with zeros in front.
      accepted: number of losses in the window, an int32 scalar.
      streak: number of steps skipped in a row, an int32 scalar; it saturates.
      restarts: how often the window started over, an int32 scalar; it saturates.

    Example:
      >>> state = jgrad.skip_spikes(jgrad.adam(1e-3), window=16).init({"w": jnp.ones((3, 2))})
      >>> state.losses.shape, int(state.skipped), int(state.accepted), int(state.inner.step)
      ((16,), 0, 0, 0)
    """

    skipped: jax.Array
    inner: Inner
    losses: jax.Array
    accepted: jax.Array
    streak: jax.Array
    restarts: jax.Array

    def __jgrad_report__(self) -> dict[str, jax.Array]:
        """Counts for `report`."""
        return {"spikes": self.skipped, "spike_restarts": self.restarts}


@explained
def skip_spikes(
    tx: AnyTransformation[Inner],
    *,
    window: Count = 128,
    deviations: Scalar = 6.0,
    restart: bool = True,
    mesh_axes: MeshAxes = None,
) -> Transformation[SpikeState[Inner]]:
    """Skips every step whose loss is far above the recent losses.

        middle  = median of the last accepted losses
        spread  = 1.4826 median |losses - middle|
        updates = tx(g)   if loss <= middle + deviations spread, and finite, else 0

    A skipped step affects no moment, counter or schedule, and its loss does not enter the window.
    Until the window is a quarter full, only steps with non-finite losses are skipped. After
    `window` skipped losses in a row, the window starts over, because the loss has evidently settled
    at a new level.

    The spread is at least one unit in the last place of `middle`, in the dtype of the loss but at
    most float32, because it would be 0 if most losses in the window were equal. The rule is
    computed in float32, so a float64 loss above 3.4e38 counts as non-finite.

    `skip_spikes` does not look at gradients, so put `skip_nonfinite` inside. Combined with it, in
    either order, `skip_spikes` adds nothing to the cost of a step. A step with an ordinary loss but
    a non-finite gradient is skipped by `skip_nonfinite` alone; if that is inside, the loss still
    enters the window.

    With an `accumulate` inside, a spike only leaves its mini-batch out of the accumulation window,
    which continues and closes as usual. Put everything with a state inside that `accumulate`,
    because transformations before or beside it also see the gradients that are left out.

    Args:
      tx: any transformation. It gets all arguments of the call.
      window: number of recent losses to compare with, at least 4.
      deviations: by how many spreads a loss may exceed the median, in [0, inf).
      restart: False never starts the window over.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, also name
        those of the batch: the mean of the loss over all of them decides, so that all devices skip
        the same steps.

    Returns:
      A transformation with state `SpikeState(skipped, inner, losses, accepted, streak, restarts)`.
      `update` needs `loss=`, a real scalar: the loss whose gradients it gets, without a loss scale.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type, or `update` is called without `loss=`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.skip_spikes(jgrad.gradient_descent(0.1), window=8)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for loss in (3.0, 2.9, 3.1, 50.0):
      ...     updates, state = update(grads, state, params, loss=loss)
      >>> int(state.skipped), int(state.inner.step), bool((updates["w"] == 0).all())
      (1, 3, True)

    Source: OLMo-core's `SkipStepOptimizer`, which uses mean and standard deviation. There, every
      spike enters these and raises the bound for the next one; a median is not affected.
    """
    tx = inside.transformation(_NAME, tx)
    read_mesh_axes(_NAME, mesh_axes)
    checks.count(_NAME, "window", window, _LEAST)
    numbers.scalar(_NAME, "deviations", deviations)
    checks.boolean(_NAME, "restart", restart)

    def init(params: PyTree) -> SpikeState:
        zero = counter(params)
        losses = jnp.zeros(window, jnp.float32) + zero.astype(jnp.float32)
        counters = (counter(params) for _ in range(3))
        state = SpikeState(zero, tx.init(params), losses, *counters)
        return decisions.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree,
        state: SpikeState,
        params: PyTree = None,
        *,
        loss: ArrayLike | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, SpikeState]:
        if state.losses.shape != (window,):
            problem = f"shape {state.losses.shape}, expected {(window,)}, as `window` says"
            raise ValueError(f"{_NAME}: `state.losses`: {problem}.")
        inputs = RejectingInputs(_NAME, updates, params, state.inner, extra_args)
        sharded_over = decisions.mesh_axes_of(inputs, mesh_axes)
        if loss is None and told().is_dry:
            loss = decisions.of_models(_NAME, inputs.tree, 0.0)
        loss = _read(loss)
        value = loss.astype(jnp.float32)
        if sharded_over:
            value = jax.lax.pmean(value, sharded_over)  # not finite if one isn't
        epsilon = max(float(jnp.finfo(x).eps) for x in (loss.dtype, jnp.float32))
        spreads = numbers.scalar(_NAME, "deviations", deviations).astype(jnp.float32)
        accepted = _is_accepted(value, state, spreads, epsilon)
        # ---- the update
        inputs.extra_args |= {"loss": loss}
        steps, inner = inputs.accepted(tx, updates, accepted)
        # ---- the window
        before = state.skipped, *state[2:]
        counts = _next_counts(state, value, accepted, restart)
        if inputs.finite is not None:
            counts = decisions.choose(inputs.finite, counts, before)
        skipped, *others = inputs.counted(counts, before)
        return steps, SpikeState(skipped, inner, *others)

    return pair(init, update, _NAME, SpikeState)


def _read(loss: ArrayLike | None) -> jax.Array:
    """The loss as an array, in the dtype in which it came."""
    x = numbers.as_python_number(loss)
    is_real = checks.is_numeric(x) and x.shape == () and not jnp.iscomplexobj(x)
    if not (checks.is_number(x) or (is_real and x.dtype != jnp.bool_)):
        remedy = "call `update(updates, state, params, loss=value)`"
        came = checks.describe(x) if x is not None else "missing"
        raise TypeError(f"{_NAME}: `loss`: {came}, expected a real scalar; {remedy}.")
    if checks.is_number(x):
        x = float(x) if abs(x) <= float(jnp.finfo(jnp.float32).max) else math.inf * x
        return jnp.asarray(x, jnp.float32)
    x = jnp.asarray(x)
    return x if checks.is_inexact(x) else x.astype(jnp.float32)


def _is_accepted(
    loss: jax.Array, state: SpikeState, deviations: jax.Array, epsilon: float
) -> jax.Array:
    """Whether the loss is finite, and close enough to the window, or the window still too short."""
    size = state.losses.shape[0]
    is_there = jnp.arange(size, dtype=jnp.int32) >= size - state.accepted
    middle = _median(state.losses, is_there, state.accepted)
    spread = _DEVIATION * _median(jnp.abs(state.losses - middle), is_there, state.accepted)
    bound = middle + deviations * jnp.maximum(spread, epsilon * jnp.abs(middle))
    is_few = 4 * state.accepted < size
    flag = jnp.isfinite(loss) & (is_few | ~(loss > bound))
    return computed_once(flag)


def _median(x: jax.Array, is_there: jax.Array, count: jax.Array) -> jax.Array:
    """Of the elements that are there; 0 of none."""
    # The others last, but without infinities, which `jax_debug_infs` treats as an error.
    x = jax.lax.sort((~is_there, x), num_keys=2)[1]
    last = jnp.maximum(count - 1, 0)
    pair_of = x[last // 2] / 2 + x[(last + 1) // 2] / 2
    return jnp.where(count > 0, pair_of, 0.0)


def _next_counts(
    state: SpikeState, loss: jax.Array, accepted: jax.Array, restart: bool
) -> tuple[jax.Array, ...]:
    """What belongs to the wrapper itself, after this loss."""
    size = state.losses.shape[0]
    losses = jnp.concatenate([state.losses[1:], loss[None]])
    skipped = jnp.where(accepted, state.skipped, optax.safe_increment(state.skipped))
    losses = jnp.where(accepted, losses, state.losses)
    count = jnp.where(accepted, jnp.minimum(state.accepted + 1, size), state.accepted)
    streak = jnp.where(accepted, 0, optax.safe_increment(state.streak))
    if not restart:
        return skipped, losses, count, streak, state.restarts
    anew = streak >= size
    restarts = jnp.where(anew, optax.safe_increment(state.restarts), state.restarts)
    zero = jnp.zeros_like(count)
    return (
        skipped,
        jnp.where(anew, jnp.zeros_like(losses), losses),
        jnp.where(anew, zero, count),
        jnp.where(anew, zero, streak),
        restarts,
    )
