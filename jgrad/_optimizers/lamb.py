"""LAMB: Adam's direction, scaled layer by layer to the size of the weights."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import Call, PerLeaf, on_leaf, zip_leaves
from jgrad._inputs import functional, kinds, layer_options, numbers, options
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import Descent, kernels_of, of_one_leaf
from jgrad._inputs.moment import Moment, Step
from jgrad._inputs.pair import pair
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._layers.trust import (
    IVY_GUARD,
    TrustLayers,
    clamped_ratio,
    computed_once,
    scaled_by_trust_ratio,
)
from jgrad._optimizers import adam
from jgrad._optimizers.adam import BiasCorrection
from jgrad._trees import checks
from jgrad._trees.annotations import (
    ArrayAxes,
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Mw,
    Number,
    Scalar,
    Vw,
    Weights,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import told

LambRule = Literal["paper", "ivy"]
_RULES = ("paper", "ivy")

# ---- the trust ratio, on vectors with an entry per layer ---------------------------------------


@on_leaf(arrays=2)
def _ivy_ratio(
    w_norm: jax.Array, u_norm: jax.Array, smallest: jax.Array, largest: jax.Array
) -> tuple[jax.Array]:
    """clip(|w| / |u|, smallest, largest); 0 where the weights are."""
    return (jnp.clip(w_norm / (u_norm + IVY_GUARD), smallest, largest),)


@on_leaf(arrays=3)
def _decayed_delta(
    mw: jax.Array,
    vw: jax.Array,
    w: jax.Array,
    alpha: jax.Array,
    epsilon: jax.Array,
    decay: jax.Array,
    *,
    rule: DecayRule,
) -> jax.Array:
    """u = Adam's delta + lambda w, as one function of what it reads; m has the signs of delta"""
    delta = adam.delta(mw, vw, alpha, epsilon)
    return rules.decayed(delta, w, decay, like=mw, rule=rule)


# ---- the method, on lists of leaves ------------------------------------------------------------


class Lamb(NamedTuple):
    """The numbers of LAMB, each one for all leaves or a list with one per leaf."""

    adam: adam.Numbers
    learning_rate: PerLeaf
    weight_decay: PerLeaf
    min_trust_ratio: PerLeaf
    max_trust_ratio: PerLeaf


@of_one_leaf
def _directions_of_leaf(
    g: jax.Array, mw: Moments, vw: Moments, n: adam.Numbers, w: Any, decay: Any, *, rule: DecayRule
) -> tuple[jax.Array, ...]:
    """Adam's new moments and direction, and that with decay; a decay of None is none."""
    m = mw.write(adam.first_moment, g, mw.old, n.beta1.value, n.beta1.complement)
    v = vw.write(adam.second_moment, g, vw.old, n.beta2.value, n.beta2.complement)
    delta = adam.delta(m, v, n.alpha, n.epsilon)
    return m, v, delta, rules.decayed(delta, w, decay, like=m, rule=rule)


