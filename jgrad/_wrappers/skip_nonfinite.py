"""Skips steps whose gradients are not finite, with loss scaling for float16."""

from __future__ import annotations

from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._inputs import numbers
from jgrad._inputs.around import Commit, origin, run_and_say
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.pair import counter, pair
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Count, Inner, MeshAxes, Scalar
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._wrappers import clip, decisions, inside, parameters
from jgrad._wrappers.decisions import Flag, all_finite, stays_finite
from jgrad._wrappers.hand_over import RejectingInputs, Results, is_window, rejected
from jgrad._wrappers.inside import LOSS_SCALE

_NAME = "skip_nonfinite"
_LARGEST_SCALE = 2.0**125  # its reciprocal is an ordinary float32


@state_of("skip_nonfinite", loss_scale="like")
class SkipState(NamedTuple, Generic[Inner]):
    """State of `skip_nonfinite`. Field names are part of the checkpoint format.

    Attributes:
      skipped: number of skipped steps (around `accumulate`, of mini-batches) since the start, an
        int32 scalar; it saturates.
      inner: state of the transformation inside.
      streak: number of finite steps since the scale last changed, an int32 scalar.
      loss_scale: the factor by which to multiply the loss, a float32 scalar; 1 without loss
        scaling.

    Example:
      >>> tx = jgrad.skip_nonfinite(jgrad.adam(1e-3), loss_scale=2.0**15)
      >>> state = tx.init({"w": jnp.ones((3, 2), jnp.float16)})
      >>> int(state.skipped), int(state.streak), float(state.loss_scale)
      (0, 0, 32768.0)
      >>> int(state.inner.step)
      0
    """

    skipped: jax.Array
    inner: Inner
    streak: jax.Array
    loss_scale: jax.Array

    def __jgrad_report__(self) -> dict[str, jax.Array]:
        """What `report` reads."""
        return {"skipped": self.skipped, "loss_scale": self.loss_scale}


