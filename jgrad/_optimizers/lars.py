"""LARS: the gradient, scaled layer by layer to the size of the weights, with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import Function, PerLeaf, on_leaf, zip_leaves
from jgrad._inputs import functional, kinds, layer_options, numbers, options
from jgrad._inputs.around import run_and_say
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import Descent, of_one_leaf
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._layers.trust import (
    IVY_GUARD,
    TrustLayers,
    one_where_zero,
    root_of_quotient,
    scaled_by_trust_ratio,
)
from jgrad._trees import checks
from jgrad._trees.annotations import (
    ArrayAxes,
    CoupledDecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Number,
    Scalar,
    Weights,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree

LarsRule = Literal["paper", "decayed_gradient", "ivy"]

# ---- the trust ratio, on vectors with an entry per layer ---------------------------------------


@on_leaf(arrays=2)
def _ratio(
    w_norm: jax.Array, g_norm: jax.Array, eta: jax.Array, decay: jax.Array, epsilon: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """eta |w| / (|g| + lambda |w| + epsilon); 1 where a norm is zero.

    As its root, and eta times its root: the ratio itself may overflow or vanish where its product
    with g is an ordinary number.
    """
    dividend = one_where_zero(w_norm, g_norm, w_norm)
    divisor = one_where_zero(w_norm, g_norm, g_norm + decay * w_norm + epsilon)
    eta = one_where_zero(w_norm, g_norm, jnp.broadcast_to(eta, w_norm.shape))
    root = root_of_quotient(dividend, divisor, jnp.ones_like(eta))
    return root, root_of_quotient(dividend, divisor, eta)


@on_leaf(arrays=2)
def _ivy_ratio(
    w_norm: jax.Array, g_norm: jax.Array, eta: jax.Array, decay: jax.Array
) -> tuple[jax.Array]:
    """eta |w| / |g|, divided by lambda |w| where lambda > 0; 0 where the weights are."""
    ratio = eta * w_norm / (g_norm + IVY_GUARD)
    return (jnp.where(decay > 0, numerics.safe_divide(ratio, decay * w_norm), ratio),)


# ---- the method, on lists of leaves ------------------------------------------------------------


class Lars(NamedTuple):
    """The numbers of LARS, each one for all leaves or a list with one per leaf."""

    trust_coefficient: PerLeaf
    weight_decay: PerLeaf
    epsilon: PerLeaf


def _scaled(
    w: list[Any],
    g: list[Any],
    lars: Lars,
    layers: TrustLayers,
    *,
    rule: LarsRule,
    rates: Sequence[PerLeaf],
    scale: Function,
) -> list[Any]:
    """ratio (g + decay w), and the rates; in Ivy's rule decay acts in the ratio alone."""
    gradients = [(leafwise.identity, (x,)) for x in g]
    if rule == "ivy":
        return scaled_by_trust_ratio(
            w,
            gradients,
            gradients,
            ratio=_ivy_ratio,
            numbers=(lars.trust_coefficient, lars.weight_decay),
            layers=layers,
            rates=rates,
            scale=scale,
            run=run_and_say,
        )
    columns = zip_leaves(gradients, rules.optional(lars.weight_decay), w)
    directions = [
        call if decay is None else (rules.add_scaled, (*call[1], x, decay))
        for call, decay, x in columns
    ]
    decayed = rule == "decayed_gradient"
    return scaled_by_trust_ratio(
        w,
        directions,
        directions if decayed else gradients,
        ratio=_ratio,
        numbers=(lars.trust_coefficient, 0.0 if decayed else lars.weight_decay, lars.epsilon),
        layers=layers,
        rates=rates,
        scale=scale,
        scale_free=True,
        run=run_and_say,
    )


@of_one_leaf
def _momentum_of_leaf(d: jax.Array, mw: Moments | None, beta: Any, *, nesterov: bool) -> jax.Array:
    """The direction of one leaf, with momentum if it has some."""
    if mw is None:
        return d
    new = mw.write(rules.add_scaled, d, mw.old, beta)
    return rules.add_scaled(d, new, beta) if nesterov else new


