"""Gradients of several mini-batches for one update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import numerics, rules
from jgrad._inputs import methods
from jgrad._inputs.state import counter, zeros
from jgrad._inputs.update import Leaves
from jgrad._layers import layer_axes as places
from jgrad._trees import trees, values
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping
from jgrad._wrappers.master_weights import MasterState

_NAME = "accumulate"


class AccumulateState(NamedTuple):
    """State of `accumulate`. The field names are a file format: checkpoints hold them.

    Attributes:
      mini_step: calls since the last window was closed, an int32 scalar.
      count: those among them whose gradients were finite.
      skipped: mini-batches left out since the start; it saturates.
      total: sum of the gradients of this window; a tree like the parameters, in float32 or wider.
      inner: state of the transformation inside.
    """

    mini_step: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`
    skipped: jax.Array
    total: PyTree
    inner: PyTree


def accumulate(
    tx: optax.GradientTransformation,
    every: int,
    *,
    check_finite: bool = True,
    norm_axes: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Updates once for a window of mini-batches, with the mean of their gradients.

        total'  = total + g          where all of g is finite; else g is left out, and counted
        updates = tx(total' / count)  at the end of a window, and 0 before

    A call inside a window only accumulates: `tx` runs under a `lax.cond`. A window without any
    finite mini-batch updates nothing. A gradient None adds nothing to its leaf, which is left alone
    where that is the gradient of the call that closes the window. A sum beyond the largest number
    counts as that number.

    Put clipping and `ema` inside, where they see means and updates, and loss scaling directly
    outside, where it sees what is not finite:
    `skip_nonfinite(accumulate(tx, every), loss_scale=...)`.

    `update(..., emit=True)` closes the window with this call, for a last one that is not full;
    `emit=False` says that this call does not, which compiles to a program without `tx`; by default,
    the call that fills the window closes it. `emit` may be a traced bool. `finite=` says whether
    the gradients are finite, where that is known already; it may be traced too.

    Args:
      tx: any transformation. It sees means in the dtype of the gradients, but for `master_weights`,
        which sees them unrounded.
      every: mini-batches per window, at least 1.
      check_finite: False adds every gradient as it is. To look at a gradient before it is added
        means to read it once more.
      norm_axes: names of the mesh axes over which gradients are cut, inside `shard_map` or `pmap`,
        as for `lars`: all devices then leave out the same mini-batches.

    Returns:
      A transformation with state `AccumulateState(mini_step, count, skipped, total, inner)`.

    Raises:
      ValueError: `every` below 1.
      TypeError: `tx` is no transformation, or `every` no int.
    """
    tx = wrapping.inner(_NAME, tx)
    values.count(_NAME, "every", every)
    places.names(_NAME, norm_axes)

    def init(params: PyTree) -> AccumulateState:
        return AccumulateState(
            mini_step=counter(params),
            count=counter(params),
            skipped=counter(params),
            total=zeros(_NAME, params),
            inner=tx.init(params),
        )

    def update(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        emit: Any = None,
        finite: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AccumulateState]:
        wrapping.check_state(_NAME, state, AccumulateState)
        leaves = Leaves(_NAME, updates, params)
        values.flag(_NAME, "emit", emit)
        values.flag(_NAME, "finite", finite)
        cut = wrapping.mesh_axes(leaves, norm_axes)
        if not cut and wrapping.holds_shares(state.inner, leaves):
            remedy = "`zero(accumulate(tx, every), axis_name)`, or give its axis as `norm_axes`"
            raise ValueError(f"{_NAME}: `tx`: a `zero`, expected it outside: {remedy}.")
        # Collectives inside of `tx` wait for all devices: they have to take the same branch.
        emit, finite = wrapping.agreed(emit, cut), wrapping.agreed(finite, cut)
        old = leaves.moment("state.total", state.total)
        if finite is None:
            finite = wrapping.all_finite(leaves.g, cut) if check_finite else True
        use = jnp.asarray(finite)
        added = methods.apply(rules.add_if, old, leaves.g, use.astype(float))
        total = leaves.moments(added, old)
        mini_step = state.mini_step + 1
        count = state.count + use.astype(jnp.int32)
        skipped = jnp.where(use, state.skipped, optax.safe_increment(state.skipped))

        def hold() -> tuple[PyTree, PyTree, PyTree]:
            return leaves.zeros(), total, state.inner

        def close() -> tuple[PyTree, PyTree, PyTree]:
            means = methods.apply(rules.divide, added, count.astype(float))
            if not isinstance(state.inner, MasterState):
                pairs = zip(means, leaves.g, strict=True)
                means = [None if g is None else x.astype(g.dtype) for x, g in pairs]
            mean = leaves.gradients(means)
            steps, inner = tx.update(mean, state.inner, params, **extra_args)
            return (
                leaves.directions(trees.flatten(steps)[0]),
                _nothing(state.total),
                wrapping.in_dtypes(inner, state.inner),
            )

        if emit is None:
            emit = mini_step >= every
        if isinstance(emit, (bool, np.bool_)) and not emit:
            steps, total, inner = hold()
            return steps, AccumulateState(mini_step, count, skipped, total, inner)
        emit = jnp.asarray(emit)
        # Without a finite mini-batch there is no mean, and the total is still zero.
        steps, total, inner = jax.lax.cond(emit & (count > 0), close, hold)
        zero = jnp.zeros_like(count)
        return steps, AccumulateState(
            jnp.where(emit, zero, mini_step), jnp.where(emit, zero, count), skipped, total, inner
        )

    return optax.GradientTransformationExtraArgs(init, update)


def without_window(state: AccumulateState) -> AccumulateState:
    """The state with its window dropped: nothing summed up, and no calls."""
    zero = jnp.zeros_like(state.count)
    return state._replace(mini_step=zero, count=zero, total=_nothing(state.total))


def _nothing(total: PyTree) -> PyTree:
    """The sum of no gradients."""
    return trees.map_leaves(numerics.zeros_like, total)
