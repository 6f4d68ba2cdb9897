"""Scaling by the trust ratio of LAMB alone."""

import functools
from typing import Any

import optax

from jgrad._arithmetic import leafwise
from jgrad._inputs import options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import Mask
from jgrad._inputs.transformation import pair
from jgrad._layers.trust import clamped_ratio, scaled_by_trust_ratio
from jgrad._trees.made_by import Transformation
from jgrad._trees.other_names import explained
from jgrad._trees.told import told
from jgrad._trees.trees import PyTree


@explained
def scale_by_trust_ratio(
    *,
    max_trust_ratio: Scalar | None = 10.0,
    min_trust_ratio: Scalar = 0.0,
    trust_ratio_mask: Mask = None,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
) -> Transformation:
    """Scales the update of each layer to the norm of its weights, as LAMB does.

        ratio    = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        updates' = ratio u

    `lamb` is `optax.chain(scale_by_adam(epsilon=1e-6), optax.add_decayed_weights(decay),
    scale_by_trust_ratio(), optax.scale(-rate))`, in one piece.

    Args:
      max_trust_ratio: upper clamp of the ratio, in [0, inf); None for none.
      min_trust_ratio: lower clamp of the ratio, in [0, inf).
      trust_ratio_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False pass unchanged.
      mesh_axes: see `lamb`.
      layer_axes: see `lamb`.

    Returns:
      A transformation without state. Its update needs the parameters.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

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
    options.clamps(name, min_trust_ratio, max_trust_ratio)
    options.check_axes(name, mesh_axes, layer_axes)
    options.check_masks(name, trust_ratio_mask=trust_ratio_mask)

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        inputs = Inputs(name, updates, params, told()._replace(commit=None))
        w = inputs.require_params("the trust ratio")
        directions = [None if g is None else (leafwise.identity, (g,)) for g in inputs.g]
        scaled_directions = scaled_by_trust_ratio(
            w,
            directions,
            directions,
            ratio=functools.partial(clamped_ratio, in_roots=True),
            numbers=options.clamps(name, min_trust_ratio, max_trust_ratio),
            layers=options.trust_layers(inputs, trust_ratio_mask, mesh_axes, layer_axes),
            scale_free=True,
        )
        return inputs.directions(scaled_directions), state

    return pair(init, update, name)