def _check_rule(name: str, rule: LarsRule, epsilon: Any) -> None:
    checks.one_of(name, "rule", rule, ("paper", "decayed_gradient", "ivy"))
    if rule == "ivy" and checks.is_number(epsilon) and epsilon != 0:
        raise ValueError(f"{name}: `epsilon`: {epsilon}, expected 0 with `rule='ivy'`.")


# ---- functional update -------------------------------------------------------------------------


def _read(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `lars_update`, with what stands for no decay."""
    decay, rule = arguments["decay_lambda"], arguments["rule"]
    _check_rule("lars_update", rule, arguments["epsilon"])
    return arguments | {
        "decay_lambda": numbers.optional_decay(decay, negative_is_none=rule == "ivy")
    }


@functional.update(
    {"w": None},
    _read,
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    lr=Role.RATE,
    trust_coefficient=kinds.Number,
    epsilon=kinds.Number,
    decay_lambda=kinds.OptionalNumber,
)
def lars_update(
    w: Weights,
    dcdw: PyTree,
    lr: PyTree,
    /,
    *,
    decay_lambda: PyTree = 0,
    trust_coefficient: PyTree = 1.0,
    epsilon: PyTree = 0.0,
    rule: LarsRule = "paper",
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    stop_gradients: bool = True,
    out: None = None,
) -> Weights:
    """Updates weights by one step of LARS without momentum.

        ratio = trust_coefficient |w| / (|dcdw| + decay_lambda |w| + epsilon), and 1 where a norm is
                0
        w'    = w - lr ratio (dcdw + decay_lambda w)

    where |.| is the 2-norm of a layer, computed without overflow or underflow. Each leaf is one
    layer unless `layer_axes` or `mesh_axes` says otherwise. `rule="decayed_gradient"` divides by
    `|dcdw + decay_lambda w| + epsilon`, as optax does. `rule="ivy"` reproduces Ivy:
    `ratio = trust_coefficient |w| / |dcdw|`, divided by `decay_lambda |w|` where that is positive,
    and `w' = w - lr ratio dcdw`.

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      decay_lambda: weight decay, in [0, inf).
      trust_coefficient: the paper's eta, in [0, inf). The default is 1 here, but 0.001 in `lars`.
      epsilon: added to the denominator, in [0, inf).
      rule: "paper", "decayed_gradient" or "ivy".
      mesh_axes: see `lars`.
      layer_axes: see `lars`.
      stop_gradients: apply `jax.lax.stop_gradient` to the result.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      As `optimizer_update`.

    Example:
      >>> w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = jax.tree.map(jnp.ones_like, w)
      >>> new = jgrad.lars_update(w, grads, 0.1, trust_coefficient=0.001, decay_lambda=1e-4)
      >>> jax.tree.map(jnp.shape, new)
      {'b': (2,), 'w': (3, 2)}

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
      algorithm 1.
    """
    lars = Lars(trust_coefficient, decay_lambda, epsilon)
    entries: PyTree = w, dcdw, lars, TrustLayers(cast(PyTree, layer_axes))
    return functional.returned(_scaled(*entries, rule=rule, rates=(lr,), scale=rules.descent))


# ---- transformation ----------------------------------------------------------------------------


@explained
def lars(
    learning_rate: LearningRate,
    *,
    trust_coefficient: Scalar = 0.001,
    momentum: Number | None = 0.9,
    nesterov: bool = False,
    epsilon: Number = 0.0,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: CoupledDecayRule = "coupled",
    trust_ratio_mask: Mask | None = None,
    rate_in_momentum: bool = True,
    rule: LarsRule = "paper",
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """LARS: momentum, with each layer's learning rate scaled to the norm of its weights.

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon), and 1 where a norm is 0
        d     = learning_rate ratio (g + weight_decay w)
        m'    = momentum m + d
        w'    = w - m'                              (with nesterov: w - (momentum m' + d))

    where |.| is the 2-norm of a layer, computed without overflow or underflow. With
    `rate_in_momentum=False`, the learning rate multiplies m' instead of d, which makes a difference
    once the learning rate changes.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      trust_coefficient: the paper's eta, in [0, inf).
      momentum: decay rate of the momentum buffer, in [0, 1): a number, a schedule, or a tree of
        these. With None there is no buffer.
      nesterov: whether to look ahead, as Nesterov's momentum does.
      epsilon: added to the denominator, in [0, inf): a number, a schedule, or a tree of these.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: "coupled" as above. The other rules compute ratio and d without weight
        decay and apply it in the last line, outside the momentum. "decoupled": w' = w - m' -
        learning_rate weight_decay w. "cautious" decays only the weights that the step moves towards
        zero, as in `adam`: w' = w - m' - learning_rate weight_decay w [Re(m' conj(w)) > 0].
        "independent": w' = w - m' - weight_decay w, with a weight decay in [0, 1) that acts even
        when the learning rate is 0.
      trust_ratio_mask: like `weight_decay_mask`. Leaves marked False (in most recipes biases and
        normalization) have ratio 1.
      rate_in_momentum: see above.
      rule: "paper" as above; "decayed_gradient", with the denominator |g + weight_decay w| +
        epsilon, as in optax; or "ivy": ratio = trust_coefficient |w| / |g|, divided by weight_decay
        |w| where that is positive, and d = learning_rate ratio g. "ivy" allows no other
        `weight_decay_rule`.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, norms are
        then those of whole layers, as they always are under `jit`. If some leaves are replicated,
        pass a tree: an axis named for a replicated leaf would count it once per device. Only under
        `check_vma=True` can one entry serve all leaves, because the axes along which a leaf does
        not vary are then left out.
      layer_axes: axes along which a leaf stacks layers, as for `lax.scan`: an int, a tuple of ints,
        None, or a prefix tree of these. Each layer has its own norm and ratio.
      moment_dtype: dtype of the buffer; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, None)`; `mw` is None without momentum.
      `update` needs the parameters.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> mask = jgrad.by_path({"w": True}, rest=False)
      >>> tx = jgrad.lars(1.0, weight_decay=1e-4, weight_decay_mask=mask, trust_ratio_mask=mask)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> state.mw["w"].shape, state.vw
      ((3, 2), None)

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
      algorithm 1, which, like MLPerf's reference, has the learning rate inside the momentum.
    """
    name, added = "lars", kinds.Number("epsilon", epsilon)
    buffer = kinds.Beta("momentum", momentum, is_optional=True)
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    descent.check(name, kinds.COUPLED_DECAY_RULES)
    added.check(name)
    checks.boolean(name, "nesterov", nesterov)
    buffer.check(name)
    checks.boolean(name, "rate_in_momentum", rate_in_momentum)
    layer_options.check_axes(name, mesh_axes, layer_axes)
    numbers.scalar(name, "trust_coefficient", trust_coefficient)
    options.check_masks(name, trust_ratio_mask=trust_ratio_mask)
    _check_rule(name, rule, epsilon)
    layer_options.check_decay_of_ivy(name, rule, weight_decay_rule, "coupled")
    coupled = weight_decay_rule == "coupled"

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        w = inputs.require_params("the trust ratio")
        rate = descent.learning_rate.read(inputs, step)
        decay = descent.weight_decay.read(inputs, step)
        in_gradient, outside = (decay, 0.0) if coupled else (0.0, decay)
        beta = kinds.momentum_of(buffer, inputs, step)
        eta = numbers.scalar(name, "trust_coefficient", trust_coefficient)
        has_rate = coupled if momentum is None else rate_in_momentum
        direction = _scaled(
            w,
            inputs.g,
            Lars(eta, in_gradient, added.read(inputs, step)),
            layer_options.trust_layers(inputs, trust_ratio_mask, mesh_axes, layer_axes),
            rule=rule,
            rates=(rate,) if has_rate else (),
            scale=rules.descent if coupled and momentum is None else rules.scale_by,
        )
        if momentum is None and coupled:
            return (direction,)
        left = rules.optional(outside, "" if has_rate else weight_decay_rule)
        return _momentum_of_leaf.update(
            inputs,
            *(direction, step.moments.get("mw"), beta and beta.value),
            descent=Descent(left, rate, weight_decay_rule, has_rate),
            nesterov=nesterov,
        )

    return transformation(
        name,
        compute,
        has=() if momentum is None else ("mw",),
        moments=MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes),
        params_for="the trust ratio",
    )
