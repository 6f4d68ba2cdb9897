"""Steps that would make something non-finite are skipped; loss scaling for float16."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import rules
from jgrad._arithmetic.leafwise import apply
from jgrad._inputs import numbers
from jgrad._inputs.around import offer
from jgrad._inputs.commit import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.state import counter
from jgrad._inputs.transformation import pair
from jgrad._layers.layer_axes import read_mesh_axes
from jgrad._trees import checks, trees, values
from jgrad._trees.other_names import explained
from jgrad._trees.protocols import state_of
from jgrad._trees.renamed import renamed
from jgrad._trees.trees import PyTree
from jgrad._wrappers import choices, devices, inside, parameters, rejecting
from jgrad._wrappers.finite import all_finite, stays_finite

_NAME = "skip_nonfinite"
_LARGEST_SCALE = 2.0**125  # its reciprocal is an ordinary float32


@state_of("skip_nonfinite", loss_scale="like")
class SkipState(NamedTuple):
    """State of `skip_nonfinite`. The field names are a file format: checkpoints hold them.

    Attributes:
      skipped: number of steps skipped since the start, or of mini-batches around `accumulate`, an
        int32 scalar; it saturates.
      inner: state of the transformation inside.
      streak: finite steps since the last skip or growth of the scale, an int32 scalar.
      loss_scale: what the loss is to be multiplied by, a float32 scalar; 1 without loss scaling.

    Example:
      >>> tx = jgrad.skip_nonfinite(jgrad.adam(1e-3), loss_scale=2.0**15)
      >>> state = tx.init({"w": jnp.ones((3, 2), jnp.float16)})
      >>> int(state.skipped), int(state.streak), float(state.loss_scale)
      (0, 0, 32768.0)
      >>> int(state.inner.step)
      0
    """

    skipped: jax.Array
    inner: PyTree
    streak: jax.Array
    loss_scale: jax.Array

    def __jgrad_report__(self) -> dict[str, jax.Array]:
        """What `report` reads."""
        return {"skipped": self.skipped, "loss_scale": self.loss_scale}


@renamed(norm_axes="mesh_axes")
@explained
def skip_nonfinite(
    tx: optax.GradientTransformation,
    *,
    loss_scale: Scalar | None = None,
    growth_interval: int = 2000,
    mesh_axes: PyTree = None,
    branch: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Rejects every step that would make parameters or state non-finite.

        step     = tx(g / loss_scale)
        updates  = step if g and step are finite, and the new state and w + step stay so, else 0
        skipped' = skipped, or skipped + 1

    With `loss_scale`, dynamic loss scaling: multiply the loss, in float32, by `state.loss_scale`
    before it is differentiated. The scale halves at each step skipped, down to 1, and doubles after
    each `growth_interval` finite steps in a row, up to 2^125; `tx` sees gradients in float32 or
    wider. Put clipping inside, so that it sees gradients without the scale.

    What is looked at: transformations of this library make nothing non-finite of finite gradients,
    since they work in float32 or wider and saturate, and their updates are clipped to 2^102 (2^118
    for bfloat16), which can be added to any parameter. So the gradients decide, or the norm that
    `clip_by_global_norm` has computed of them. Results of other transformations are looked at, and
    so are float16 parameters, which overflow at 65504: that reads every new array once more.

    With an `accumulate` inside, a non-finite mini-batch is left out of its window, which continues
    and closes as usual. A window whose update is non-finite is dropped as a whole.

    Args:
      tx: any transformation.
      loss_scale: first scale of the loss, in [1, 2^125], such as 2**15; None for no scaling.
      growth_interval: finite steps until the scale doubles, at least 1.
      mesh_axes: names of the mesh axes over which leaves are sharded, inside `shard_map` or `pmap`,
        as for `lars`: all devices then skip the same steps.
      branch: True lets the gradients alone decide, and runs `tx` in a branch, as
        `optax.apply_if_finite` does: for transformations of other libraries that make nothing
        non-finite of finite gradients. It reads least then; on an accelerator the branch waits.

    Returns:
      A transformation with state `SkipState(skipped, inner, streak, loss_scale)`.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = {"w": jnp.full((3, 2), jnp.nan), "b": jnp.ones(2)}
      >>> tx = jgrad.skip_nonfinite(jgrad.gradient_descent(0.1))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> int(state.skipped), int(state.inner.step), bool((updates["b"] == 0).all())
      (1, 0, True)

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
    """
    tx = inside.transformation(_NAME, tx)
    read_mesh_axes(_NAME, mesh_axes)
    values.count(_NAME, "growth_interval", growth_interval)
    values.boolean(_NAME, "branch", branch)
    if loss_scale is not None:
        _check_scale(loss_scale)

    def init(params: PyTree) -> SkipState:
        scale = 1.0 if loss_scale is None else numbers.scalar(_NAME, "loss_scale", loss_scale)
        one = counter(params, 1).astype(jnp.float32)
        scale = one * jnp.asarray(scale, jnp.float32)
        state = SkipState(counter(params), tx.init(params), counter(params), scale)
        return devices.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        inside.check_state(_NAME, state, SkipState)
        inputs = Inputs(_NAME, updates, params)
        sharded_over = devices.mesh_axes_of(inputs, mesh_axes)
        unscaled = updates
        if loss_scale is not None:
            divided = apply(rules.divide, inputs.g, state.loss_scale)
            for x, g in zip(divided, inputs.g, strict=True):
                offer(x, rules.divide, g, state.loss_scale)
            unscaled = inputs.gradients(divided)
        finite = all_finite(inputs.g, sharded_over)
        leaves_out = rejecting.leaves_out(state.inner)
        outer = rejecting.outer_commit(extra_args, state.inner)
        if leaves_out:
            if branch:
                raise ValueError(f"{_NAME}: `branch`: True, expected False around `accumulate`.")
            known = extra_args.get("finite")
            values.flag(_NAME, "finite", known)
            finite = finite if known is None else finite & known
        if branch:
            if outer is not None:
                finite = devices.agreed(finite & outer.flag, sharded_over)

            def take(noting: dict[str, Any]) -> tuple[PyTree, PyTree]:
                steps, inner = tx.update(unscaled, state.inner, params, **extra_args, **noting)
                steps = inputs.directions(trees.flatten(steps)[0])
                return steps, choices.in_dtypes(inner, state.inner)

            steps, inner = choices.noted_branch(
                extra_args.pop("notes", None), finite, take, lambda: (inputs.zeros(), state.inner)
            )
        else:
            agreed = functools.partial(devices.agreed, mesh_axes=sharded_over)
            commit = Commit(unscaled, finite, agreed, outer)
            extra_args["commit"] = commit.for_windows() if leaves_out else commit
            if leaves_out:
                extra_args["finite"] = commit.flag
            steps, inner = tx.update(unscaled, state.inner, params, **extra_args)
            if leaves_out:
                state = state._replace(inner=inside.with_sums(state.inner, inner))
            finite, steps, inner = _chosen(
                commit, inputs, steps, inner, state.inner, sharded_over, leaves_out
            )
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        streak = jnp.where(finite, optax.safe_increment(state.streak), 0)
        scale = state.loss_scale
        if loss_scale is not None:
            scale, streak = _next_scale(scale, streak, finite, growth_interval)
        old = state.skipped, state.streak, state.loss_scale
        skipped, streak, scale = rejecting.counted(outer, (skipped, streak, scale), old)
        new = SkipState(skipped, inner, streak, scale)
        if outer is not None and not (branch and outer.clips):
            rejecting.tell(outer, steps, new, state)
        return steps, new

    return pair(init, update, _NAME)


