"""Collectives along mesh axes, and what `shard_map` knows of replicas.

They work in all versions of JAX that are supported here.
"""

import jax
import jax.numpy as jnp

# How JAX 0.10 names the axis of a `pmap` that was given none.
_WITHOUT_NAME = "_internal_pmap"


def all_gather(x: jax.Array, names: tuple[str, ...], axis: int = 0) -> jax.Array:
    """All parts on each device; typed as invariant over devices where JAX keeps account of that.

    The transpose of an invariant gather is a slice, which is right only where JAX knows of each
    cotangent whether it is invariant.
    """
    if not any(is_known_to_be_invariant(jnp.zeros(()), name) for name in names):
        return jax.lax.all_gather(x, names, axis=axis, tiled=True)
    if (gather := getattr(jax.lax, "all_gather_invariant", None)) is not None:  # JAX 0.7
        return gather(x, names, axis=axis, tiled=True)
    return jax.lax.all_gather(x, names, axis=axis, tiled=True, to="invarying")


def is_known_to_be_invariant(x: jax.Array, name: str) -> bool:
    """Whether `shard_map` with `check_vma=True` knows that `x` is the same along a mesh axis.

    Without that check JAX knows nothing. Known is what can be made to vary.
    """
    try:
        varying = _varying(x, name)
    except ValueError:
        return False
    return bool(jax.typeof(varying) != jax.typeof(x))


def unknown_axes(x: jax.Array) -> tuple[str, ...]:
    """The mesh axes of the `shard_map` or `pmap` around, along which `x` may vary.

    None outside of both, and none in a `pmap` without a name: there each device has its own model.
    """
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    named = [name for name in manual if not str(name).startswith(_WITHOUT_NAME)]
    return tuple(name for name in named if not is_known_to_be_invariant(x, name))


def _varying(x: jax.Array, name: str) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, name, to="varying")
    return jax.lax.pvary(x, name)  # type: ignore[attr-defined]  # JAX 0.7
