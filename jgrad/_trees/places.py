"""How a leaf is sharded, as users say it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Place(NamedTuple):
    """How a leaf is sharded.

    Attributes:
      mesh: with the axes; None where the leaf is whole, or what is traced is a shard.
      spec: an entry for each axis of the leaf.
      is_shard: whether what is traced is a shard although there is a mesh: no kernel needs to know
        it, but random bits do.
    """

    mesh: Any = None
    spec: tuple[Any, ...] = ()
    is_shard: bool = False

    @property
    def names(self) -> list[str]:
        """The mesh axes over which the leaf is sharded."""
        return [name for part in self.spec for name in _names(part)]

    @property
    def cut(self) -> list[int]:
        """The axes of the leaf that are sharded."""
        return [axis for axis, part in enumerate(self.spec) if _names(part)]

    def shards(self, axis: int) -> int:
        """Into how many parts an axis of the leaf is cut."""
        return math.prod(self.mesh.shape[name] for name in _names(self.spec[axis]))

    def index_of(self, axis: int) -> jax.Array:
        """Which of these parts is here."""
        index = jnp.zeros((), jnp.int32)
        for name in _names(self.spec[axis]):
            index = index * self.mesh.shape[name] + jax.lax.axis_index(name)
        return index


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)
