"""One update for the gradients of several mini-batches: `accumulate`, and its states."""

from __future__ import annotations

from typing import Any, Generic, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, apply, on_leaf
from jgrad._inputs import numbers, options
from jgrad._inputs.around import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.moment import zeros
from jgrad._inputs.pair import counter, pair
from jgrad._layers import array_spec
from jgrad._trees import checks, shardings, trees
from jgrad._trees.annotations import Count, Inner, MeshAxes, Schedule
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import IN_PARTS, refuse, telling, told
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.decisions import Flag

_NAME = "accumulate"
_LARGEST_SUM = 2.0**125  # of weights; its reciprocal is an ordinary float32

Every = Count | Schedule
Sums = dict[int, jax.Array]  # by the position of a leaf


def without_window(old: PyTree, new: PyTree, finite: jax.Array | None) -> PyTree:
    """Drops the window from a state if its update was rejected, or the next would be, too."""
    zero = jnp.zeros_like(old.count)
    nothing = trees.map_leaves(numerics.zeros_like, old.total)
    weight = map(jnp.zeros_like, old[5:])
    state = type(old)(zero, zero, new.skipped, nothing, old.inner, *weight)
    if finite is None:
        return state
    closed = finite & (new.mini_step == 0)
    old = old._replace(skipped=new.skipped)
    return jax.tree.map(lambda x, o: x if x is o else jnp.where(closed, x, o), state, old)


class _OfWindow:
    """What both states know about their window."""

    __slots__ = ()

    @property
    def gradient_step(self: Any) -> jax.Array:
        """Number of completed updates, as counted inside; optax's name."""
        done: jax.Array | None = inside.updates_done(self.inner)
        if done is None:
            came = f"{type(self).__name__}: `gradient_step`: no state inside counts its updates"
            raise AttributeError(f"{came}, expected one of a method of jgrad, or of a schedule.")
        return done

    @property
    def has_updated(self: Any) -> jax.Array:
        """Whether the last call closed a window, after a first update; optax's name.

        Also True if that window updated nothing because none of its mini-batches was finite.
        """
        has_updated: jax.Array = (self.mini_step == 0) & (self.gradient_step > 0)
        return has_updated

    def __jgrad_report__(self: Any) -> dict[str, jax.Array]:
        """What `report` reads."""
        return {"skipped_mini_batches": self.skipped}

    __jgrad_rejected__ = without_window


class _Fields(NamedTuple, Generic[Inner]):
    mini_step: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`
    skipped: jax.Array
    total: PyTree
    inner: Inner


class _WeightedFields(NamedTuple, Generic[Inner]):
    mini_step: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`
    skipped: jax.Array
    total: PyTree
    inner: Inner
    weight: jax.Array


@state_of("accumulate", total="sum")
class AccumulateState(_OfWindow, _Fields[Inner]):
    """State of `accumulate`. Field names are part of the checkpoint format.

    `gradient_step` and `has_updated`, named as in `optax.MultiSteps`, are read from the state
    inside.

    Attributes:
      mini_step: number of calls since the last window closed, an int32 scalar.
      count: number of those whose gradients were finite.
      skipped: number of mini-batches left out since the start; it saturates.
      total: sum of the gradients of this window; a tree like the parameters, in float32 or wider.
        None if each window is a single mini-batch, with `every=1`.
      inner: state of the transformation inside.

    Example:
      >>> state = jgrad.accumulate(jgrad.adam(1e-3), every=4).init({"w": jnp.ones((3, 2))})
      >>> int(state.mini_step), int(state.skipped), state.total["w"].shape
      (0, 0, (3, 2))
      >>> int(state.inner.step), int(state.gradient_step), bool(state.has_updated)
      (0, 0, False)
    """

    __slots__ = ()


@state_of("accumulate", total="sum", weight="zero")
class WeightedAccumulateState(_OfWindow, _WeightedFields[Inner]):
    """State of `accumulate(..., weighted=True)`. Field names are part of the checkpoint format.

    Attributes:
      mini_step: number of calls since the last window closed, an int32 scalar.
      count: number of those whose gradients were finite and whose weights were not negative.
      skipped: number of mini-batches left out since the start; it saturates.
      total: sum of the gradients of this window, each times its weight.
      inner: state of the transformation inside.
      weight: sum of the weights of the mini-batches in `count`, a float32 scalar.

    Example:
      >>> tx = jgrad.accumulate(jgrad.adam(1e-3), every=4, weighted=True)
      >>> float(tx.init({"w": jnp.ones((3, 2))}).weight)
      0.0
    """

    __slots__ = ()


