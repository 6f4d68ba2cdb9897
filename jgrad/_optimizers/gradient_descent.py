"""Gradient descent, with heavy-ball or Nesterov momentum."""

from typing import Any

import optax
from jax.typing import DTypeLike

from jgrad._inputs import methods, options
from jgrad._inputs.options import LearningRate, Mask, Scalar
from jgrad._inputs.state import OptState, first_state
from jgrad._inputs.update import Leaves
from jgrad._trees.trees import PyTree

_NAME = "gradient_descent"


def gradient_descent(
    learning_rate: LearningRate,
    *,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    weight_decay: PyTree = 0.0,
    weight_decay_mask: Mask = None,
    moment_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gradient descent.

        d   = g + weight_decay w
        m'  = momentum m + d                        with momentum
        d'  = momentum m' + d  if nesterov, else m'
        w'  = w - learning_rate d'

    Weight decay is part of the gradient, as in PyTorch's SGD.

    Args:
      learning_rate: a number in [0, inf), an array, a prefix tree of them, or a function of the
        number of updates done (0 at the first). `update(..., learning_rate=x)` overrides it for one
        call.
      momentum: decay of the buffer, in [0, inf); None for no buffer at all.
      nesterov: look ahead.
      weight_decay: in [0, inf); a number or a prefix tree.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay.
      moment_dtype: dtype of the buffer; the parameter's, or float32 where that is narrower.

    Returns:
      A transformation with state `OptState(step, mw, None)`; `mw` is None without momentum.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum
      in deep learning" (2013), section 2.
    """
    options.check_rates(_NAME, learning_rate, weight_decay)
    options.check_moment_dtype(_NAME, moment_dtype)
    options.check_momentum(_NAME, momentum, nesterov=nesterov)
    default_rate = learning_rate

    def init(params: PyTree) -> OptState:
        return first_state(_NAME, params, moment_dtype, mw=momentum is not None, vw=False)

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        learning_rate: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OptState]:
        leaves = Leaves(_NAME, updates, params)
        step, mw, _ = leaves.read(state, mw=momentum is not None, vw=False)
        rates = options.rates(leaves, default_rate, learning_rate, state.step)
        direction = options.with_decay(leaves, leaves.g, weight_decay, weight_decay_mask)
        if momentum is None:
            return leaves.updates(methods.steps(direction, rates)), OptState(step, None, None)
        direction, new_mw = methods.momentum(
            direction, mw, options.scalar(_NAME, "momentum", momentum), nesterov=nesterov
        )
        return leaves.updates(methods.steps(direction, rates)), OptState(
            step, leaves.moments(new_mw, mw), None
        )

    return optax.GradientTransformationExtraArgs(init, update)
