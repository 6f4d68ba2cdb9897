"""The state type of all optimizers, and the state before the first update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgrad._trees.protocols import state_of
from jgrad._trees.trees import PyTree


@state_of("moments", step="step", mw="moment", vw="moment")
class OptState(NamedTuple):
    """State of every optimizer but `soap`; fields that a method does not use are `None`.

    The field names are a file format: checkpoints hold them. `count`, `mu` and `nu`, optax's names,
    read the same arrays; `optax.tree.get` finds fields only, so give it `"step"`.

    Attributes:
      step: number of updates done, an int32 scalar; it saturates.
      mw: first moment, or momentum; a tree like the parameters, with `Blocks` for arrays in 8 bits.
      vw: second moment, real; as `mw`.

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


@state_of("adafactor", step="step", mw="moment", vw="moment")
class AdafactorState(OptState):
    """State of `adafactor`: an `OptState` whose `mw` averages steps, with the rate inside.

    It has a type of its own so that `carry_over` does not take `mw` for averages of gradients.

    Attributes:
      step: updates done, an int32 scalar.
      mw: averages of steps; a tree like the parameters, or None without momentum.
      vw: averages of squares of gradients; `Factors` for matrices.

    Example:
      >>> state = jgrad.adafactor(1e-2, momentum=0.9).init({"w": jnp.ones((3, 2))})
      >>> type(state).__name__, isinstance(state, jgrad.OptState)
      ('AdafactorState', True)
    """

    __slots__ = ()


def counter(params: PyTree, value: int = 0) -> jax.Array:
    """A scalar that counts, replicated over the mesh of the parameters."""
    x = jnp.asarray(value, jnp.int32)
    for p in jax.tree.leaves(params):
        sharding = None if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return x