def _check_scale(loss_scale: Scalar) -> None:
    """A number in range. Arrays pass: they may be traced."""
    value = numbers.as_python_number(loss_scale)
    if checks.is_number(value) and not 1 <= value <= _LARGEST_SCALE:
        raise ValueError(f"{_NAME}: `loss_scale`: {value}, expected a number in [1, 2^125].")
    numbers.scalar(_NAME, "loss_scale", loss_scale)


def _chosen(
    commit: Commit,
    inputs: Inputs,
    steps: PyTree,
    new: PyTree,
    old: PyTree,
    mesh_axes: tuple[str, ...],
    leaves_out: bool,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Whether the step is finite; and then it and the new state, else zeros and the old state.

    Only what is not settled is looked at. If something inside leaves out gradients that are not
    finite, a call with such gradients is taken, too, as long as its results are finite.
    """
    if not commit.has_settled(steps):
        steps = inputs.directions(trees.flatten(steps)[0])
    unknown = [None if commit.has_settled(u) else u for u in trees.flatten(steps)[0]]
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    states = [(n, o) for n, o in pairs if not commit.has_kept(n, o)]
    works: Any = True
    if states or any(u is not None for u in unknown):
        works = _works(inputs, unknown, states, mesh_axes)
    finite = use = commit.flag & works
    if leaves_out:
        use, old = works, inside.rejected(old, new, commit.flag)
    pair_of = (steps, new), (inputs.zeros(), old)
    return finite, *rejecting.chosen(commit, use, *pair_of, settles=works is True)


def _works(
    inputs: Inputs,
    steps: list[Any],
    states: list[tuple[Any, Any]],
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """Whether steps are finite, and states and parameters stay so; settled steps are None."""
    works = all_finite(steps, mesh_axes)
    works &= stays_finite([n for n, _ in states], [o for _, o in states], mesh_axes)
    if inputs.w is not None:
        pairs = zip(steps, inputs.reference.leaves, strict=True)
        params = [None if u is None else p for u, p in pairs]
        works &= stays_finite(parameters.applied(params, steps), params, mesh_axes)
    return works


def _next_scale(
    scale: jax.Array, streak: jax.Array, finite: jax.Array, growth_interval: int
) -> tuple[jax.Array, jax.Array]:
    """Half the scale after a skip, twice the scale after a streak, which begins anew."""
    grow = streak >= growth_interval
    larger = jnp.where(grow, jnp.minimum(2 * scale, _LARGEST_SCALE), scale)
    return jnp.where(finite, larger, jnp.maximum(scale / 2, 1)), jnp.where(grow, 0, streak)
