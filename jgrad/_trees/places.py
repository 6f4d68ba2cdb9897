"""What a device has of a leaf, from its `Placement`, for kernels and for random bits."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jgrad._trees.shardings import MeshAxesPerAxis, Placement

WHOLE = Placement(())


def is_shard(place: Placement) -> bool:
    """Whether what is traced is a shard: kernels need not know it, but random bits do."""
    if place.mesh is None:
        return False
    kinds = zip(place.mesh.axis_names, place.mesh.axis_types, strict=True)
    return any(kind == AxisType.Manual and name in place.names for name, kind in kinds)


def partition_spec(mesh_axes: MeshAxesPerAxis | None) -> PartitionSpec:
    """How an array is sharded, as JAX writes it; whole where nothing says it."""
    return PartitionSpec(*(names or None for names in mesh_axes or ()))


def axes_cut(place: Placement) -> list[int]:
    """The axes of the leaf that are sharded."""
    return [axis for axis, names in enumerate(place.per_axis or ()) if names]


def shard_count(place: Placement, axis: int) -> int:
    """Into how many parts an axis of the leaf is cut."""
    return math.prod(place.mesh.shape[name] for name in _along(place, axis))


def shard_index(place: Placement, axis: int) -> jax.Array:
    """Which of these parts is here."""
    index = jnp.zeros((), jnp.int32)
    for name in _along(place, axis):
        index = index * place.mesh.shape[name] + jax.lax.axis_index(name)
    return index


def whole_along(place: Placement, axis: int | None) -> Placement:
    """That of one layer, which is whole along the axis of layers."""
    rows = tuple(() if k == axis else names for k, names in enumerate(place.per_axis or ()))
    return dataclasses.replace(place, per_axis=None if place.per_axis is None else rows)


def _along(place: Placement, axis: int) -> tuple[str, ...]:
    return next(itertools.islice(place.per_axis or (), axis, None), ())
