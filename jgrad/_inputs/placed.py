"""Gradients where their parameters are, for kernels on a mesh whose axes are automatic.

Under `jit` on such a mesh the type of a leaf does not say how it is sharded, and a kernel of Pallas
is opaque to the partitioner. So the user says it, and a constraint hands it on.
"""

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from jgrad._inputs.inputs import Inputs
from jgrad._layers.layer_axes import check_names, read_mesh_axes
from jgrad._trees.trees import PyTree


def placed(inputs: Inputs, mesh_axes: PyTree) -> list[Any]:
    """The gradients, sharded as the PartitionSpecs say; as they are where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = {name for name, kind in kinds if kind == AxisType.Auto}
    if not automatic:
        return inputs.g
    axes = inputs.option("mesh_axes", read_mesh_axes(inputs.function, mesh_axes))
    found = []
    for g, array in zip(inputs.g, inputs.specs, strict=True):
        own = {axes.leaves[i] and axes.leaves[i].spec for i in array.positions}
        spec = own.pop() if len(own) == 1 else None
        if g is not None and spec is not None:
            i = array.positions[0]
            names = axes.leaves[i].values
            check_names(axes, i, names, mesh)
            spec = PartitionSpec(*spec[:1]) if array.is_buffer else spec  # its rows
            if len(spec) > g.ndim:
                expected = f"at most {g.ndim}, one for each axis of shape {g.shape}"
                axes.fail(i, ValueError, f"{len(spec)} entries, expected {expected}")
            if automatic.issuperset(names):
                g = jax.lax.with_sharding_constraint(g, spec)
        found.append(g)
    return found
