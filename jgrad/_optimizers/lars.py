"""LARS: the gradient, scaled layer by layer to the size of the weights, with momentum."""

from typing import Any

import optax
from jax.typing import DTypeLike

from jgrad._inputs import methods, options
from jgrad._inputs.methods import LARS_RULES, LarsRule
from jgrad._inputs.options import LearningRate, Mask, Scalar
from jgrad._inputs.state import OptState, first_state
from jgrad._inputs.update import Leaves
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def lars(
    learning_rate: LearningRate,
    *,
    trust_coefficient: Scalar = 0.001,
    momentum: Scalar | None = 0.9,
    nesterov: bool = False,
    weight_decay: PyTree = 0.0,
    weight_decay_mask: Mask = None,
    trust_ratio_mask: Mask = None,
    epsilon: Scalar = 0.0,
    rate_in_momentum: bool = True,
    rule: LarsRule = "paper",
    norm_axes: PyTree = None,
    layer_axes: PyTree = None,
    moment_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LARS.

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon), and 1 where a norm is 0
        d     = learning_rate ratio (g + weight_decay w)
        m'    = momentum m + d
        w'    = w - m'                              (with nesterov: w - (momentum m' + d))

    with |.| the 2-norm of a layer, computed without overflow or underflow. With
    `rate_in_momentum=False` the learning rate is applied to m' and not to d, which differs as soon
    as the rate changes.

    Args:
      learning_rate: a number in [0, inf), an array, a prefix tree of them, or a function of the
        number of updates done (0 at the first). `update(..., learning_rate=x)` overrides it for one
        call.
      trust_coefficient: eta of the paper, in [0, inf).
      momentum: decay of the buffer, in [0, inf); None for no buffer at all.
      nesterov: look ahead.
      weight_decay: in [0, inf); a number or a prefix tree.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay.
      trust_ratio_mask: likewise; leaves with False (biases and normalisation, in most recipes) have
        ratio 1.
      epsilon: added to the denominator, in [0, inf).
      rate_in_momentum: as above.
      rule: "paper" as above; "decayed_gradient", with |g + weight_decay w| + epsilon below the
        line, as in optax; or "ivy": ratio = trust_coefficient |w| / |g|, divided by weight_decay
        |w| where that is positive, and d = learning_rate ratio g.
      norm_axes: names of the mesh axes over which leaves are cut, inside `shard_map` or `pmap`: a
        name, a tuple of names, a PartitionSpec, or None, for all leaves, or a prefix tree of those.
        Under `jit` a sharded leaf is whole, and needs none.
      layer_axes: axes of a leaf over which layers are stacked, as for `lax.scan`: an int, a tuple
        of ints, or None, or a prefix tree of those. Each index has a norm and a ratio of its own.
      moment_dtype: dtype of the buffer; the parameter's, or float32 where that is narrower.

    Returns:
      A transformation with state `OptState(step, mw, None)`; `mw` is None without momentum. Its
      update needs the parameters.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
      algorithm 1, which has the rate inside the momentum, as MLPerf's reference does.
    """
    options.check_rates("lars", learning_rate, weight_decay)
    options.check_moment_dtype("lars", moment_dtype)
    options.check_momentum("lars", momentum, nesterov=nesterov)
    values.one_of("lars", "rule", rule, LARS_RULES)
    options.check_axes("lars", norm_axes, layer_axes)
    values.no_epsilon("lars", epsilon, rule)
    options.scalar("lars", "trust_coefficient", trust_coefficient)
    options.scalar("lars", "epsilon", epsilon)
    default_rate = learning_rate

    def init(params: PyTree) -> OptState:
        return first_state("lars", params, moment_dtype, mw=momentum is not None, vw=False)

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        learning_rate: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OptState]:
        leaves = Leaves("lars", updates, params)
        leaves.require_params("the trust ratio")
        step, mw, _ = leaves.read(state, mw=momentum is not None, vw=False)
        rates = options.rates(leaves, default_rate, learning_rate, state.step)
        inside = rate_in_momentum or momentum is None
        steps = methods.lars_steps(
            leaves.w,
            leaves.g,
            (rates,) if inside else (),
            options.scalar("lars", "trust_coefficient", trust_coefficient),
            options.decays(leaves, weight_decay, weight_decay_mask),
            options.scalar("lars", "epsilon", epsilon),
            options.layers(leaves, trust_ratio_mask, norm_axes, layer_axes),
            rule=rule,
        )
        if momentum is None:
            return leaves.updates(steps), OptState(step, None, None)
        steps, new_mw = methods.momentum(
            steps, mw, options.scalar("lars", "momentum", momentum), nesterov=nesterov
        )
        return leaves.updates(steps if inside else methods.steps(steps, rates)), OptState(
            step, leaves.moments(new_mw, mw), None
        )

    return optax.GradientTransformationExtraArgs(init, update)
