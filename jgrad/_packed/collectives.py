"""What devices do together inside `shard_map` and `pmap`, in all versions of JAX supported here."""

import jax
import jax.numpy as jnp

from jgrad._layers import layer_axes as places
from jgrad._packed.rows import Share


def share(axes: tuple[str, ...]) -> Share | None:
    """This device's share along mesh axes; None where none of them exist, as outside of them.

    Raises:
      NameError: some of them exist, and others do not.
    """
    if not any(map(places.exists, axes)):
        return None
    return Share(axes, jax.lax.psum(1, axes))


def scattered_mean(x: jax.Array, share: Share) -> jax.Array:
    """This device's rows of the mean over devices, by a reduce-scatter."""
    total = jax.lax.psum_scatter(x, share.axes, scatter_dimension=0, tiled=True)
    return total / share.devices


def gathered(x: jax.Array, share: Share) -> jax.Array:
    """All rows on each device, by an all-gather; known to be the same on each, if that is checked.

    The transpose of a gather that is known to be the same is a slice, which is right only where
    JAX knows of each cotangent whether it is the same.
    """
    if not is_known_to_be_equal(jnp.zeros(()), share):
        return jax.lax.all_gather(x, share.axes, axis=0, tiled=True)
    if (gather := getattr(jax.lax, "all_gather_invariant", None)) is not None:  # JAX 0.7
        return gather(x, share.axes, axis=0, tiled=True)
    return jax.lax.all_gather(x, share.axes, axis=0, tiled=True, to="invarying")


def is_known_to_be_equal(x: jax.Array, share: Share) -> bool:
    """Whether `shard_map` with `check_vma=True` knows that `x` is the same on some devices.

    Where nothing is checked nothing is known.
    """
    return any(_varies_after(x, axis) for axis in share.axes)


def _varies_after(x: jax.Array, axis: str) -> bool:
    """Whether `x` can be made to vary over an axis: not where it does, or where none is known."""
    try:
        varying = _varying(x, axis)
    except ValueError:
        return False
    return bool(jax.typeof(varying) != jax.typeof(x))


def _varying(x: jax.Array, axis: str) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axis, to="varying")
    return jax.lax.pvary(x, axis)  # type: ignore[attr-defined]  # JAX 0.7
