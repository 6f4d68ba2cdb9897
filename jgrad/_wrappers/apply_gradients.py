"""New parameters in the place of updates: a whole step, which a TPU may take in one pass."""

from typing import Any

import optax

from jgrad._fused.step import call
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.placed import placed
from jgrad._inputs.transformation import arrays_of
from jgrad._layers.layer_axes import read_mesh_axes
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inside

_NAME = "apply_gradients"


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    mesh_axes: PyTree = None,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """New parameters and the new state.

        updates, state' = tx.update(grads, state, params)
        params'         = params + updates

    Bit for bit what `tx.update` and `optax.apply_updates` return. With moments in 8 bits, a program
    for a TPU has one kernel for each leaf, which reads the gradient, codes and weights once, and
    writes codes and weights in their place: no update is written. Without 8 bits, and on other
    platforms, XLA makes the same program of both.

    Donate `params` and `state`. The kernel is taken on one device, inside `shard_map`, on meshes
    with explicit axes, and with `mesh_axes`; `leaf_programs` says which leaves have it.

    Args:
      tx: any transformation.
      grads: gradients; a tree like the parameters.
      state: of `tx`.
      params: parameters.
      mesh_axes: under `jit` on a mesh with automatic axes, the PartitionSpec of each leaf, or a
        prefix tree of those.
      extra_args: for `tx.update`.

    Returns:
      `(params', state')`, with the dtypes of what they replace.

    Raises:
      TypeError: `tx` is not a transformation, or `mesh_axes` is of the wrong kind.
      ValueError: structures or shapes do not match.

    Example:
      >>> params = grads = {"w": jnp.ones((64, 256))}
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> step = jax.jit(lambda *args: jgrad.apply_gradients(tx, *args), donate_argnums=(1, 2))
      >>> params, state = step(grads, tx.init(params), jax.tree.map(jnp.copy, params))
      >>> int(state.step), params["w"].shape
      (1, (64, 256))
    """
    tx = inside.transformation(_NAME, tx, may_be_offloaded=True)
    read_mesh_axes(_NAME, mesh_axes)

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if mesh_axes is not None:
            inputs = Inputs(_NAME, grads, arrays_of(params, grads))
            grads = inputs.gradients(placed(inputs, mesh_axes))
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return call(step, grads, state, params, replaced=lambda new: (None, new[1], new[0]))
