"""How leaves are sharded, as users say it, for random bits and for kernels."""

import jax
from jax.sharding import AxisType

from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers.layer_axes import among, existing
from jgrad._trees.places import is_shard
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import Placement, invariant_axes


def places_by_option(inputs: Parameters, mesh_axes: PyTree) -> list[Placement | None]:
    """How each array is sharded, as the option says it, where its type does not.

    On a mesh with automatic axes a kernel asks for it, which is opaque to XLA's partitioner; and
    inside `shard_map` random bits do, which are those of the whole leaf. A mesh axis along which
    types say that a leaf is the same there does not shard it. Names alone are enough for bits of
    each device's own, but one for all leaves may be of copies, too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = list(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = {name for name, kind in kinds if kind == AxisType.Auto}
    manual = {name for name, kind in kinds if kind == AxisType.Manual}
    found: list[Placement | None] = [None] * len(inputs.specs)
    if not automatic | manual:
        return found
    axes = inputs.placements(mesh_axes)
    for i, (x, array) in enumerate(zip(inputs.reference.leaves, inputs.specs, strict=True)):
        entries = {axes.leaves[k] for k in array.positions}
        if not inputs.is_updated[i] or len(entries) > 1:
            continue
        entry, position = entries.pop(), array.positions[0]
        existing(axes, position, entry.names, x)
        sharding = manual.intersection(entry.names)
        per_axis = entry.per_axis
        if per_axis is None and (not sharding or entry.is_for_all):
            continue
        if array.is_buffer and not sharding and per_axis is not None:
            per_axis = per_axis[:1]  # its rows
        if per_axis is not None and len(per_axis) > x.ndim and not array.is_buffer:
            expected = f"at most {x.ndim}, one for each axis of shape {x.shape}"
            axes.fail(position, ValueError, f"{len(per_axis)} entries, expected {expected}")
        place = Placement(per_axis, entry.anywhere, mesh=mesh)
        if sharding:
            beside = [y for y in (x, inputs.g[i]) if y is not None]
            place = among(place, sharding.difference(invariant_axes(*beside)))
        if is_shard(place) if sharding else automatic.issuperset(entry.names):
            found[i] = place
    return found


def places_of(inputs: Inputs, mesh_axes: PyTree) -> list[Placement | None]:
    """Those of the method's option, or else of a wrapper around it; else none."""
    said = [] if mesh_axes is None else places_by_option(inputs, mesh_axes)
    if inputs.then is None or inputs.w is None:
        return said
    around = list(map(inputs.then.place_of, inputs.w))
    return [x or y for x, y in zip(said, around, strict=True)] if said else around
