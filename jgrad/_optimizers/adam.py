"""Adam, and AdamW: its weight decay is decoupled."""

from typing import Any

import optax
from jax.typing import DTypeLike

from jgrad._arithmetic.rules import BiasCorrection
from jgrad._inputs import methods, options
from jgrad._inputs.options import LearningRate, Mask, Scalar
from jgrad._inputs.state import OptState, first_state
from jgrad._inputs.update import Leaves
from jgrad._trees.trees import PyTree


def adam(
    learning_rate: LearningRate,
    *,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-7,
    weight_decay: PyTree = 0.0,
    weight_decay_mask: Mask = None,
    bias_correction: BiasCorrection = "step_size",
    moment_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam; with weight decay, AdamW.

        m'    = beta1 m + (1 - beta1) g
        v'    = beta2 v + (1 - beta2) |g|^2
        alpha = sqrt(1 - beta2^t) / (1 - beta1^t + epsilon)
        delta = alpha m' / (sqrt(v') + epsilon)
        w'    = w - learning_rate (delta + weight_decay w)

    Args:
      learning_rate: a number in [0, inf), an array, a prefix tree of them, or a function of the
        number of updates done (0 at the first). `update(..., learning_rate=x)` overrides it for one
        call.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      weight_decay: in [0, inf); a number or a prefix tree. Decoupled from the moments.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay.
      bias_correction: "step_size" as above; "moments" as in PyTorch and optax, the one for recipes
        with a large epsilon; None for alpha = 1. See `adam_step`.
      moment_dtype: dtype of the moments; the parameter's, or float32 where that is narrower.

    Returns:
      A transformation with state `OptState(step, mw, vw)`.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2;
      Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
    """
    options.check_rates("adam", learning_rate, weight_decay)
    options.check_adam("adam", beta1, beta2, epsilon, bias_correction, moment_dtype)
    default_rate = learning_rate

    def init(params: PyTree) -> OptState:
        return first_state("adam", params, moment_dtype, mw=True, vw=True)

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        learning_rate: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OptState]:
        leaves = Leaves("adam", updates, params)
        step, mw, vw = leaves.read(state, mw=True, vw=True)
        numbers = options.adam("adam", step, beta1, beta2, epsilon)
        new_mw, new_vw = methods.adam_moments(leaves.g, mw, vw, numbers)
        delta = methods.adam_delta(new_mw, new_vw, numbers, bias_correction)
        direction = options.with_decay(leaves, delta, weight_decay, weight_decay_mask)
        steps = methods.steps(
            direction, options.rates(leaves, default_rate, learning_rate, state.step)
        )
        return leaves.updates(steps), OptState(
            step, leaves.moments(new_mw, mw), leaves.moments(new_vw, vw)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_adam(
    *,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-7,
    bias_correction: BiasCorrection = "step_size",
    moment_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, for `optax.chain`: `adam` without learning rate, sign and decay.

        updates = delta

    Args:
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      bias_correction: see `adam_step`.
      moment_dtype: dtype of the moments; the parameter's, or float32 where that is narrower.

    Returns:
      A transformation with state `OptState(step, mw, vw)`.

    Raises:
      As `adam`.

    Source: as `adam`.
    """
    name = "scale_by_adam"
    options.check_adam(name, beta1, beta2, epsilon, bias_correction, moment_dtype)

    def init(params: PyTree) -> OptState:
        return first_state(name, params, moment_dtype, mw=True, vw=True)

    def update(
        updates: PyTree, state: OptState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, OptState]:
        leaves = Leaves(name, updates, params)
        step, mw, vw = leaves.read(state, mw=True, vw=True)
        numbers = options.adam(name, step, beta1, beta2, epsilon)
        new_mw, new_vw = methods.adam_moments(leaves.g, mw, vw, numbers)
        delta = methods.adam_delta(new_mw, new_vw, numbers, bias_correction)
        return leaves.directions(delta), OptState(
            step, leaves.moments(new_mw, mw), leaves.moments(new_vw, vw)
        )

    return optax.GradientTransformationExtraArgs(init, update)
