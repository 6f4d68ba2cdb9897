"""A device's rows of a buffer that is sharded over mesh axes, and the collectives between devices.

They work in all versions of JAX that are supported here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgrad._layers.layer_axes import axis_exists
from jgrad._trees import shardings


class Shard(NamedTuple):
    """A device's rows of each buffer, where buffers are sharded over mesh axes.

    Attributes:
      axes: their names.
      devices: the number of devices along them.
    """

    axes: tuple[str, ...]
    devices: int

    def num_rows(self, rows: int) -> int:
        """How many rows of a buffer this device has."""
        return rows // self.devices

    def first_row(self, rows: int) -> jax.Array:
        """The first row that this device has."""
        return jax.lax.axis_index(self.axes) * self.num_rows(rows)

    def slice(self, x: ArrayLike) -> jax.Array:
        """This device's rows of an array that is replicated."""
        x = jnp.asarray(x)
        return jax.lax.dynamic_slice_in_dim(x, self.first_row(len(x)), self.num_rows(len(x)))


def shard_over(axes: tuple[str, ...]) -> Shard | None:
    """This device's shard along mesh axes; None where none of them exist, as under `jit`.

    Raises:
      NameError: some of them exist, and others do not.
    """
    if not any(map(axis_exists, axes)):
        return None
    return Shard(axes, jax.lax.psum(1, axes))


def reduce_scatter_mean(x: jax.Array, shard: Shard) -> jax.Array:
    """This device's rows of the mean over devices."""
    total = jax.lax.psum_scatter(x, shard.axes, scatter_dimension=0, tiled=True)
    return total / shard.devices


def all_gather(x: jax.Array, shard: Shard) -> jax.Array:
    """All rows on each device."""
    return shardings.all_gather(x, shard.axes)


def is_known_to_be_invariant(x: jax.Array, shard: Shard) -> bool:
    """Whether `shard_map` with `check_vma=True` knows that `x` is the same on some devices."""
    return any(shardings.is_known_to_be_invariant(axis, x) for axis in shard.axes)
