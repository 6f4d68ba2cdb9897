"""How leaves are sharded, as users say it, for random bits and for kernels."""

from collections.abc import Collection

import jax
from jax.sharding import AxisType, PartitionSpec

from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers.layer_axes import check_names, read_mesh_axes
from jgrad._trees.places import Place
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import invariant_axes


def places_by_option(inputs: Parameters, mesh_axes: PyTree) -> list[Place | None]:
    """How each array is sharded, as the PartitionSpecs say it, where its type does not.

    On a mesh with automatic axes a kernel asks for it, which is opaque to XLA's partitioner; and
    inside `shard_map` random bits do, which are those of the whole leaf. A mesh axis along which
    types say that a leaf is the same there does not shard it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = list(zip(mesh.axis_names, mesh.axis_types, strict=True))
    automatic = {name for name, kind in kinds if kind == AxisType.Auto}
    manual = {name for name, kind in kinds if kind == AxisType.Manual}
    found: list[Place | None] = [None] * len(inputs.specs)
    if not automatic | manual:
        return found
    axes = inputs.option("mesh_axes", read_mesh_axes(inputs.function, mesh_axes))
    for i, (x, array) in enumerate(zip(inputs.reference.leaves, inputs.specs, strict=True)):
        specs = {axes.leaves[k] and axes.leaves[k].spec for k in array.positions}
        spec = specs.pop() if len(specs) == 1 else None
        if not inputs.is_updated[i] or spec is None:
            continue
        position = array.positions[0]
        names = axes.leaves[position].values
        check_names(axes, position, names, mesh)
        sharding = manual.intersection(names)
        if array.is_buffer and not sharding:
            spec = PartitionSpec(*spec[:1])  # its rows
        if len(spec) > x.ndim and not array.is_buffer:
            expected = f"at most {x.ndim}, one for each axis of shape {x.shape}"
            axes.fail(position, ValueError, f"{len(spec)} entries, expected {expected}")
        if sharding:
            beside = [y for y in (x, inputs.g[i]) if y is not None]
            varying = sharding.difference(invariant_axes(*beside))
            found[i] = Place(mesh, _only(spec, varying, x.ndim), is_shard=True)
        elif automatic.issuperset(names):
            found[i] = Place(mesh, tuple(spec))
    return found


def places_of(inputs: Inputs, mesh_axes: PyTree) -> list[Place | None]:
    """Those of the method's option, or else of a wrapper around it; else none."""
    said = [] if mesh_axes is None else places_by_option(inputs, mesh_axes)
    if inputs.then is None or inputs.w is None:
        return said
    around = list(map(inputs.then.place_of, inputs.w))
    return [x or y for x, y in zip(said, around, strict=True)] if said else around


def _only(spec: PartitionSpec, names: Collection[str], ndim: int) -> tuple[tuple[str, ...], ...]:
    """An entry for each axis, with those of its names that are among some."""
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    kept = (tuple(name for name in part if name in names) for part in parts)
    return (*kept, *[()] * (ndim - len(parts)))
