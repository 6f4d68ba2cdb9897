"""LAMB: Adam's direction, scaled layer by layer to the size of the weights."""

from typing import Any

import optax
from jax.typing import DTypeLike

from jgrad._arithmetic.rules import BiasCorrection
from jgrad._inputs import methods, options
from jgrad._inputs.methods import LAMB_RULES, LambRule
from jgrad._inputs.options import LearningRate, Mask, Scalar
from jgrad._inputs.state import OptState, first_state
from jgrad._inputs.update import Leaves
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def lamb(
    learning_rate: LearningRate,
    *,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-7,
    weight_decay: PyTree = 0.0,
    weight_decay_mask: Mask = None,
    max_trust_ratio: Scalar | None = 10.0,
    min_trust_ratio: Scalar = 0.0,
    trust_ratio_mask: Mask = None,
    bias_correction: BiasCorrection = "step_size",
    rule: LambRule = "paper",
    norm_axes: PyTree = None,
    layer_axes: PyTree = None,
    moment_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB.

        delta = Adam's direction
        u     = delta + weight_decay w
        ratio = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        w'    = w - learning_rate ratio u

    with |.| the 2-norm of a layer, computed without overflow or underflow. A leaf of zeros (a bias
    at its start) therefore takes one step of plain Adam, and is scaled from then on; exclude such
    leaves with `trust_ratio_mask`, as most recipes do.

    Args:
      learning_rate: a number in [0, inf), an array, a prefix tree of them, or a function of the
        number of updates done (0 at the first). `update(..., learning_rate=x)` overrides it for one
        call.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      weight_decay: in [0, inf); a number or a prefix tree.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay.
      max_trust_ratio: upper clamp of the ratio, in [0, inf); None for none.
      min_trust_ratio: lower clamp of the ratio, in [0, inf).
      trust_ratio_mask: as `weight_decay_mask`; leaves with False have the ratio 1, clamps not
        applied.
      bias_correction: see `adam_step`.
      rule: "paper" as above, or "ivy": w' = w - learning_rate ratio delta, decay in the norm alone.
      norm_axes: names of the mesh axes over which leaves are cut, inside `shard_map` or `pmap`: a
        name, a tuple of names, a PartitionSpec, or None, for all leaves, or a prefix tree of those.
        Under `jit` a sharded leaf is whole, and needs none.
      layer_axes: axes of a leaf over which layers are stacked, as for `lax.scan`: an int, a tuple
        of ints, or None, or a prefix tree of those. Each index has a norm and a ratio of its own.
      moment_dtype: dtype of the moments; the parameter's, or float32 where that is narrower.

    Returns:
      A transformation with state `OptState(step, mw, vw)`. Its update needs the parameters.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020), algorithm 2, with phi the clamp of the ratio.
    """
    options.check_rates("lamb", learning_rate, weight_decay)
    options.check_adam("lamb", beta1, beta2, epsilon, bias_correction, moment_dtype)
    values.one_of("lamb", "rule", rule, LAMB_RULES)
    options.check_axes("lamb", norm_axes, layer_axes)
    options.clamps("lamb", min_trust_ratio, max_trust_ratio)
    default_rate = learning_rate

    def init(params: PyTree) -> OptState:
        return first_state("lamb", params, moment_dtype, mw=True, vw=True)

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        learning_rate: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OptState]:
        leaves = Leaves("lamb", updates, params)
        leaves.require_params("the trust ratio")
        step, mw, vw = leaves.read(state, mw=True, vw=True)
        numbers = options.adam("lamb", step, beta1, beta2, epsilon)
        new_mw, new_vw = methods.adam_moments(leaves.g, mw, vw, numbers)
        steps = methods.lamb_steps(
            leaves.w,
            new_mw,
            new_vw,
            numbers,
            options.rates(leaves, default_rate, learning_rate, state.step),
            options.decays(leaves, weight_decay, weight_decay_mask),
            *options.clamps("lamb", min_trust_ratio, max_trust_ratio),
            options.layers(leaves, trust_ratio_mask, norm_axes, layer_axes),
            bias_correction=bias_correction,
            rule=rule,
        )
        return leaves.updates(steps), OptState(
            step, leaves.moments(new_mw, mw), leaves.moments(new_vw, vw)
        )

    return optax.GradientTransformationExtraArgs(init, update)
