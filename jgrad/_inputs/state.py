"""The one state type of the optimizers, and its first value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgrad._arithmetic import numerics
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree


class OptState(NamedTuple):
    """State of every optimizer here; what a method does not use is `None`.

    The field names are a file format: checkpoints hold them.

    Attributes:
      step: number of updates done, an int32 scalar; it saturates.
      mw: first moment, or momentum; a tree like the parameters.
      vw: second moment, real; a tree like the parameters.
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree


def first_state(
    function: str, params: PyTree, moment_dtype: DTypeLike | None, *, mw: bool, vw: bool
) -> OptState:
    """The state before the first update; `mw` and `vw` have buffers of their own, for donation."""
    return OptState(
        counter(params),
        zeros(function, params, moment_dtype) if mw else None,
        zeros(function, params, moment_dtype, real=True) if vw else None,
    )


def zeros(
    function: str, params: PyTree, dtype: DTypeLike | None = None, *, real: bool = False
) -> PyTree:
    """A tree of zeros like the parameters, in `dtype`, or in theirs but float32 at least."""
    leaves = checks.parameters(checks.Row.of(function, "params", params).with_arrays())
    found = [None if p is None else _zeros(p, dtype, real) for p in leaves]
    return trees.flatten(params)[1].unflatten(found)


def _zeros(p: jax.Array, dtype: DTypeLike | None, real: bool) -> jax.Array:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return empty(p)  # no moments, but a place in the tree
    own = numerics.real_dtype(p) if dtype is None else np.dtype(dtype)
    return numerics.zeros_like(
        p, numerics.complex_dtype(own) if jnp.iscomplexobj(p) and not real else own
    )


def counter(params: PyTree, value: int = 0) -> jax.Array:
    """A scalar that counts, on all devices of the mesh on which parameters lie."""
    return _everywhere(jnp.asarray(value, jnp.int32), params)


def empty(p: jax.Array) -> jax.Array:
    """What a parameter has in a tree in which it has no array of its own."""
    return _everywhere(jnp.zeros((0,), jnp.float32), p)


def _everywhere(x: jax.Array, params: PyTree) -> jax.Array:
    for p in jax.tree.leaves(params):
        sharding = None if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return x
