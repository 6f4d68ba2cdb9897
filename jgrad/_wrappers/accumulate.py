"""Gradients of several mini-batches for one update."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, apply, on_leaf
from jgrad._inputs import numbers
from jgrad._inputs.commit import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.notes import Notes
from jgrad._inputs.state import counter, zeros
from jgrad._inputs.transformation import pair
from jgrad._layers.layer_axes import read_mesh_axes
from jgrad._trees import checks, shardings, trees, values
from jgrad._trees.other_names import explained
from jgrad._trees.renamed import renamed
from jgrad._trees.trees import PyTree
from jgrad._wrappers import choices, devices, inside, windows
from jgrad._wrappers.finite import all_finite
from jgrad._wrappers.windows import AccumulateState, WeightedAccumulateState

_NAME = "accumulate"
_LARGEST_SUM = 2.0**125  # of weights; its reciprocal is an ordinary float32


# With a weight, the term of a gradient is w g; the last argument, if it is there.


@on_leaf(arrays=2)
def _sum(total: jax.Array, g: jax.Array, use: jax.Array, *weight: jax.Array) -> jax.Array:
    """t + g where `use`, else t; saturated"""
    term = weight[0].astype(g.dtype) * g if weight else g
    return jnp.where(use, numerics.saturated(total + term, total, g), total)


@on_leaf(arrays=2)
def _mean(
    total: jax.Array, g: jax.Array, use: jax.Array, count: jax.Array, *weight: jax.Array
) -> jax.Array:
    total = _sum(total, g, use, *weight)
    mean = total / count.astype(total.dtype)  # which may be complex
    return numerics.saturated(mean, total) if weight else mean  # the sum of weights may be below 1


@on_leaf(arrays=2)
def _next_sum(
    total: jax.Array, g: jax.Array, use: jax.Array, close: jax.Array, *weight: jax.Array
) -> jax.Array:
    return _zero_if(_sum(total, g, use, *weight), close)


@on_leaf(arrays=1)
def _zero_if(x: jax.Array, zero: jax.Array) -> jax.Array:
    return jnp.where(zero, jnp.zeros_like(x), x)


def _next_total(x: Any, g: Any, use: jax.Array, close: jax.Array, *weight: Any) -> Call | None:
    if x is None:
        return None
    return (_zero_if, (x, close)) if g is None else (_next_sum, (x, g, use, close, *weight))


def _summed(weight: Any, use: jax.Array, mesh_axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """The weight of a mini-batch that is used, over all devices, and whether it is used."""
    if weight is None:
        remedy = "call `update(updates, state, params, weight=tokens)`"
        raise TypeError(f"{_NAME}: `weight`: missing, expected one with `weighted=True`; {remedy}.")
    weight = jnp.asarray(numbers.scalar(_NAME, "weight", weight), jnp.float32)
    weight = jax.lax.psum(weight, mesh_axes) if mesh_axes else weight
    use &= (weight >= 0) & (weight < jnp.inf)
    return jnp.where(use, weight, 0.0), use


def _fits(step: Any, total: Any) -> bool:
    """Whether an array like the first can be kept in one like the second, bit for bit."""
    if step is None or total is None or not jnp.issubdtype(step.dtype, jnp.inexact):
        return False
    is_alike = jnp.iscomplexobj(step) == jnp.iscomplexobj(total)
    return bool(is_alike and jnp.finfo(step.dtype).bits <= jnp.finfo(total.dtype).bits)


@renamed(norm_axes="mesh_axes")
@explained
def accumulate(
    tx: optax.GradientTransformation,
    every: int | Callable[[jax.Array], Any],
    *,
    check_finite: bool = True,
    weighted: bool = False,
    mesh_axes: PyTree = None,
    mean: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Updates once for a window of mini-batches, with the mean of their gradients.

        total'  = total + g          where all of g is finite; else g is left out, and counted
        updates = tx(total' / count)  at the end of a window, and 0 before

    and with `weighted`, where `weight` is that of the call,

        total' = total + weight g,  sum' = sum + weight,  updates = tx(total' / sum')

    A call inside a window only accumulates: `tx` runs under a `lax.cond`. A window without any
    finite mini-batch updates nothing. A gradient None adds nothing to its leaf; if it is that of
    the call that closes the window, the leaf is unchanged. A sum that overflows is the largest
    number.

    Put clipping and `ema` inside, where they see means and updates. Put loss scaling directly
    outside, where it sees non-finite gradients: `skip_nonfinite(accumulate(tx, every),
    loss_scale=...)`.

    `update(..., emit=True)` closes the window with this call, for a last window that is not full.
    `emit=False` keeps it open, and compiles to a program without `tx`. By default the call that
    fills the window closes it. `emit` may be a traced bool. `finite=` says whether the gradients
    are finite, where that is known already; it may be traced too.

    `update(..., weight=tokens)` is for mini-batches of different sizes: if each gradient is the
    mean over the tokens of its mini-batch, on all devices together, a window has the mean over all
    its tokens, however they were split. Only ratios of weights matter. A mini-batch whose gradient
    is left out takes its weight with it. One of weight 0 adds nothing, and a window of weight 0
    updates nothing. A traced weight that is negative or not finite leaves its mini-batch out.

    Args:
      tx: any transformation. It sees means in the dtype of the gradients, or unrounded where
        `master_weights` or `stochastic_rounding` is inside.
      every: mini-batches per window, at least 1; or a function of the number of updates done, as
        `tx` counts them for its schedules, that returns an int, which may be traced. With 1 the
        state has no sum: `total` is None until a call has an `emit` that may keep its window open.
      check_finite: False adds every gradient unchecked. Checking a gradient before it is added
        reads it once more.
      weighted: True needs `weight=` in each `update`: a number or a real scalar, in [0, inf), kept
        in float32. Sums of weights saturate at 2^125.
      mesh_axes: names of the mesh axes over which gradients are sharded, inside `shard_map` or
        `pmap`, as for `lars`: all devices then leave out the same mini-batches. A weight is summed
        over them: give each device the tokens that it has, or all devices the same number.
      mean: False hands on the sum of a window in place of its mean. Cast to a narrower dtype, it is
        the largest number where it overflows.

    Returns:
      A transformation with state `AccumulateState(mini_step, count, skipped, total, inner)`, or
      `WeightedAccumulateState`, with `weight` at the end.

    Raises:
      ValueError: `every` below 1, or a function where no state inside counts its updates; a
        negative weight, or one without `weighted`.
      TypeError: `tx` is not a transformation, `every` is no int and no function that returns it, or
        a weight is missing.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.accumulate(jgrad.gradient_descent(0.1), every=2)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(3):
      ...     updates, state = update(grads, state, params)
      >>> int(state.mini_step), int(state.inner.step)
      (1, 1)
    """
    tx = inside.transformation(_NAME, tx)
    if not callable(every):
        values.count(_NAME, "every", every)
    values.boolean(_NAME, "check_finite", check_finite)
    values.boolean(_NAME, "weighted", weighted)
    values.boolean(_NAME, "mean", mean)
    read_mesh_axes(_NAME, mesh_axes)

    kind: Any = WeightedAccumulateState if weighted else AccumulateState
    has_windows = callable(every) or every > 1

    def init(params: PyTree) -> Any:
        weight = [counter(params).astype(jnp.float32)] if weighted else []
        counters = (counter(params) for _ in range(3))
        total = zeros(_NAME, params) if has_windows else None
        state = kind(*counters, total, tx.init(params), *weight)
        windows.length(_NAME, every, state.inner)
        return devices.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        emit: Any = None,
        finite: Any = None,
        weight: Any = None,
        commit: Commit | None = None,
        notes: Notes | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        inside.check_state(_NAME, state, kind)
        if weight is not None and not weighted:
            came = checks.describe(weight)
            raise ValueError(f"{_NAME}: `weight`: {came}, expected None without `weighted=True`.")
        inputs = Inputs(_NAME, updates, params)
        if state.total is None and (has_windows or not (emit is None or emit is True)):
            state = state._replace(total=zeros(_NAME, inputs.tree))
        has_sum, before = state.total is not None, state
        if not has_sum:  # nor a window that was open in the state of another `every`
            state = windows.without_window(state, state, None)
        outer = None if commit is None else commit.of_windows
        accepted: Any = True
        if outer is not None:
            outer.leave_out()
        if outer is not None and not outer.is_finite(updates):
            # It says nothing of these gradients, unless they are left out whatever they are.
            accepted = True if outer.clips else outer.flag
            outer = None
        values.flag(_NAME, "emit", emit)
        values.flag(_NAME, "finite", finite)
        sharded_over = devices.mesh_axes_of(inputs, mesh_axes)
        if not sharded_over and devices.holds_shards(state.inner, inputs):
            remedy = "`zero(accumulate(tx, every), axis_name)`, or give its axis as `mesh_axes`"
            raise ValueError(f"{_NAME}: `tx`: a `zero`, expected it outside: {remedy}.")
        # Collectives inside `tx` wait for all devices, so all have to take the same branch.
        emit, finite = devices.agreed(emit, sharded_over), devices.agreed(finite, sharded_over)
        accepted = devices.agreed(accepted, sharded_over)
        old = inputs.moment("state.total", state.total) if has_sum else [None] * len(inputs.g)
        if finite is None and outer is not None:
            finite = outer.flag
        elif finite is None:
            finite = all_finite(inputs.g, sharded_over) if check_finite else True
        use = jnp.asarray(finite if accepted is True else finite & accepted)
        own: tuple[jax.Array, ...] = ()  # the weight
        if weighted:
            if weight is None and getattr(notes, "is_dry", False):  # it may be that of each model
                names = devices.axes_of_models(_NAME, inputs.tree)
                weight = shardings.varying_over(jnp.ones((), jnp.float32), names)
            weight, use = _summed(weight, use, sharded_over)
            own = (weight,)
        mini_step = state.mini_step + 1
        count = state.count + use.astype(jnp.int32)
        skipped = jnp.where(use, state.skipped, optax.safe_increment(state.skipped))
        if emit is None:
            emit = mini_step >= windows.length(_NAME, every, state.inner)
        never = isinstance(emit, (bool, np.bool_)) and not emit
        emit = jnp.asarray(emit)
        divisor = count
        if weighted:
            divisor = numerics.clipped(state.weight + weight, _LARGEST_SUM)
            use &= weight > 0
        # Without a finite mini-batch there is no mean, and the total is still zero.
        close = emit & (divisor > 0)
        if not has_sum and not weighted and finite is True and accepted is True:
            close = True  # and no branch
        # One array for each leaf goes through two branches, in the place of the sum. If the window
        # closes it becomes the mean, and then the step; else it stays as it is, and the pass that
        # applies the updates adds the gradient. Then nothing is written elsewhere.
        fits = list(map(_fits, inputs.reference.leaves, old))

        def divide() -> list[Any]:
            nonzero = jnp.where(divisor > 0, divisor, 1.0) if weighted else jnp.maximum(count, 1)
            nonzero = nonzero if mean else jnp.ones_like(nonzero)
            # Without a sum, zeros in the branch are constants, and take no memory.
            sums = old if has_sum else [g if g is None else jnp.zeros_like(g) for g in inputs.g]
            means = apply(_mean, sums, inputs.g, use, nonzero.astype(float), *own)
            return [o if x is None else x for x, o in zip(means, old, strict=True)]

        def keep() -> list[Any]:
            pairs = zip(old, inputs.g, strict=True)
            return [
                o if g is None else numerics.widen(o, numerics.real_dtype(o, g)) for o, g in pairs
            ]

        def hold() -> tuple[list[Any], PyTree]:
            rows = zip(divided, old, inputs.reference.leaves, fits, strict=True)
            sums = [
                x.astype(o.dtype) if f else None if p is None else numerics.zeros_like(p)
                for x, o, p, f in rows
            ]
            return sums, state.inner

        # What a branch reads varies as the choice between both, which `vmap` makes one of elements.
        names = shardings.varying_axes(close)
        params, extra_args = shardings.varying_over((params, extra_args), names)
        settled: list[bool] = []  # of the leaves of the updates, and of the state inside
        kept: list[bool] = []

        def rounded(x: jax.Array, dtype: Any) -> jax.Array:
            return x.astype(dtype) if mean else numerics.saturated(x.astype(dtype), x)

        def run(noting: dict[str, Any]) -> tuple[list[Any], PyTree]:
            pairs = zip(divided if has_sum else divide(), inputs.g, strict=True)
            means = [None if g is None else x for x, g in pairs]
            if not inside.any_says(state.inner, inside.UNROUNDED):
                pairs = zip(means, inputs.g, strict=True)
                means = [None if g is None else rounded(x, g.dtype) for x, g in pairs]
            given = inputs.gradients(means)
            # Means of finite gradients are finite, so that a window is committed always.
            inner_commit = None if outer is None else Commit.always(given)
            known = {} if inner_commit is None else {"commit": inner_commit}
            steps, new = tx.update(given, state.inner, params, **known, **noting, **extra_args)
            if inner_commit is None or not inner_commit.has_settled(steps):
                steps = inputs.directions(trees.flatten(steps)[0])
            new = choices.in_dtypes(new, state.inner)
            if inner_commit is not None:
                pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state.inner), strict=True)
                settled[:] = map(inner_commit.has_settled, jax.tree.leaves(steps))
                kept[:] = [inner_commit.has_kept(*pair) for pair in pairs]
            rows = zip(trees.flatten(steps)[0], old, fits, strict=True)
            return [u.astype(o.dtype) if f else u for u, o, f in rows], new

        if never:
            steps, inner = inputs.zeros(), state.inner
            total = apply(_sum, old, inputs.g, use, *own)
        else:
            divided = choices.branch(close, divide, keep) if has_sum else old
            held, inner = choices.noted_branch(notes, close, run, hold)
            rows = list(zip(held, old, inputs.g, fits, strict=True))
            is_open = jnp.logical_not(close)
            moved = [
                (_zero_if, (x, is_open)) if f else (leafwise.identity, (x,)) for x, _, _, f in rows
            ]
            steps = inputs.directions(leafwise.run(moved))
            sums = [(x if f else o, g) for x, o, g, f in rows]
            total = leafwise.run([_next_total(*row, use, close, *own) for row in sums])
        new = kind(
            jnp.where(emit, 0, mini_step),
            jnp.where(emit, 0, count),
            skipped,
            inputs.moments(total, old) if has_sum else None,
            inner,
            *([jnp.where(emit, 0.0, divisor)] if weighted else []),
        )
        if outer is not None:
            # Where `run` was not traced nothing is new.
            leaves = jax.tree.leaves(steps)
            outer.settle(list(itertools.compress(leaves, settled or [True] * len(leaves))))
            pairs = list(zip(jax.tree.leaves(inner), jax.tree.leaves(state.inner), strict=True))
            for n, o in itertools.compress(pairs, kept or [True] * len(pairs)):
                outer.keep([n], [o])
            outer.keep(*(jax.tree.leaves((x.total, *x[5:])) for x in (new, before)))
        return steps, new

    return pair(init, update, _NAME)
