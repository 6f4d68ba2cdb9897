"""Where the state of a transformation lives, for parameters that are spread over a mesh."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jgrad import checks, trees
from jgrad.transforms import wrapping
from jgrad.trees import PyTree

_NAME = "state_shardings"


def state_shardings(
    tx: optax.GradientTransformation, params: PyTree, params_shardings: PyTree = None
) -> PyTree:
    """The sharding of each array of a state: moments follow their parameters.

        sharding(mw[leaf]) = sharding(vw[leaf]) = sharding(w[leaf]);  all else is on every device

    For `jax.jit(tx.init, out_shardings=...)`, for the `out_shardings` of a train step, and for
    restoring a checkpoint.

    Args:
      tx: a transformation whose state holds trees like the parameters.
      params: arrays, or `jax.ShapeDtypeStruct`s.
      params_shardings: tree of `jax.sharding.NamedSharding`, or a prefix of one; None for those of
        `params`.

    Returns:
      A tree like the state, with a sharding for each array.

    Raises:
      TypeError: something that is not a NamedSharding, or `tx` is no transformation.
      ValueError: trees of different structure, or a sharding that does not fit its parameter.
    """
    tx = wrapping.inner(_NAME, tx)
    if params_shardings is None:
        name = "params"
        params_shardings = trees.map_leaves(lambda p: getattr(p, "sharding", None), params)
    else:
        name = "params_shardings"
        checks.same_structure(_NAME, name, params_shardings, "params", params, prefix=True)
    leaves, structure = trees.flatten(params)
    given = trees.broadcast(params_shardings, params)
    row = checks.Row.of(_NAME, name, params)
    for i, (p, x) in enumerate(zip(leaves, given, strict=True)):
        if p is not None and not isinstance(x, NamedSharding):
            row.fail(i, TypeError, f"sharding {x!r}, expected a NamedSharding")
    meshes = [x.mesh for x in given if x is not None]
    if not meshes:
        raise ValueError(f"{_NAME}: `params`: no array, expected at least one.")
    everywhere = NamedSharding(meshes[0], PartitionSpec())

    def follow(part: Any, p: Any, sharding: Sharding) -> Sharding:
        return sharding if part.shape == p.shape else everywhere

    return optax.tree_utils.tree_map_params(
        tx,
        follow,
        jax.eval_shape(tx.init, params),
        params,
        structure.unflatten(given),
        transform_non_params=lambda _: everywhere,
    )
