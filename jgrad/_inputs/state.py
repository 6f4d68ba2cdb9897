"""The state type of all optimizers, and the state before the first update."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgrad._arithmetic import numerics
from jgrad._quantized import codec, encoding
from jgrad._trees import checks, trees
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import state_of
from jgrad._trees.shardings import replicated
from jgrad._trees.trees import PyTree


@state_of("moments", step="step", mw="moment", vw="moment")
class OptState(NamedTuple):
    """State of every optimizer; what a method does not use is `None`.

    The field names are a file format: checkpoints hold them. `count`, `mu` and `nu`, optax's names,
    read the same arrays; `optax.tree.get` finds fields only, so give it `"step"`.

    Attributes:
      step: number of updates done, an int32 scalar; it saturates.
      mw: first moment, or momentum; a tree like the parameters, with `Blocks` for arrays in 8 bits.
      vw: second moment, real; likewise.

    Example:
      >>> state = jgrad.adam(1e-3).init({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> state.step.dtype.name, state.mw["w"].shape, state.vw["b"].dtype.name
      ('int32', (3, 2), 'float32')
      >>> state.mu is state.mw, optax.tree.get(state, "step") is state.step
      (True, True)
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree

    @property
    def count(self) -> jax.Array:  # type: ignore[override]  # hides `tuple.count`
        """The step, by optax's name."""
        return self.step

    @property
    def mu(self) -> PyTree:
        """The first moment, by optax's name."""
        return self.mw

    @property
    def nu(self) -> PyTree:
        """The second moment, by optax's name."""
        return self.vw


def zeros(
    function: str,
    params: PyTree,
    dtype: DTypeLike | None = None,
    *,
    shapes: PyTree = None,
    stacked: Sequence[tuple[int, ...] | None] | None = None,
    real: bool = False,
) -> PyTree:
    """A tree of zeros like the parameters, in `dtype`, or in theirs but float32 at least.

    None for integers, which have no moments: orbax refuses to save empty arrays. Computed from the
    parameters, so that they are sharded as those are.

    Args:
      function: whose errors they are.
      params: the parameters.
      dtype: see above.
      shapes: those of the zeros where they differ from the parameters'; None in it for none.
      stacked: for each array the axes of its layers if it is in 8 bits, else None.
      real: whether zeros are real where parameters are complex.
    """
    leaves = checks.parameters(ArgLeaves.from_tree(function, "params", params).with_arrays())
    like, structure = trees.flatten(params if shapes is None else shapes)
    axes = [None] * len(like) if stacked is None else stacked
    zeros: list[Any] = [None] * len(like)
    for i, (p, x, stacked_axes) in enumerate(zip(leaves, like, axes, strict=True)):
        if p is not None and x is not None:
            part = p if np.shape(x) == p.shape else _part(p, x)
            zeros[i] = (
                _zeros(part, dtype, real)
                if stacked_axes is None
                else _blocks(part, stacked_axes, real)
            )
    return structure.unflatten(zeros)


def _part(p: jax.Array, like: Any) -> jax.Array:
    """By a sum where there is one number for each index of some axes: a sharded axis is not cut."""
    shape = np.shape(like)
    pairs = list(zip(p.shape, shape, strict=True))
    if all(b in (a, 1) for a, b in pairs):
        return jnp.sum(p, axis=tuple(i for i, (a, b) in enumerate(pairs) if a != b), keepdims=True)
    return replicated(p)[tuple(map(slice, shape))]


def _blocks(p: jax.Array, stacked: tuple[int, ...], second: bool) -> Blocks:
    x = numerics.zeros_like(p, np.dtype(np.float32))
    return encoding.zeros(x, stacked, codec.of_moments(second=second))


def _zeros(p: jax.Array, dtype: DTypeLike | None, real: bool) -> jax.Array | None:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return None
    dtype = numerics.real_dtype(p) if dtype is None else np.dtype(dtype)
    is_complex = jnp.iscomplexobj(p) and not real
    return numerics.zeros_like(p, numerics.complex_dtype(dtype) if is_complex else dtype)


def counter(params: PyTree, value: int = 0) -> jax.Array:
    """A scalar that counts, replicated over the mesh of the parameters."""
    x = jnp.asarray(value, jnp.int32)
    for p in jax.tree.leaves(params):
        sharding = None if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return x