def _updates(
    w: list[Any],
    g: list[Any],
    mw: Moment,
    vw: Moment,
    lamb: Lamb,
    layers: TrustLayers,
    *,
    rule: LambRule,
    decay_rule: DecayRule = "decoupled",
) -> tuple[list[Any], list[Any], list[Any]]:
    """-lr ratio (delta + decay w), and the new moments; in Ivy's rule decay is in norms only."""
    independent = decay_rule == "independent"
    inside = None if independent else rules.optional(lamb.weight_decay)
    leaves, *new = _directions_of_leaf(g, mw, vw, lamb.adam, w, inside, rule=decay_rule)
    deltas: list[Call] = []
    decayed: list[Call] = []
    columns = zip_leaves(w, leaves, lamb.adam.alpha, lamb.adam.epsilon, inside)
    with_decay = leafwise.fixed(_decayed_delta, rule=decay_rule)
    for i, (x, (m, v, delta, direction), alpha, epsilon, decay) in enumerate(columns):
        if kernels_of((mw,), i):  # which writes them: elsewhere norms compute them again
            deltas.append((leafwise.identity, (delta,)))
            decayed.append((leafwise.identity, (direction,)))
            continue
        deltas.append((adam.delta, (m, v, alpha, epsilon)))
        if decay is None:
            decayed.append(deltas[-1])
        else:
            decayed.append((with_decay, (m, v, x, alpha, epsilon, decay)))
    if rule == "paper":
        deltas, decayed = computed_once(decayed, layers)
    steps = scaled_by_trust_ratio(
        w,
        deltas,
        decayed,
        ratio=_ivy_ratio if rule == "ivy" else clamped_ratio,
        numbers=(lamb.min_trust_ratio, lamb.max_trust_ratio),
        layers=layers,
        rates=(lamb.learning_rate,),
        scale=rules.scale_by if independent else rules.descent,
    )
    if independent:
        decay = rules.optional(lamb.weight_decay, "independent")
        steps = Descent(decay, None, "independent", has_rate=True).updates(steps, w)
    return steps, *new


# ---- functional update -------------------------------------------------------------------------


