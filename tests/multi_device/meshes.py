"""Meshes of the eight devices, or of fewer."""

import jax
from jax.sharding import AxisType


def mesh_of(axis_type=AxisType.Auto, **axes):
    """With named axes of given lengths, over the first devices."""
    devices = 1
    for n in axes.values():
        devices *= n
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(axis_type,) * len(axes),
        devices=jax.devices()[:devices],
    )


def use(mesh):
    """A context with this mesh, in each supported JAX."""
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
