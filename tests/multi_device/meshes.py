"""Meshes of the eight devices, or of fewer, and what lies on them."""

import jax
from jax.sharding import AxisType, NamedSharding

import jgrad


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


def shardings_of(mesh, specs):
    """A sharding for each spec."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree, mesh, specs):
    """The tree on a mesh: one spec for all leaves, or a tree of them of which it may be finer."""
    return jax.device_put(tree, shardings_of(mesh, specs))


def specs_of(tree):
    """The spec of each sharding, or of each array that has one."""
    return jax.tree.map(lambda x: getattr(x, "sharding", x).spec, tree)


def varying(x, axis):
    """The type of what differs from device to device along an axis, inside `shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axis, to="varying")
    return jax.lax.pvary(x, axis)  # JAX 0.8


def update_in_shard_map(tx, w, mesh, specs, *, step=None, check_vma=True):
    """The compiled `update`, or a `step` of weights, state and gradients, and a state to begin with.

    The weights lie on the mesh already, as `specs` say, and the state lies as `state_shardings` says.
    """
    states = jgrad.state_shardings(tx, w)
    own = specs, specs_of(states)
    in_specs = (specs, own[1], specs)
    mapped = jax.shard_map(
        tx.update if step is None else step,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=own,
        check_vma=check_vma,
    )
    return jax.jit(mapped), jax.jit(tx.init, out_shardings=states)(w)
