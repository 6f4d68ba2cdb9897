"""A device's rows of a buffer that is sharded over mesh axes, and the collectives between devices.

They work in all versions of JAX that are supported here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgrad._layers.layer_axes import axis_exists


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
    """All rows on each device; typed as invariant over devices where JAX keeps account of that.

    The transpose of an invariant gather is a slice, which is right only where JAX knows of each
    cotangent whether it is invariant.
    """
    if not is_known_to_be_invariant(jnp.zeros(()), shard):
        return jax.lax.all_gather(x, shard.axes, axis=0, tiled=True)
    if (gather := getattr(jax.lax, "all_gather_invariant", None)) is not None:  # JAX 0.7
        return gather(x, shard.axes, axis=0, tiled=True)
    return jax.lax.all_gather(x, shard.axes, axis=0, tiled=True, to="invarying")


def is_known_to_be_invariant(x: jax.Array, shard: Shard) -> bool:
    """Whether `shard_map` with `check_vma=True` knows that `x` is the same on some devices.

    Without that check JAX knows nothing.
    """
    return any(_varies_after(x, axis) for axis in shard.axes)


def _varies_after(x: jax.Array, axis: str) -> bool:
    """Whether `x` can be made to vary over an axis: not if it does, or if JAX keeps no account."""
    try:
        varying = _varying(x, axis)
    except ValueError:
        return False
    return bool(jax.typeof(varying) != jax.typeof(x))


def _varying(x: jax.Array, axis: str) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axis, to="varying")
    return jax.lax.pvary(x, axis)  # type: ignore[attr-defined]  # JAX 0.7
