"""Skips steps that would make something non-finite, with loss scaling for float16."""

from __future__ import annotations

import functools
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import rules
from jgrad._arithmetic.leafwise import apply
from jgrad._inputs import numbers
from jgrad._inputs.around import Commit, made_of, origin
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.transformation import counter, pair
from jgrad._layers.layer_axes import read_mesh_axes
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Count, Inner, MeshAxes, Scalar
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree, state_of
from jgrad._wrappers import clip, decisions, inside, parameters
from jgrad._wrappers.decisions import all_finite, stays_finite
from jgrad._wrappers.hand_over import RejectingInputs, rejected
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
) -> Transformation[SkipState[Inner]]:
    """Skips every step that would make the parameters or the state non-finite.

        step     = tx(g / loss_scale)
        updates  = step if g and step are finite, and the new state and w + step stay so, else 0
        skipped' = skipped, or skipped + 1

    `loss_scale` turns on dynamic loss scaling: multiply the loss, in float32, by `state.loss_scale`
    before you differentiate it. The scale is halved at each skipped step, down to 1, and doubled
    after `growth_interval` finite steps in a row, up to 2^125. `tx` gets unscaled gradients in
    float32 or wider, so put clipping inside.

    jgrad's own transformations never turn finite gradients into something non-finite: they work in
    float32 or wider, saturate, and clip updates to 2^102 (2^118 for bfloat16), which can be added
    to any parameter. For these it is enough to check the gradients, or their norm if
    `clip_by_global_norm` computes it. With other transformations, and with float16 parameters,
    which overflow at 65504, the results are checked as well, which reads every new array once more.

    With an `accumulate` inside, a non-finite mini-batch is left out of its window, and the window
    continues and closes as usual. If the update of a window is non-finite, the whole window is
    dropped.

    Args:
      tx: any transformation.
      loss_scale: initial scale of the loss, in [1, 2^125], such as 2**15; None for no loss scaling.
      growth_interval: number of finite steps after which the scale doubles, at least 1.
      mesh_axes: inside `shard_map` or `pmap`, the mesh axes over which leaves are sharded, as for
        `lars`, so that all devices skip the same steps.
      branch: True checks the gradients only and runs `tx` in a branch, as `optax.apply_if_finite`
        does. Use it with transformations of other libraries that never turn finite gradients into
        something non-finite. It reads the least memory, but on accelerators the branch has to wait
        for the decision.

    Returns:
      A transformation with state `SkipState(skipped, inner, streak, loss_scale)`.

    Raises:
      ValueError: a Python number is out of range, or `growth_interval` is given without
        `loss_scale`; from `init`, another loss scale is inside; from `update`, under `jit`,
        clipping comes before the loss scale.
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
    if loss_scale is not None:
        _check_scale(loss_scale)

    def init(params: PyTree) -> SkipState:
        scale = 1.0 if loss_scale is None else numbers.scalar(_NAME, "loss_scale", loss_scale)
        one = counter(params, 1).astype(jnp.float32)
        scale = one * jnp.asarray(scale, jnp.float32)
        state = SkipState(counter(params), tx.init(params), counter(params), scale)
        return decisions.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        inputs = RejectingInputs(_NAME, updates, params, state.inner, extra_args)
        sharded_over = decisions.mesh_axes_of(inputs, mesh_axes)
        unscaled = updates
        if loss_scale is not None:
            _check_unclipped(inputs)
            divided = apply(rules.divide, inputs.g, state.loss_scale)
            for x, g in zip(divided, inputs.g, strict=True):
                made_of(x, rules.divide, g, state.loss_scale)
            unscaled = inputs.gradients(divided)
        take = _in_branch if branch else _committed
        finite, steps, inner = take(inputs, tx, unscaled, sharded_over)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        streak = jnp.where(finite, optax.safe_increment(state.streak), 0)
        scale = state.loss_scale
        if loss_scale is not None:
            scale, streak = _next_scale(scale, streak, finite, growth_interval)
        old = state.skipped, state.streak, state.loss_scale
        skipped, streak, scale = inputs.counted((skipped, streak, scale), old)
        new = SkipState(skipped, inner, streak, scale)
        inputs.tell(steps, new, state, of=None, are_finite=not branch)
        return steps, new

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
    mesh_axes: tuple[str, ...],
) -> tuple[jax.Array, PyTree, PyTree]:
    """Whether gradients are finite; the update and the new state in a branch, else the old one."""
    if inputs.leaves_out:
        raise ValueError(f"{_NAME}: `branch`: True, expected False around `accumulate`.")
    finite = all_finite(inputs.g, mesh_axes)
    if inputs.outer is not None:
        finite = decisions.agreed(finite & inputs.outer.flag, mesh_axes)
    old = inputs.state

    def take() -> tuple[tuple[PyTree, PyTree], None]:
        steps, new = tx.update(gradients, old, inputs.params, **inputs.extra_args)
        steps = inputs.directions(trees.flatten(steps)[0])
        return (steps, decisions.choose(True, new, old)), None

    results, _ = decisions.noted_branch(finite, take, lambda: (inputs.zeros(), old))
    return finite, *results


def _committed(
    inputs: RejectingInputs,
    tx: optax.GradientTransformationExtraArgs,
    gradients: PyTree,
    mesh_axes: tuple[str, ...],
) -> tuple[jax.Array, PyTree, PyTree]:
    """Whether the step is finite; and then it and the new state, else zeros and the old state.

    Only what is not settled is looked at. If something inside leaves out gradients that are not
    finite, a call with such gradients is taken, too, as long as its results are finite.
    """
    finite = all_finite(inputs.g, mesh_axes)
    if inputs.finite is not None:
        finite &= inputs.finite
    agreed = functools.partial(decisions.agreed, mesh_axes=mesh_axes)
    commit = Commit(gradients, finite, agreed, inputs.outer)
    steps, new = inputs.try_it(tx, commit, gradients, commit.flag if inputs.leaves_out else None)
    unknown = [None if commit.has_settled(u) else u for u in trees.flatten(steps)[0]]
    states = zip(jax.tree.leaves(new), jax.tree.leaves(inputs.state), strict=True)
    changed = [(n, o) for n, o in states if not commit.has_kept(n, o)]
    works: Any = True
    if changed or jax.tree.leaves(unknown):
        works = _works(inputs, unknown, changed, mesh_axes)
    finite = commit.flag & works
    use, old = finite, inputs.state
    if inputs.leaves_out:
        use, old = works, rejected(old, new, commit.flag)
    return finite, *inputs.chosen(commit, use, (steps, new), old, settles=works is True)


def _works(
    inputs: Inputs,
    steps: list[jax.Array | None],
    states: list[tuple[jax.Array, jax.Array]],
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """Whether steps are finite, and states and parameters stay so; settled steps are None."""
    works = all_finite(steps, mesh_axes)
    works &= stays_finite([n for n, _ in states], [o for _, o in states], mesh_axes)
    if inputs.w is not None:
        stepped = zip(steps, inputs.reference.leaves, strict=True)
        params = [None if u is None else p for u, p in stepped]
        works &= stays_finite(parameters.applied(params, steps), params, mesh_axes)
    return works


def _next_scale(
    scale: jax.Array, streak: jax.Array, finite: jax.Array, growth_interval: Count
) -> tuple[jax.Array, jax.Array]:
    """Half the scale after a skip, twice the scale after a streak, which then restarts."""
    grow = streak >= growth_interval
    larger = jnp.where(grow, jnp.minimum(2 * scale, _LARGEST_SCALE), scale)
    return jnp.where(finite, larger, jnp.maximum(scale / 2, 1)), jnp.where(grow, 0, streak)
