"""LAMB's trust ratio by itself, for `optax.chain`."""

from typing import Any

import optax

from jgrad._inputs import methods, options
from jgrad._inputs.options import Mask, Scalar
from jgrad._inputs.update import Leaves
from jgrad._trees.trees import PyTree

_NAME = "scale_by_trust_ratio"


def scale_by_trust_ratio(
    *,
    max_trust_ratio: Scalar | None = 10.0,
    min_trust_ratio: Scalar = 0.0,
    trust_ratio_mask: Mask = None,
    norm_axes: PyTree = None,
    layer_axes: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales updates layer by layer to the size of the weights.

        ratio    = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        updates' = ratio u

    `lamb` is `optax.chain(scale_by_adam(), optax.add_decayed_weights(decay),
    scale_by_trust_ratio(), optax.scale(-rate))`, in one piece.

    Args:
      max_trust_ratio: upper clamp of the ratio, in [0, inf); None for none.
      min_trust_ratio: lower clamp of the ratio, in [0, inf).
      trust_ratio_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False pass as they are.
      norm_axes: see `lamb`.
      layer_axes: see `lamb`.

    Returns:
      A transformation without state. Its update needs the parameters.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020).
    """
    options.clamps(_NAME, min_trust_ratio, max_trust_ratio)
    options.check_axes(_NAME, norm_axes, layer_axes)

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        leaves = Leaves(_NAME, updates, params)
        leaves.require_params("the trust ratio")
        clamps = options.clamps(_NAME, min_trust_ratio, max_trust_ratio)
        layers = options.layers(leaves, trust_ratio_mask, norm_axes, layer_axes)
        return leaves.directions(
            methods.trust_ratio_steps(leaves.w, leaves.g, *clamps, layers)
        ), state

    return optax.GradientTransformationExtraArgs(init, update)