@explained
def skip_nonfinite(
    tx: AnyTransformation[Inner],
    *,
    loss_scale: Scalar | None = None,
    growth_interval: Count = 2000,
    mesh_axes: MeshAxes = None,
    branch: bool = False,
    check_results: bool | None = None,
) -> Transformation[SkipState[Inner]]:
    """Skips every step whose gradients are not finite.

        step     = tx(g / loss_scale)
        updates  = step, and the state inside is the new one, if g is finite; else 0 and the old one
        skipped' = skipped, or skipped + 1

    `loss_scale` turns on dynamic loss scaling: multiply the loss, in float32, by `state.loss_scale`
    before you differentiate it. The scale is halved at each skipped step, down to 1, and doubled
    after `growth_interval` finite steps in a row, up to 2^125. `tx` gets unscaled gradients in
    float32 or wider, so put clipping inside.

    It is enough to check the gradients, because finite ones make nothing non-finite in jgrad's own
    transformations: they work in float32 or wider, saturate, and clip updates to 2^102 (2^118 for
    bfloat16), which can be added to any parameter. Results of other libraries saturate in the same
    way, but a NaN that they make of finite gradients would go unnoticed: `check_results=True` looks
    for it, and skips what overflows as well. Float16 overflows at 65504, so results in float16, and
    the parameters that they lead to, are always checked.

    With an `accumulate` inside, a non-finite mini-batch is left out of its window, and the window
    continues and closes as usual. If the update of a window is found to be non-finite, the whole
    window is dropped.

    Args:
      tx: any transformation.
      loss_scale: initial scale of the loss, in [1, 2^125], such as 2**15; None for no loss scaling.
      growth_interval: number of finite steps after which the scale doubles, at least 1.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, all devices
        then skip the same steps.
      branch: True runs `tx` in a branch, as `optax.apply_if_finite` does, and checks no results. On
        accelerators, the branch has to wait for the decision.
      check_results: True also skips a step if an update is non-finite, or if parameters or state
        would become so, which reads all of these once more; False checks gradients alone; None
        checks results in float16.

    Returns:
      A transformation with state `SkipState(skipped, inner, streak, loss_scale)`.

    Raises:
      ValueError: a Python number is out of range, `growth_interval` is given without `loss_scale`,
        or `check_results` with `branch`; from `init`, another loss scale is inside; from `update`,
        under `jit`, clipping comes before the loss scale.
      TypeError: an option has the wrong type.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = {"w": jnp.full((3, 2), jnp.nan), "b": jnp.ones(2)}
      >>> tx = jgrad.skip_nonfinite(jgrad.gradient_descent(0.1))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> int(state.skipped), int(state.inner.step), bool((updates["b"] == 0).all())
      (1, 0, True)

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
    """
    name = _NAME if loss_scale is None else LOSS_SCALE
    tx = inside.transformation(_NAME, tx, name_in_order=name)
    read_mesh_axes(_NAME, mesh_axes)
    checks.count(_NAME, "growth_interval", growth_interval)
    checks.boolean(_NAME, "branch", branch)
    if check_results is not None:
        checks.boolean(_NAME, "check_results", check_results)
    if branch and check_results:
        raise ValueError(f"{_NAME}: `check_results`: True, expected None or False with `branch`.")
    if loss_scale is not None:
        _check_scale(loss_scale)

    def init(params: PyTree) -> SkipState:
        scale = 1.0 if loss_scale is None else numbers.scalar(_NAME, "loss_scale", loss_scale)
        one = counter(params, 1).astype(jnp.float32)
        scale = one * jnp.asarray(scale, jnp.float32)
        state = SkipState(counter(params), tx.init(params), counter(params), scale)
        return decisions.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, SkipState]:
        inputs = RejectingInputs(_NAME, updates, params, state.inner, extra_args)
        sharded_over = decisions.mesh_axes_of(inputs, mesh_axes)
        unscaled, leaves = updates, inputs.g
        if loss_scale is not None:
            updated = inputs.updated()
            _check_unclipped(updated)
            leaves = run_and_say([(rules.divide, (g, state.loss_scale)) for g in updated.g])
            unscaled = updated.gradients(leaves)
        finite = all_finite(leaves, sharded_over)
        if inputs.finite is not None:
            finite &= inputs.finite
        call = inputs, tx, unscaled, finite, sharded_over
        finite, steps, inner = _in_branch(*call) if branch else _committed(*call, check_results)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        streak = jnp.where(finite, optax.safe_increment(state.streak), 0)
        scale = state.loss_scale
        if loss_scale is not None:
            scale, streak = _next_scale(scale, streak, finite, growth_interval)
        old = state.skipped, state.streak, state.loss_scale
        skipped, streak, scale = inputs.counted((skipped, streak, scale), old)
        return steps, SkipState(skipped, inner, streak, scale)

    return pair(init, update, _NAME, SkipState)


def _check_scale(loss_scale: Scalar) -> None:
    """A number in range. Arrays pass: they may be traced."""
    value = numbers.as_python_number(loss_scale)
    if checks.is_number(value) and not 1 <= value <= _LARGEST_SCALE:
        raise ValueError(f"{_NAME}: `loss_scale`: {value}, expected a number in [1, 2^125].")
    numbers.scalar(_NAME, "loss_scale", loss_scale)


def _check_unclipped(inputs: Inputs) -> None:
    """Checks that no clipping comes before it in a chain, if a traced gradient shows this."""
    if any(rule is clip.clipped for g in inputs.g for rule, _ in origin(g).functions):
        came = "gradients that `clip_by_global_norm` clipped before the loss scale was divided out"
        expected = f"the clip inside: `{_NAME}(optax.chain(clip, tx), loss_scale=...)`"
        raise ValueError(f"{_NAME}: `updates`: {came}, expected {expected}.")


def _in_branch(
    inputs: RejectingInputs,
    tx: optax.GradientTransformationExtraArgs,
    gradients: PyTree,
    finite: jax.Array,
    mesh_axes: tuple[str, ...],
) -> tuple[jax.Array, PyTree, PyTree]:
    """Whether it is taken; the update and the new state in a branch, else the old one."""
    if inputs.leaves_out:
        raise ValueError(f"{_NAME}: `branch`: True, expected False around `accumulate`.")
    if inputs.outer is not None:
        finite = decisions.agreed(finite & inputs.outer.flag, mesh_axes)
    old = inputs.state

    def take() -> tuple[PyTree, PyTree]:
        steps, new = tx.update(gradients, old, inputs.params, **inputs.extra_args)
        steps = inputs.directions(trees.flatten(steps)[0])
        return steps, decisions.choose(True, new, old)

    return finite, *decisions.noted_branch(finite, take, lambda: (inputs.zeros(), old))