def _read(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `lamb_update`, with what stands for no clamp and for no decay."""
    largest, decay = arguments["max_trust_ratio"], arguments["decay_lambda"]
    checks.one_of("lamb_update", "rule", arguments["rule"], _RULES)
    layer_options.check_clamps("lamb_update", arguments["min_trust_ratio"], largest)
    decay = numbers.optional_decay(decay, negative_is_none=arguments["rule"] == "ivy")
    return arguments | {"max_trust_ratio": numbers.upper_clamp(largest), "decay_lambda": decay}


@functional.update(
    {"w": None, "mw_tm1": ("dcdw", "beta1"), "vw_tm1": ("dcdw", "beta2")},
    _read,
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    mw_tm1=Role.FIRST_MOMENT,
    vw_tm1=Role.SECOND_MOMENT,
    lr=Role.RATE,
    step=kinds.Number,
    beta1=kinds.Beta,
    beta2=kinds.Beta,
    epsilon=kinds.Number,
    min_trust_ratio=kinds.Number,
    max_trust_ratio=kinds.Number,
    decay_lambda=kinds.OptionalNumber,
)
def lamb_update(
    w: Weights,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: Mw,
    vw_tm1: Vw,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.999,
    epsilon: PyTree = 1e-7,
    max_trust_ratio: PyTree = 10,
    decay_lambda: PyTree = 0,
    min_trust_ratio: PyTree = 0.0,
    bias_correction: BiasCorrection = "step_size",
    rule: LambRule = "paper",
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[Weights, Mw, Vw]:
    """Updates weights and moments by one step of LAMB.

        (delta, mw, vw) = adam_step(dcdw, mw_tm1, vw_tm1, step)
        u     = delta + decay_lambda w
        ratio = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        w'    = w - lr ratio u

    where |.| is the 2-norm of a layer, computed without overflow or underflow. Each leaf is one
    layer unless `layer_axes` or `mesh_axes` says otherwise. `rule="ivy"` reproduces Ivy: the ratio
    is 0 where the weights are 0, and w' = w - lr ratio delta, so weight decay only affects the
    norm.

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      mw_tm1: first moment from the previous step, of a shape that broadcasts to that of `w`.
      vw_tm1: second moment from the previous step, real, of a shape that broadcasts to that of `w`.
      step: number of this update, counting from 1; may be fractional or traced.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      max_trust_ratio: upper bound of the ratio, in [0, inf); None for no bound.
      decay_lambda: weight decay, in [0, inf).
      min_trust_ratio: lower bound of the ratio, in [0, inf).
      bias_correction: see `adam_step`.
      rule: "paper" or "ivy".
      mesh_axes: see `lamb`.
      layer_axes: see `lamb`.
      stop_gradients: apply `jax.lax.stop_gradient` to `w'`, but not to the moments.
      out: None.

    Returns:
      `(w', mw, vw)`, each with the dtypes of the argument it replaces.

    Raises:
      As `adam_update`.

    Example:
      >>> w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = jax.tree.map(jnp.ones_like, w)
      >>> mw = vw = jax.tree.map(jnp.zeros_like, w)
      >>> w, mw, vw = jgrad.lamb_update(w, grads, 1e-3, mw, vw, 1, decay_lambda=0.01)
      >>> jax.tree.map(jnp.shape, w)
      {'b': (2,), 'w': (3, 2)}

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020), algorithm 2, where phi clips the ratio.
    """
    name = "lamb_update"
    adam.check_correction(name, bias_correction)
    lamb = Lamb(
        adam=adam.numbers_of(beta1, beta2, epsilon, bias_correction, step),
        learning_rate=lr,
        weight_decay=decay_lambda,
        min_trust_ratio=min_trust_ratio,
        max_trust_ratio=max_trust_ratio,
    )
    entries: PyTree = w, dcdw, mw_tm1, vw_tm1, lamb, TrustLayers(cast(PyTree, layer_axes))
    return functional.returned(*_updates(*entries, rule=rule))


# ---- transformations ---------------------------------------------------------------------------


@explained
def lamb(
    learning_rate: LearningRate,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    epsilon: Number = 1e-6,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    max_trust_ratio: Scalar | None = 10.0,
    min_trust_ratio: Scalar = 0.0,
    trust_ratio_mask: Mask | None = None,
    bias_correction: BiasCorrection = "moments",
    rule: LambRule = "paper",
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """LAMB: Adam, with each layer's learning rate scaled to the norm of its weights.

        delta = m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon), as in `adam`
        u     = delta + weight_decay w
        ratio = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        w'    = w - learning_rate ratio u

    where |.| is the 2-norm of a layer, computed without overflow or underflow. A leaf of zeros,
    such as a new bias, therefore takes one step of plain Adam before scaling sets in. Most recipes
    exclude such leaves with `trust_ratio_mask`.

    Epsilon and bias correction are as in the paper and `optax.lamb`. The latter doesn't clip the
    ratio: for that, pass `max_trust_ratio=None`. The functional `lamb_update` has Ivy's defaults
    instead: `epsilon=1e-7, bias_correction="step_size"`.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      beta1: decay rate of the first moment, in [0, 1): a number, a schedule, or a tree of these.
      beta2: decay rate of the second moment, in [0, 1): a number, a schedule, or a tree of these.
      epsilon: added to the root of the second moment, in [0, inf): a number, a schedule, or a tree
        of these.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: "decoupled" as above, where weight decay is part of u and of its norm.
        "cautious" decays only the weights that the step moves towards zero, as in `adam`: u = delta
        + weight_decay w [Re(delta conj(w)) > 0], again part of the norm. "independent": u = delta,
        and w' = w - learning_rate ratio u - weight_decay w, with a weight decay in [0, 1) that is
        not multiplied by the learning rate or the ratio.
      max_trust_ratio: upper bound of the ratio, in [0, inf); None for no bound.
      min_trust_ratio: lower bound of the ratio, in [0, inf).
      trust_ratio_mask: like `weight_decay_mask`. Leaves marked False have ratio 1, whatever the
        bounds.
      bias_correction: "moments" as above; "step_size" as in `adam_step`, which leaves epsilon
        uncorrected and, unlike the papers, also adds it to 1 - beta1^t; None for no correction.
      rule: "paper" as above, or "ivy": w' = w - learning_rate ratio delta, where weight decay only
        affects the norm, and no other `weight_decay_rule` is allowed.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, norms are
        then those of whole layers, as they always are under `jit`. If some leaves are replicated,
        see `lars`.
      layer_axes: axes along which a leaf stacks layers, as for `lax.scan`: an int, a tuple of ints,
        None, or a prefix tree of these. Each layer has its own norm and ratio.
      moment_dtype: dtype of the moments; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, vw)`. `update` needs the parameters.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((12, 3, 2)), "b": jnp.zeros((12, 2))}
      >>> tx = jgrad.lamb(1e-3, weight_decay=0.01, layer_axes=0)  # twelve layers, for lax.scan
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> updates["w"].shape, state.vw["b"].shape
      ((12, 3, 2), (12, 2))

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020), algorithm 2, where phi clips the ratio.
    """
    name, clamps = "lamb", (min_trust_ratio, max_trust_ratio)
    adam_options = adam.AdamOptions.of(beta1, beta2, epsilon, bias_correction)
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    descent.check(name)
    adam_options.check(name)
    checks.one_of(name, "rule", rule, _RULES)
    layer_options.check_axes(name, mesh_axes, layer_axes)
    options.check_masks(name, trust_ratio_mask=trust_ratio_mask)
    layer_options.check_decay_of_ivy(name, rule, weight_decay_rule, "decoupled")
    layer_options.clamps(name, *clamps)

    def compute(inputs: Inputs, step: Step) -> tuple[list[Any], list[Any], list[Any]]:
        w = inputs.require_params("the trust ratio")
        descent_now = descent.read(inputs, step)
        numbers_of_lamb = Lamb(
            adam_options.read(inputs, step),
            descent_now.rate,
            descent_now.decay,
            *layer_options.clamps(name, *clamps),
        )
        layers = layer_options.trust_layers(inputs, trust_ratio_mask, mesh_axes, layer_axes)
        moments = step.moments["mw"], step.moments["vw"]
        columns = w, inputs.g, *moments, numbers_of_lamb, layers
        return _updates(*columns, rule=rule, decay_rule=weight_decay_rule)

    return transformation(
        name,
        compute,
        has=("mw", "vw"),
        moments=MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes),
        params_for="the trust ratio",
    )


@explained
def scale_by_trust_ratio(
    *,
    max_trust_ratio: Scalar | None = 10.0,
    min_trust_ratio: Scalar = 0.0,
    trust_ratio_mask: Mask | None = None,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
) -> Transformation[optax.EmptyState]:
    """Scales the update of each layer to the norm of its weights, as LAMB does.

        ratio    = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        updates' = ratio u

    `lamb` combines `optax.chain(scale_by_adam(epsilon=1e-6), optax.add_decayed_weights(decay),
    scale_by_trust_ratio(), optax.scale(-rate))`.

    Args:
      max_trust_ratio: upper bound of the ratio, in [0, inf); None for no bound.
      min_trust_ratio: lower bound of the ratio, in [0, inf).
      trust_ratio_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. The updates of leaves marked False are left unchanged.
      mesh_axes: see `lamb`.
      layer_axes: see `lamb`.

    Returns:
      A stateless transformation. `update` needs the parameters.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(optax.scale_by_rms(), jgrad.scale_by_trust_ratio(), optax.scale(-1e-3))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> jax.tree.map(jnp.shape, updates)
      {'b': (2,), 'w': (3, 2)}

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020).
    """
    name = "scale_by_trust_ratio"
    layer_options.clamps(name, min_trust_ratio, max_trust_ratio)
    layer_options.check_axes(name, mesh_axes, layer_axes)
    options.check_masks(name, trust_ratio_mask=trust_ratio_mask)

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        inputs = Inputs(name, updates, params, told()).updated()
        w = inputs.require_params("the trust ratio")
        directions = [(leafwise.identity, (g,)) for g in inputs.g]
        scaled_directions = scaled_by_trust_ratio(
            w,
            directions,
            directions,
            ratio=functools.partial(clamped_ratio, in_roots=True),
            numbers=layer_options.clamps(name, min_trust_ratio, max_trust_ratio),
            layers=layer_options.trust_layers(inputs, trust_ratio_mask, mesh_axes, layer_axes),
            scale_free=True,
        )
        return inputs.directions(scaled_directions), state

    return pair(init, update, name)
