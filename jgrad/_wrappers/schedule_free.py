"""Schedule-free training: averaging the iterates replaces a schedule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import apply
from jgrad._inputs import kinds, numbers, options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.moment import Step
from jgrad._inputs.pair import counter, pair
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Inner, Scalar, Schedule
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._wrappers import decisions, inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "schedule_free"
_LARGEST = 2.0**96  # of a weight; 2^31 of them can be added in float32
_POWERS = 4.0  # to which 2^24 steps have no larger weight


@state_of("schedule_free", weight_sum="zero", largest_rate="zero", z="weights", average="weights")
class ScheduleFreeState(NamedTuple, Generic[Inner]):
    """State of `schedule_free`. Field names are part of the checkpoint format.

    Attributes:
      done: number of completed updates, an int32 scalar; it saturates.
      weight_sum: sum of the weights in the average, a scalar in float64 if a parameter is, else in
        float32. For float64 parameters, a float32 sum from a version before 1.1 stays float32.
      largest_rate: the largest learning rate so far, a scalar of that dtype.
      z: the iterates of the transformation inside; a tree like the parameters, in float32 for
        half-precision ones.
      average: the average of z, with which to evaluate the model.
      inner: state of the transformation inside.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> state = jgrad.schedule_free(jgrad.gradient_descent(0.1)).init(params)
      >>> jax.tree.map(jnp.shape, state.average)  # evaluate this
      {'b': (2,), 'w': (3, 2)}
    """

    done: jax.Array
    weight_sum: jax.Array
    largest_rate: jax.Array
    z: PyTree
    average: PyTree
    inner: Inner


@explained
def schedule_free(
    tx: AnyTransformation[Inner],
    *,
    beta: Scalar = 0.9,
    learning_rate: Scalar | Schedule = 1.0,
    weight_power: Scalar = 2.0,
    step_power: Scalar = 0.0,
) -> Transformation[ScheduleFreeState[Inner]]:
    """Averages the iterates of an optimizer, so that it needs a warm-up but no other schedule.

        z'       = z + tx(g, y)                                        g is the gradient at y
        weight   = (done + 1)^step_power largest_rate^weight_power
        c        = weight / (sum of the weights so far, this one included)
        average' = (1 - c) average + c z'
        y'       = beta average' + (1 - beta) z'

    The parameters that you train are y. To evaluate or deploy the model, use the average instead,
    `optax.tree.get(state, "average")`. `beta` replaces momentum, so use a `tx` without it:
    `schedule_free(adam(0.0025, beta1=0.0, beta2=0.999, bias_correction="moments"))` is the authors'
    AdamW. Weight decay inside `tx` acts on y, as in their code. For half-precision parameters, z
    and the average are in float32, and so are the gradients and parameters that `tx` gets. Integer
    leaves are left unchanged.

    Args:
      tx: any transformation.
      beta: the weight of the average in y, in [0, 1).
      learning_rate: the learning rate of `tx`: a number in [0, inf), or a function of the number of
        completed updates. If `tx` has a schedule, pass the same function here. Only ratios matter.
        Weights are clipped to 2^-96 and 2^96, and learning rates below the smallest normal number,
        1.2e-38 in float32, count as 0. `update(..., learning_rate=x)` uses x in that call, or its
        largest value if x is a tree.
      weight_power: the power of the largest learning rate so far, in [0, 4]; above 0, steps of a
        warm-up count less.
      step_power: the power of the number of the update, in [0, 4]; above 0, later steps count more.

    Returns:
      A transformation with state `ScheduleFreeState(done, weight_sum, largest_rate, z, average,
      inner)`. `update` needs the parameters.

    Raises:
      ValueError: a Python number is out of range; from `init`, a wrapper that belongs outside is
        inside, or a `scale_by_*` without a learning rate after it.
      TypeError: `tx` is not a transformation, or an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.schedule_free(jgrad.adam(0.0025, beta1=0.0, bias_correction="moments"))
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> optax.tree.get(state, "average")["w"].shape
      (3, 2)

    Source: Defazio et al., "The Road Less Scheduled" (2024), algorithm 1, with the weights of the
      authors' `AdamWScheduleFreeReference`.
    """
    tx = inside.transformation(_NAME, tx)
    numbers.beta(_NAME, "beta", beta)
    for name, power in ("weight_power", weight_power), ("step_power", step_power):
        numbers.scalar(_NAME, name, power)
        if checks.is_number(value := numbers.as_python_number(power)) and value > _POWERS:
            expected = f"a number in [0, {_POWERS:g}], with which weights have ratios in float32"
            raise ValueError(f"{_NAME}: `{name}`: {value}, expected {expected}.")
    if not trees.may_be_function(learning_rate):
        numbers.scalar(_NAME, "learning_rate", cast(Scalar, learning_rate))

    def init(params: PyTree) -> ScheduleFreeState:
        arrays = parameters.checked(_NAME, params)
        z, average, seen = (parameters.copied(arrays, checks.is_inexact) for _ in range(3))
        real = numerics.real_dtype(*filter(checks.is_inexact, trees.flatten(arrays)[0]))
        zero = counter(params).astype(real)
        inner = tx.init(_with(seen, params))
        state = ScheduleFreeState(counter(params), zero, jnp.array(zero), z, average, inner)
        return decisions.as_updated(_NAME, state, update, params)  # a rate of each device's own

    def update(
        updates: PyTree, state: ScheduleFreeState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, ScheduleFreeState]:
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        inputs.require_params("the average")
        z = parameters.copies_in_state(inputs, "state.z", state.z)
        average = parameters.copies_in_state(inputs, "state.average", state.average)
        value, complement, _ = numbers.beta(_NAME, "beta", beta)
        leaves, structure = trees.flatten(params)
        copied = [i for i, x in enumerate(z) if x is not None]
        y = apply(rules.average, *leafwise.at((z, average), copied), value, complement)
        new = dict(enumerate(leaves)) | dict(zip(copied, y, strict=True))
        at = structure.unflatten(new.values())
        steps, inner = inputs.hand_over(tx, updates, state.inner, at)
        moving = inputs.updated()
        lists = z, average, trees.flatten(steps)[0]
        old_z, old_average, moved = leafwise.at(lists, moving.rows)
        done = optax.safe_increment(state.done)
        largest, weight = _weight(
            _rate(inputs, learning_rate, extra_args.get("learning_rate"), state),
            numerics.floating(state.largest_rate),
            done,
            numbers.scalar(_NAME, "weight_power", weight_power),
            numbers.scalar(_NAME, "step_power", step_power),
        )
        total = numerics.floating(state.weight_sum)
        total = total + weight.astype(total.dtype)
        part = numerics.once(numerics.safe_divide(weight, total))
        new_z = inputs.kept(apply(rules.add, old_z, moved), old_z)
        averaged = apply(rules.average, new_z, old_average, numerics.once(1 - part), part)
        averaged = inputs.kept(averaged, old_average)
        new_y = apply(rules.average, new_z, averaged, value, complement)
        kept = moving.moments(new_z, z), moving.moments(averaged, average)
        new_state = ScheduleFreeState(done, total, largest, *kept, inner)
        return moving.directions(apply(_difference, new_y, moving.w)), new_state

    return pair(init, update, _NAME, ScheduleFreeState, handed_on=("learning_rate",))


def _rate(
    inputs: Inputs,
    learning_rate: Scalar | Schedule,
    rate_of_call: PyTree,
    state: ScheduleFreeState,
) -> jax.Array:
    """The learning rate of this update: the option, or the largest of those of the call."""
    if rate_of_call is None:
        rate = options.called(inputs, "learning_rate", learning_rate, lambda: state.done)
        return numbers.scalar(_NAME, "learning_rate", rate)
    step = Step.of_count(state.done)
    rates = kinds.Rate("learning_rate", rate_of_call).leaf_values(inputs, step)
    return _largest(rates, numerics.floating(state.largest_rate).dtype)


def _largest(rates: Sequence[Leaf], dtype: DTypeLike) -> jax.Array:
    """Of all leaves: where rates are in proportion, the weights of the steps are those of each."""
    different = {id(x): jnp.max(x).astype(dtype) for x in filter(checks.is_array, rates)}
    return functools.reduce(jnp.maximum, different.values(), jnp.zeros((), dtype))


def _difference(x: jax.Array, w: jax.Array) -> jax.Array:
    return x - numerics.wide(w)


def _weight(
    rate: jax.Array,
    largest: jax.Array,
    done: jax.Array,
    weight_power: jax.Array,
    step_power: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The largest rate so far, and the weight of this step: 0 before a rate that is not 0.

    In the dtype of the largest rate so far, which a state always keeps.
    """
    wide = [jnp.asarray(x).astype(largest.dtype) for x in (rate, done, weight_power, step_power)]
    rate, step, by_rate, by_step = wide
    largest = jnp.maximum(rate, largest)
    # Their sum stays finite, and none is 0, so the average moves whatever the options are.
    factors = [jnp.clip(x, 1 / _LARGEST, _LARGEST) for x in (step**by_step, largest**by_rate)]
    weight = jnp.clip(factors[0] * factors[1], 1 / _LARGEST, _LARGEST)
    return largest, jnp.where((largest == 0) & (by_rate != 0), 0, weight)


def _with(copies: PyTree, params: PyTree) -> PyTree:
    """What the transformation inside gets: the float32 copy if there is one, else the parameter."""
    return jax.tree.map(lambda x, p: p if x is None else x, copies, params, is_leaf=trees.is_none)
