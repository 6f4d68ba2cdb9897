"""What the type of an array says of its place on a mesh, and helpers for explicit axes.

With explicit axes a type says how an array is sharded, and JAX refuses operations whose result
might be sharded in several ways. With automatic axes it only says that there is a mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._trees.trees import PyTree


def is_sharded(x: jax.Array) -> bool:
    """Whether the type of `x` says that it is sharded: its mesh has explicit axes."""
    return any(part is not None for part in jax.typeof(x).sharding.spec)


def is_on_mesh(x: jax.Array) -> bool:
    """Whether `x` may be sharded, as far as its type says it: with automatic axes not how it is.

    Nothing says it of arrays that only `in_shardings` puts there.
    """
    return any(kind != AxisType.Manual for kind in jax.typeof(x).sharding.mesh.axis_types)


def replicated(x: jax.Array) -> jax.Array:
    """`x` replicated on a mesh with explicit axes, so that it can be reshaped and concatenated."""
    if not is_sharded(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))


def sharded_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` sharded as `like`, if the type of that says how."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding) if is_sharded(like) else x


def on_automatic_axes(f: Callable[..., Any], shardings: PyTree, *args: Any) -> Any:
    """`f(*args)` with explicit axes as automatic ones, its results sharded as `shardings` says."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(f, axes=explicit, out_sharding=shardings)(*args)