def _committed(
    inputs: RejectingInputs,
    tx: optax.GradientTransformationExtraArgs,
    gradients: PyTree,
    finite: jax.Array,
    mesh_axes: tuple[str, ...],
    check_results: bool | None,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Whether the step is finite; and then it and the new state, else zeros and the old state.

    If something inside leaves out gradients that are not finite, a call with such gradients is
    taken, too, as long as nothing beside it saw them.
    """
    clips = check_results is not True
    commit, new = inputs.tried(tx, gradients, finite, clips=clips, judged_on=mesh_axes)
    works = _works(inputs, new, check_results, mesh_axes)
    use: Flag = commit.flag & works
    old = inputs.state
    if commit.left_out is not None:
        works &= _is_seen_nowhere_else(inputs, commit, new, gradients, mesh_axes)
        use, old = works, old if works is True else rejected(old, new[1], commit.flag)
    # What was told inwards is this decision, unless something was found since.
    known = commit if works is True else None
    results = decisions.decided(use, new, (inputs.zeros(), old), known, clips=clips)
    return commit.by_this & works, *results


def _works(
    inputs: RejectingInputs, new: Results, check_results: bool | None, mesh_axes: tuple[str, ...]
) -> Flag:
    """Whether results are finite, and parameters stay so, as far as they are looked at."""

    def is_looked_at(x: Leaf) -> bool:
        is_float16 = checks.is_inexact(x) and not numerics.has_room(x.dtype)
        return is_float16 if check_results is None else check_results

    both = zip(jax.tree.leaves(new[1]), jax.tree.leaves(inputs.state), strict=True)
    states = [(n, o) for n, o in both if n is not o and is_looked_at(n)]
    updates = trees.flatten(new[0])[0]
    rows = [i for i, u in enumerate(updates) if is_looked_at(u)]
    works: Flag = True
    if states:
        works &= stays_finite(states, mesh_axes)
    if rows:
        steps, params = leafwise.at((updates, inputs.reference.leaves), rows)
        works &= all_finite(steps, mesh_axes)
        if inputs.w is not None:
            new_params = parameters.applied(params, steps)
            works &= stays_finite(zip(new_params, params, strict=True), mesh_axes)
    return works


def _is_seen_nowhere_else(
    inputs: RejectingInputs,
    commit: Commit,
    new: Results,
    gradients: PyTree,
    mesh_axes: tuple[str, ...],
) -> Flag:
    """Whether gradients that windows leave out did not spoil what is beside these."""
    leaves = zip(trees.flatten(gradients)[0], trees.flatten(new[0])[0], strict=True)
    known = commit.left_out or {}
    beside = [u for g, u in leaves if checks.is_inexact(g) and id(origin(g).arrays[0]) not in known]
    parts = [jax.tree.leaves(x, is_leaf=is_window) for x in (new[1], inputs.state)]
    # Of a window nothing is looked at: it is no array.
    states = [(n, o) for n, o in zip(*parts, strict=True) if n is not o and checks.is_inexact(n)]
    if not (beside or states):
        return True
    return commit.flag | (all_finite(beside, mesh_axes) & stays_finite(states, mesh_axes))


def _next_scale(
    scale: jax.Array, streak: jax.Array, finite: jax.Array, growth_interval: Count
) -> tuple[jax.Array, jax.Array]:
    """Half the scale after a skip, twice the scale after a streak, which then restarts."""
    grow = streak >= growth_interval
    larger = jnp.where(grow, jnp.minimum(2 * scale, _LARGEST_SCALE), scale)
    return jnp.where(finite, larger, jnp.maximum(scale / 2, 1)), jnp.where(grow, 0, streak)
