"""Measures what an optimizer does: norms, ratios and counters, as arrays in the state."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Container, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._inputs import layer_options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.pair import counter, pair
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes, all_names, axis_exists
from jgrad._trees import checks, leaf_names, shardings, trees
from jgrad._trees.annotations import ArrayAxes, Count, Inner, MeshAxes
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._trees.told import SUM, over_shares, told
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.hand_over import WrapperInputs

# What is measured of one call, by name.
Measured = dict[str, jax.Array]

_GRADIENTS, _UPDATES, _PARAMS, _RATIO = "grad_norm", "update_norm", "param_norm", "update_ratio"
_NONFINITE = "nonfinite"
_LARGEST = float(jnp.finfo(jnp.float32).max)


def norms_of_update(
    inputs: Inputs,
    layers: Sequence[LayerAxes],
    w: Sequence[Leaf],
    u: Sequence[Leaf],
) -> Measured:
    """What is measured for gradients, parameters and updates."""
    numbers = _norms_of(_GRADIENTS, inputs, inputs.g, layers)
    numbers |= _norms_of(_PARAMS, inputs, w, layers)
    numbers |= _norms_of(_UPDATES, inputs, u, layers)
    return numbers | _ratios(numbers)


def _norms_of(
    kind: str, inputs: Inputs, arrays: Sequence[Leaf], layers: Sequence[LayerAxes]
) -> Measured:
    """`kind`, the norm of all arrays, and `kind/<path>` of each leaf; 0 without an array.

    Of gradients also the number of layers with one that is not finite, as their norms are then.
    """
    floating = [i for i, x in enumerate(inputs.reference.leaves) if checks.is_inexact(x)]
    measured = [i for i in floating if checks.is_inexact(arrays[i])]
    batches, per_array = norms_per_array(arrays, layers, measured)
    norm = over_shares("watch", norms.OF_SHARES, norms.norm_of_norms(batches))
    numbers = {kind: numerics.saturating_float32(norm.value())}
    if kind == _GRADIENTS:
        bad = [jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in batches]
        numbers[_NONFINITE] = over_shares("watch", SUM, sum(bad, jnp.zeros((), jnp.int32)))
    names = leaf_names.names(inputs.shapes)
    for i in floating:
        spec, axes = inputs.specs[i], layers[i]
        norms_here = per_array.get(i, jnp.zeros((axes.num_layers,)))
        per_leaf = spec.per_leaf(numerics.saturating_float32(norms_here), axes)
        for j, norm in zip(spec.positions, per_leaf, strict=True):
            numbers[f"{kind}/{names[j]}"] = norm
    return numbers


def norms_per_array(
    arrays: Sequence[Leaf], layers: Sequence[LayerAxes], chosen: Sequence[int]
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """The norms of all layers of some arrays in batches; and of each a vector, by position."""
    measured = sorted(chosen, key=lambda i: layers[i].sort_key)
    axes = [layers[i] for i in measured]
    (batches,) = norms.layer_norms(axes, [(leafwise.identity, (arrays[i],)) for i in measured])
    vectors = norms.split(axes, batches, as_elements=False)
    return batches, dict(zip(measured, vectors, strict=True))


def _ratios(numbers: Measured) -> Measured:
    """|u| / |w| of each norm of updates and its parameters; 0 where the parameters are."""
    ends = [key.removeprefix(_UPDATES) for key in numbers if key.partition("/")[0] == _UPDATES]
    quotients = {
        end: numerics.safe_divide(numbers[_UPDATES + end], numbers[_PARAMS + end]) for end in ends
    }
    return {_RATIO + end: numerics.clipped(x, _LARGEST) for end, x in quotients.items()}


_NAME = "watch"
_LOG = logging.getLogger("jgrad")
_CALLS, _MEASURED = "calls", "measured"
_VALUE = re.compile(r"(?P<kind>[^/]*)/(?P<path>(?P<leaf>.*)/value)(?P<count>(#\d+)?)")


@state_of("watch", report="measured")
class WatchState(NamedTuple, Generic[Inner]):
    """State of `watch`. Field names are part of the checkpoint format.

    Attributes:
      report: a dict from names, which are explained in `watch`, to float32 arrays, or int32 for
        counters.
      inner: state of the transformation inside.

    Example:
      >>> state = jgrad.watch(jgrad.adam(1e-3)).init({"w": jnp.ones((3, 2))})
      >>> int(state.report["calls"]), float(state.report["grad_norm/w"])
      (0, 0.0)
      >>> int(state.inner.step)
      0
    """

    report: dict[str, jax.Array]
    inner: Inner

    def __jgrad_report__(self) -> dict[str, jax.Array]:
        """What `report` reads."""
        return self.report


@explained
def watch(
    tx: AnyTransformation[Inner],
    *,
    every: Count = 1,
    layer_axes: ArrayAxes = None,
    mesh_axes: MeshAxes = None,
) -> Transformation[WatchState[Inner]]:
    """Measures the gradients, updates and parameters of each step, without changing them.

        grad_norm    = |g|, as it came in: before clipping, and with the scale of the loss
        update_norm  = |u|, u the updates
        param_norm   = |w|, before they are added
        update_ratio = |u| / |w|, and 0 where w is
        nonfinite    = the number of layers whose gradient is not finite, of all leaves

    where |.| is the 2-norm, computed without overflow or underflow. There is one number for the
    whole model and one for each leaf, such as `grad_norm/embed/table`, where keys, attributes and
    indices are joined by `/`. A leaf that is a stack of layers has an array with one entry per
    layer. Norms saturate at the largest finite number, and are infinite or NaN only if an element
    is. Without a gradient, the norm is 0.

    Optimizers inside also report their `learning_rate`, if it is a single number, and clipping its
    `clip_factor`; if several share a name, the last one counts. Transformations of other libraries
    report nothing, nor does anything that these call in a branch, a loop or their own `jax.jit`, as
    `optax.MultiSteps` does. `init` finds out what is reported by tracing an update. If it can't,
    because the update needs mesh axes or arguments such as `value=` for optax's
    `reduce_on_plateau`, nothing inside reports, and this is logged once. A call that does not
    compute a number, such as one inside the window of an `accumulate`, keeps the old one.

    `calls` counts the calls of `update`, and `measured` is the call in which the numbers were
    measured. Read everything by `report(state)`.

    Put `watch` outside of everything to measure skipped steps, too. A call that doesn't close the
    window of an `accumulate` then has an `update_norm` of 0; inside `accumulate`, `watch` measures
    the means and updates of whole windows. Inside `skip_nonfinite`, skipped steps are not measured.

    With `every` above 1, measured calls compute the update a second time in a branch, so that all
    other calls cost nothing extra.

    Args:
      tx: any transformation.
      every: with n, measures the first call and calls n, 2n and so on; at least 1. With an
        `accumulate` inside, use a multiple of its window, so that you measure calls that close it.
      layer_axes: axes along which a leaf stacks layers, as for `lamb`. Packed trees use those with
        which they were packed.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, norms are
        then those of whole layers. For reports from inside `tx`, these have to be all the axes that
        `tx` needs, unless `init` also runs inside.

    Returns:
      A transformation with state `WatchState(report, inner)`, whose structure is fixed by `init`.
      `update` needs the parameters.

    Raises:
      ValueError: `every` is below 1.
      TypeError: `tx` is not a transformation, or an option has the wrong type.
      Exception: from `init`, whatever an update of `tx` raises.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.adam(1e-3))
      >>> tx = jgrad.watch(jgrad.skip_nonfinite(tx))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> numbers = jgrad.report(state)
      >>> numbers["grad_norm/w"].shape, bool(numbers["clip_factor"] < 1), int(numbers["skipped"])
      ((), True, 0)

    Source: for the ratio of updates to parameters, Karpathy, "A Recipe for Training Neural
      Networks" (2019), and for layers, the paper of LAMB, You et al. (2020), section 3.
    """
    tx = inside.transformation(_NAME, tx)
    checks.count(_NAME, "every", every)
    layer_options.check_axes(_NAME, mesh_axes, layer_axes)
    warn = functools.cache(_LOG.warning)  # once for this transformation

    def init(params: PyTree) -> WatchState:
        inner = tx.init(params)
        if not (isinstance(params, (dict, list, tuple)) or trees.flatten(params)[0]):
            stands_for_any: Any = counter(params)  # for `optax.tree.map_params`, a leaf does
            return WatchState(stands_for_any, inner)

        def dry(params: PyTree, inner: PyTree) -> Measured:
            return update_of(params, params, inner, {}, notes={}, is_dry=True)[1]

        def without_notes(params: PyTree, inner: PyTree) -> Measured:
            inputs = WrapperInputs(_NAME, params, params, {})
            layers = layer_options.layers(inputs, mesh_axes, layer_axes)
            return norms_of_update(inputs, layers, inputs.g, inputs.g)

        form = decisions.tried(_NAME, functools.partial(_form, dry, mesh_axes, params, inner), warn)
        if form is None:
            form = _form(without_notes, mesh_axes, params, inner)
        return WatchState(_report(form, params, mesh_axes), inner)

    def update_of(
        updates: PyTree, params: PyTree, state: PyTree, extra_args: dict[str, Any], **record: Any
    ) -> tuple[tuple[PyTree, PyTree], Measured]:
        """The update of the transformation inside, and its measurements."""
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        w = inputs.require_params("the norm of the parameters")
        layers = layer_options.layers(inputs, mesh_axes, layer_axes)
        steps, inner = inputs.hand_over(tx, updates, state, params, **record)
        numbers = norms_of_update(inputs, layers, w, trees.flatten(steps)[0])
        return (steps, inner), numbers | record["notes"]

    def update(
        updates: PyTree, state: WatchState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, WatchState]:
        keys = _keys(state.report, params)
        old = {name: state.report[key] for name, key in keys.items()}
        checks.state_counter(_NAME, f"state.report[{_CALLS!r}]", old.get(_CALLS))
        calls, finite = optax.safe_increment(old[_CALLS]), told().finite

        def measured() -> tuple[PyTree, Measured]:
            notes = {key: x for key, x in old.items() if not _is_own(key)}
            arguments = updates, params, state.inner, extra_args
            results, new = update_of(*arguments, notes=notes, finite=finite)  # also in a branch
            return results, _in_form(old, new | {_MEASURED: calls})

        if every == 1:
            (steps, inner), report = measured()
        else:
            is_next = (calls == 1) | (calls % every == 0)
            report = decisions.branch(is_next, lambda: measured()[1], lambda: old)
            inputs = WrapperInputs(_NAME, updates, params, extra_args)
            updated = inputs.updated()
            later = updated.gradients(_after(report[_MEASURED], updated.g))
            steps, inner = inputs.hand_over(tx, later, state.inner, params, notes=None)
        report |= {_CALLS: calls}
        return steps, WatchState({key: report[name] for name, key in keys.items()}, inner)

    return pair(init, update, _NAME, WatchState)


def report(state: PyTree) -> dict[str, jax.Array]:
    """Reads the latest measurements of `watch` and the counters of wrappers from any state.

        report(state) = {name: array}, of each state inside that has something to report

    It returns everything that `watch` measured and, even without `watch`, the counters after the
    last call: `skipped` and `loss_scale` of `skip_nonfinite`, `spikes` and `spike_restarts` of
    `skip_spikes`, and `skipped_mini_batches` of `accumulate`. If two states have a counter of the
    same name, the outer one, or the first in a chain, keeps it, and the next is called `skipped#1`.
    `report` computes nothing, so you can call it inside or outside of `jit`, and on the states of
    models under `vmap`. Use `jax.device_get` to fetch all arrays at once.

    Args:
      state: the state of a chain, a wrapper or `optax.MultiSteps` that contains one of these.

    Returns:
      A flat dict of arrays.

    Raises:
      TypeError: nothing in the state has anything to report.

    Example:
      >>> tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.watch(jgrad.adam(1e-3)))
      >>> state = tx.init({"w": jnp.ones((3, 2))})
      >>> [name for name in jgrad.report(state) if name.startswith("grad_norm")]
      ['grad_norm', 'grad_norm/w']
      >>> list(jgrad.report(jgrad.skip_nonfinite(jgrad.adam(1e-3)).init({"w": jnp.ones(2)})))
      ['skipped', 'loss_scale']
    """
    parts = inside.reports(state)
    if not parts:
        came = f"{type(state).__name__}, which has nothing to report"
        expected = "one that holds the state of `watch`, or of a wrapper that counts"
        raise TypeError(f"report: `state`: {came}, expected {expected}.")
    named: dict[str, jax.Array] = {}
    for numbers in parts:
        named |= {_unique(key, named): x for key, x in numbers.items()}
    return named


def _unique(name: str, taken: Container[str]) -> str:
    """The name, or with the first number behind it that makes it another than those taken."""
    names = (f"{name}#{i}" if i else name for i in itertools.count())
    return next(x for x in names if x not in taken)


# ---- the form of a report ----------------------------------------------------------------------


def _keys(report: dict[str, jax.Array], params: PyTree) -> dict[str, str]:
    """Which number of the report has the name that it has with these parameters.

    With a last `value` in a report that is of parameters in boxes of linen, which are unboxed since
    then, or of variables of nnx, and made by 1.0.
    """
    with_value = {key: match for key in report if (match := _VALUE.fullmatch(key))}
    if not with_value:
        return {key: key for key in report}
    names = set(leaf_names.names(trees.shapes(params)))
    now = {
        key: f"{match['kind']}/{match['leaf']}{match['count']}"
        for key, match in with_value.items()
        if match["path"] not in names and match["leaf"] in names
    }
    return {now.get(key, key): key for key in report}


def _is_own(key: str) -> bool:
    """Whether a number is of `watch` itself, and no note."""
    own = (_GRADIENTS, _UPDATES, _PARAMS, _RATIO, _NONFINITE)
    return key in (_CALLS, _MEASURED) or key.partition("/")[0] in own


def _in_form(old: dict[str, jax.Array], new: Measured) -> Measured:
    """The new numbers in the form of the old ones, which stay if there is no new one.

    That is also: varying over devices where these do.
    """
    for key, x in new.items():
        if _is_own(key) and (key not in old or jnp.shape(old[key]) != x.shape):
            came = f"of shape {jnp.shape(old[key])}" if key in old else "missing"
            raise ValueError(
                f"{_NAME}: `state.report` at [{key!r}]: {came}, expected shape {x.shape}; "
                "`init` made this state for other parameters or options."
            )
    numbers = dict(old)
    for key, x in old.items():
        if key in new and new[key].shape == jnp.shape(x):
            numbers[key] = shardings.varying_over(new[key], shardings.varying_axes(x))
    return numbers


def _after(first: jax.Array, arrays: list[Leaf]) -> list[Leaf]:
    """The arrays, which a CPU's program reads after a counter is there.

    Else it copies donated arrays that a branch reads and others replace. On other devices it does
    not, and a choice would be a pass over the arrays.
    """

    def on_cpu(first: jax.Array, arrays: list[Leaf]) -> list[Leaf]:
        return [jnp.where(first >= 0, x, jnp.zeros_like(x)) for x in arrays]

    return jax.lax.platform_dependent(first, arrays, cpu=on_cpu, default=lambda _, xs: xs)


def _report(
    form: dict[str, jax.ShapeDtypeStruct], params: PyTree, mesh_axes: PyTree
) -> dict[str, jax.Array]:
    """Counters, and zeros in the form of the numbers."""
    names = decisions.axes_of_models(_NAME, params, mesh_axes)  # rates may differ between models
    report = {key: counter(params) for key in (_CALLS, _MEASURED)}
    zero = counter(params)
    for key, x in form.items():
        number = numerics.zeros_like(jnp.broadcast_to(zero, x.shape), x.dtype)
        report[key] = shardings.varying_over(number, names + shardings.varying_axes(x))
    return report


def _form(
    f: Callable[..., Measured], mesh_axes: PyTree, *args: PyTree
) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of `f(*args)`; on one device along the mesh axes that do not exist here."""
    names = [x for x in sorted(all_names(_NAME, mesh_axes)) if not axis_exists(x)]
    for name in names:
        f = jax.vmap(f, in_axes=None, axis_name=name, axis_size=1)
    return {
        key: jax.ShapeDtypeStruct(x.shape[len(names) :], x.dtype, **shardings.varying_as([x]))
        for key, x in jax.eval_shape(f, *args).items()
    }