@overload
def accumulate(
    tx: AnyTransformation[Inner],
    every: Every,
    *,
    check_finite: bool = True,
    weighted: Literal[False] = False,
    mesh_axes: MeshAxes = None,
    mean: bool = True,
) -> Transformation[AccumulateState[Inner]]: ...
@overload
def accumulate(
    tx: AnyTransformation[Inner],
    every: Every,
    *,
    check_finite: bool = True,
    weighted: Literal[True],
    mesh_axes: MeshAxes = None,
    mean: bool = True,
) -> Transformation[WeightedAccumulateState[Inner]]: ...
@overload
def accumulate(
    tx: AnyTransformation,
    every: Every,
    *,
    check_finite: bool = True,
    weighted: bool,
    mesh_axes: MeshAxes = None,
    mean: bool = True,
) -> Transformation: ...
@explained
def accumulate(
    tx: AnyTransformation,
    every: Every,
    *,
    check_finite: bool = True,
    weighted: bool = False,
    mesh_axes: MeshAxes = None,
    mean: bool = True,
) -> Transformation:
    """Accumulates the gradients of several mini-batches, and updates once with their mean.

        total'  = total + g          where all of g is finite; else g is left out, and counted
        updates = tx(total' / count)  at the end of a window, and 0 before

    where a window is the mini-batches that share an update. With `weighted`, each call has a
    `weight`, and

        total' = total + weight g,  sum' = sum + weight,  updates = tx(total' / sum')

    Only the call that closes a window runs `tx`, under a `lax.cond`. A window without a finite
    mini-batch updates nothing. A gradient of None adds nothing to its leaf; if it comes in the call
    that closes the window, the leaf stays unchanged. Sums that overflow saturate at the largest
    finite number.

    Put clipping and `average_params` inside, so that they work on whole windows. Put loss scaling
    directly outside, where it sees non-finite gradients: `skip_nonfinite(accumulate(tx, every),
    loss_scale=...)`.

    By default, the call that fills the window closes it. `update(..., emit=True)` closes it early,
    for example at the end of the data; `emit=False` keeps it open, and compiles without `tx`. If
    you already know whether the gradients are finite, pass it as `finite=`. Both may be traced
    bools.

    `update(..., weight=tokens)` is for mini-batches of different sizes: if each gradient is the
    mean over the tokens of its mini-batch, on all devices together, the update uses the mean over
    all tokens of the window, however they were split. Only ratios of weights matter. If a gradient
    is left out, so is its weight. A mini-batch of weight 0 adds nothing, and a window of weight 0
    updates nothing. If a traced weight is negative or not finite, its mini-batch is left out.

    Args:
      tx: any transformation. It gets means in the dtype of the gradients, or unrounded if
        `master_weights` or `stochastic_rounding` is inside.
      every: mini-batches per window, at least 1; or a function that returns this number given the
        number of completed updates, as `tx` counts them for its schedules. If the result is traced,
        values below 1 count as 1 instead of raising an error. With `every=1` the state has no sum:
        `total` is None until a call passes an `emit` that may keep the window open.
      check_finite: False adds every gradient unchecked, which saves reading it once more.
      weighted: if True, each `update` needs `weight=`, a number or real scalar in [0, inf), which
        is stored in float32. Sums of weights saturate at 2^125.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, all devices
        then leave out the same mini-batches. Weights are summed over these axes, so pass each
        device the number of its own tokens, or the same number everywhere.
      mean: False passes the sum of a window to `tx` instead of the mean. Where the sum overflows
        the dtype of the gradients, it saturates at the largest finite number.

    Returns:
      A transformation with state `AccumulateState(mini_step, count, skipped, total, inner)`, or
      `WeightedAccumulateState`, with `weight` at the end.

    Raises:
      ValueError: `every` is below 1, or is a function although no state inside counts updates; a
        weight is negative, or given without `weighted`; from `init`, another `accumulate`, an
        `optax.MultiSteps` or a loss scale is inside.
      TypeError: `tx` is not a transformation, `every` is neither an int nor a function, or
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
    if not trees.may_be_function(every):
        checks.count(_NAME, "every", every)
    checks.boolean(_NAME, "check_finite", check_finite)
    checks.boolean(_NAME, "weighted", weighted)
    checks.boolean(_NAME, "mean", mean)
    read_mesh_axes(_NAME, mesh_axes)
    kind: type[PyTree] = WeightedAccumulateState if weighted else AccumulateState
    has_windows = callable(every) or every > 1

    def init(params: PyTree) -> PyTree:
        refuse(_NAME, f"use {IN_PARTS}, or the ordinary step")
        total = zeros(_NAME, params) if has_windows else None
        weight = [counter(params).astype(jnp.float32)] if weighted else []
        state = kind(*map(counter, [params] * 3), total, tx.init(params), *weight)
        _length(every, state.inner)
        return decisions.as_updated(_NAME, state, update, params, mesh_axes)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        emit: Flag | None = None,
        finite: Flag | None = None,
        weight: Any = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, PyTree]:
        if weight is not None and not weighted:
            came = checks.describe(weight)
            raise ValueError(f"{_NAME}: `weight`: {came}, expected None without `weighted=True`.")
        inputs = Inputs(_NAME, updates, params)
        if state.total is None and (has_windows or not (emit is None or emit is True)):
            state = state._replace(total=zeros(_NAME, inputs.tree))
        checks.flag(_NAME, "emit", emit)
        checks.flag(_NAME, "finite", finite)
        around = told()
        # Collectives inside `tx` wait for all devices, so all have to take the same branch.
        devices = _sharded_over(inputs, state.inner, mesh_axes)
        emit = decisions.agreed(emit, devices)
        finite = decisions.agreed(around.finite_with(finite), devices)
        use = _use(inputs, updates, finite, check_finite, devices)
        if weighted:
            weight, use = _summed(weight, use, inputs, devices)
        before = state
        if state.total is None:  # nor a window that was open in the state of another `every`
            state = without_window(state, state, None)
        if emit is None:
            emit = state.mini_step + 1 >= _length(every, state.inner)
        window = _Window(inputs, state, use, weight, emit, mean)
        if isinstance(emit, (bool, np.bool_)) and not emit:
            steps, total, inner = inputs.zeros(), window.total(), state.inner
        else:
            steps, total, inner = _branches(window, tx, state.inner, params, extra_args)
        new = window.next_state(kind, total, inner)
        if around.windows is not None:
            around.windows.settle(steps)
            around.windows.settle(new, before)
        return steps, new

    return pair(init, update, _NAME, kind)


# ---- one call ----------------------------------------------------------------------------------


def _sharded_over(inputs: Inputs, inner: PyTree, mesh_axes: PyTree) -> tuple[str, ...]:
    """The mesh axes along which devices must act alike; an error around a `zero` without any."""
    names = decisions.mesh_axes_of(inputs, mesh_axes)
    if names or not inputs.has_buffers:
        return names
    leaves = zip(inputs.reference.leaves, inputs.specs, strict=True)
    whole = {x.shape for x, spec in leaves if spec.is_buffer}
    for x, spec in zip(trees.flatten(inner)[0], array_spec.specs(inner), strict=True):
        is_buffer = spec.is_buffer and not spec.is_unpacked and spec.shape in whole
        if is_buffer and x is not None and x.shape != spec.shape:  # a shard of it
            remedy = "`zero(accumulate(tx, every), axis_name)`, or give its axis as `mesh_axes`"
            raise ValueError(f"{_NAME}: `tx`: a `zero`, expected it outside: {remedy}.")
    return names


def _use(
    inputs: Inputs,
    updates: PyTree,
    finite: Flag | None,
    check_finite: bool,
    devices: tuple[str, ...],
) -> Flag:
    """Whether to add the gradients."""
    around = told()
    if finite is None:
        finite = decisions.all_finite(inputs.g, devices) if check_finite else True
    if around.windows is None:
        return finite
    around.windows.leave_out(updates)
    if around.windows.flag is around.finite:
        return finite
    return finite & decisions.agreed(around.windows.flag, devices)


def _summed(
    weight: Any, use: Flag, inputs: Inputs, devices: tuple[str, ...]
) -> tuple[jax.Array, Flag]:
    """The weight of a mini-batch that is used, over all devices, and whether it is used."""
    if weight is None and told().is_dry:
        weight = decisions.of_models(_NAME, inputs.tree, 1.0)
    if weight is None:
        remedy = "call `update(updates, state, params, weight=tokens)`"
        raise TypeError(f"{_NAME}: `weight`: missing, expected one with `weighted=True`; {remedy}.")
    weight = jnp.asarray(numbers.scalar(_NAME, "weight", weight), jnp.float32)
    weight = jax.lax.psum(weight, devices) if devices else weight
    use &= (weight >= 0) & (weight < jnp.inf)
    return jnp.where(use, weight, 0.0), use


class _Window:
    """The window of a call: a mini-batch, and the sum of those before it.

    Attributes:
      inputs: of the call.
      updated: of the leaves that have a gradient.
      sums: what was added up before, by the position of a leaf; empty without a sum.
      has_sum: whether there is a sum; a window of one mini-batch needs none.
      weights: the weight of the mini-batch; empty where none has one.
      divisor: the weights of the gradients in the sum, or how many these are.
      use: whether those of the mini-batch are added.
      close: whether there is an update; the bool of Python where there is no choice.
      mean: whether the update is that of the mean, and not of the sum.
    """

    def __init__(
        self,
        inputs: Inputs,
        state: PyTree,
        use: Flag,
        weight: jax.Array | None,
        emit: Flag,
        mean: bool,
    ) -> None:
        self.inputs, self.mean, self.has_sum = inputs, mean, state.total is not None
        self.updated = inputs.updated()
        self._old = inputs.moment("state.total", state.total) if self.has_sum else []
        self.sums: Sums = {i: x for i, x in enumerate(self._old) if x is not None}
        # Of the leaves with a gradient.
        self._with_gradient = leafwise.at(self._old, self.updated.rows) if self.has_sum else []
        is_full = use is True and not self.has_sum
        self.use, self._emit = jnp.asarray(use), jnp.asarray(emit)
        self._mini_step = state.mini_step + 1
        self._count = state.count + self.use.astype(jnp.int32)
        self._skipped = jnp.where(self.use, state.skipped, optax.safe_increment(state.skipped))
        self.divisor, self.weights = self._count, []
        if weight is not None:
            self.divisor = numerics.clipped(state.weight + weight, _LARGEST_SUM)
            self.weights = [weight]
            self.use &= weight > 0
        # Without a finite mini-batch there is no mean, and the total is still zero.
        self.close: Flag = True if is_full else self._emit & (self.divisor > 0)

    def _with(self, new: list[jax.Array]) -> Sums:
        """New sums of leaves with a gradient; all others stay."""
        return self.sums | dict(zip(self.updated.rows, new, strict=True))

    def means(self) -> Sums:
        """The means of all gradients in the window, or the sums."""
        divisor = jnp.maximum(self.divisor, 1)
        if self.weights:
            divisor = jnp.where(self.divisor > 0, self.divisor, 1.0)
        divisor = divisor if self.mean else jnp.ones_like(divisor)
        # Without a sum, the zeros in the branch are constants and take no memory.
        g = self.updated.g
        sums = self._with_gradient if self.has_sum else list(map(jnp.zeros_like, g))
        return self._with(apply(_mean, sums, g, self.use, divisor.astype(float), *self.weights))

    def widened(self) -> Sums:
        """The old sums, in the dtypes of the means."""
        both = zip(self._with_gradient, self.updated.g, strict=True)
        return self._with([numerics.widen(x, numerics.real_dtype(x, g)) for x, g in both])

    def total(self) -> Sums:
        """The sums with this mini-batch, in a window that stays open."""
        sums = self._with_gradient
        return self._with(apply(_sum, sums, self.updated.g, self.use, *self.weights))

    def next_total(self, sums: Sums) -> Sums:
        """The sums with this mini-batch, and zeros where the window is closed."""
        calls: dict[int, Call] = {i: (_zero_if, (x, self.close)) for i, x in sums.items()}
        for i, g in zip(self.updated.rows, self.updated.g, strict=True):
            calls[i] = _next_sum, (sums[i], g, self.use, self.close, *self.weights)
        return dict(zip(calls, leafwise.run(list(calls.values())), strict=True))

    def next_state(self, kind: type[PyTree], total: Sums, inner: PyTree) -> PyTree:
        """The state after the call."""
        leaves = list(map(total.get, range(len(self._old))))
        return kind(
            jnp.where(self._emit, 0, self._mini_step),
            jnp.where(self._emit, 0, self._count),
            self._skipped,
            self.inputs.moments(leaves, self._old) if self.has_sum else None,
            inner,
            *([jnp.where(self._emit, 0.0, self.divisor)] if self.weights else []),
        )


def _branches(
    window: _Window,
    tx: optax.GradientTransformationExtraArgs,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, PyTree],
) -> tuple[PyTree, Sums, PyTree]:
    """Updates, sums and the state of `tx` where the window may close.

    One array for each leaf goes through two branches, in the place of the sum. If the window closes
    it becomes the mean, and then the step; else it stays as it is, and the pass that applies the
    updates adds the gradient. Then nothing is written elsewhere.
    """
    around = told().windows
    clips = around is not None and around.clips
    inputs, updated, sums, close = window.inputs, window.updated, window.sums, window.close
    fitting = [i for i, x in sums.items() if _fits(inputs.reference.leaves[i], x)]
    divided = decisions.branch(close, window.means, window.widened) if window.has_sum else {}
    # What a branch reads varies like the choice between both, which `vmap` makes elementwise.
    names = shardings.varying_axes(close)
    params, extra_args = shardings.varying_over((params, extra_args), names)
    is_unrounded = inside.states_with(state, inside.UNROUNDED)

    def gradient(mean: jax.Array, g: jax.Array) -> jax.Array:
        if is_unrounded:
            return mean
        rounded = mean.astype(g.dtype)
        return rounded if window.mean else numerics.saturated(rounded, mean)

    def stored(updates: list[Leaf], arrays: list[Leaf] | Sums) -> list[Leaf]:
        """Updates, but of arrays that fit those that are stored, in the dtypes of the sums."""
        for i in fitting:
            updates[i] = arrays[i].astype(sums[i].dtype)
        return updates

    def run() -> tuple[list[Leaf], PyTree]:
        means = divided if window.has_sum else window.means()
        gradients = list(map(gradient, map(means.__getitem__, updated.rows), updated.g))
        # A constant flag would do, but then XLA for CPUs copies moments (12 bytes and 8 more).
        commit = Commit(jnp.asarray(close), clips=True) if clips else None
        with telling(commit=commit):
            steps, new = tx.update(updated.gradients(gradients), state, params, **extra_args)
        both = (inputs.directions(trees.flatten(steps)[0]), new), (inputs.zeros(), state)
        steps, new = decisions.decided(True, *both, commit, clips=clips)
        leaves = trees.flatten(steps)[0]
        return stored(leaves, leaves), new

    def hold() -> tuple[list[Leaf], PyTree]:
        return stored(trees.flatten(inputs.zeros())[0], divided), state

    held, new = decisions.noted_branch(close, run, hold)
    in_sums = leafwise.at(held, fitting)
    moved = apply(_zero_if, in_sums, jnp.logical_not(close))
    steps = dict(enumerate(held)) | dict(zip(fitting, moved, strict=True))
    held_sums = sums | dict(zip(fitting, in_sums, strict=True))
    total = window.next_total(held_sums) if window.has_sum else {}
    return inputs.directions(list(steps.values())), total, new


def _fits(step: Leaf, total: jax.Array) -> bool:
    """Whether an array like the first can be stored in one like the second, bit for bit."""
    is_alike = checks.is_inexact(step) and jnp.iscomplexobj(step) == jnp.iscomplexobj(total)
    return bool(is_alike and jnp.finfo(step.dtype).bits <= jnp.finfo(total.dtype).bits)


def _length(every: Every, state: PyTree) -> int | jax.Array:
    """The length of the open window, from the number of updates that a state counts."""
    if not callable(every):
        return int(every)
    done = inside.updates_done(state)
    if done is None:
        reason = "no state inside counts its updates, as the states of jgrad's optimizers do"
        raise ValueError(f"{_NAME}: `every`: a function, expected an int, since {reason}.")
    x = options.result_of(_NAME, "every", options.NUMBER_OF_UPDATES, every, done)
    if isinstance(x, (jax.Array, np.ndarray)) and x.shape == () and x.dtype.kind in "iu":
        if not isinstance(x, jax.core.Tracer):
            checks.count(_NAME, "every", int(x))
        return jnp.asarray(x, jnp.int32)
    if checks.is_array(x) and not isinstance(x, np.integer):
        came = checks.describe(x)
        raise TypeError(f"{_NAME}: `every`: a function that returns {came}, expected an int.")
    checks.count(_NAME, "every", x)
    return int(x)


# ---- one leaf ----------------------------------------------------------------------------------

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
