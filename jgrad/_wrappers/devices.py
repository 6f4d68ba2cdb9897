"""Over which devices the arrays of an update are sharded, and what all of these agree upon."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._inputs.inputs import Inputs
from jgrad._layers.layer_axes import existing_mesh_axes, read_mesh_axes
from jgrad._packed import array_spec
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree


def mesh_axes_of(inputs: Inputs, mesh_axes: PyTree) -> tuple[str, ...]:
    """All mesh axes over which some leaf is sharded."""
    named = inputs.option("mesh_axes", read_mesh_axes(inputs.function, mesh_axes))
    shards = [spec.shard.axes for spec in inputs.specs if spec.shard is not None]
    return tuple(sorted({*existing_mesh_axes(named), *itertools.chain(*shards)}))


def agreed(flag: Any, mesh_axes: tuple[str, ...]) -> Any:
    """True where the flag is True on all devices of the mesh axes, so that they act alike."""
    if not (mesh_axes and checks.is_array(flag)):
        return flag
    return jax.lax.pmin(flag.astype(jnp.int32), mesh_axes) == 1


def holds_shards(state: PyTree, inputs: Inputs) -> bool:
    """Whether a state has shards of buffers that the parameters have whole: that of `zero`."""
    pairs = zip(inputs.reference.leaves, inputs.specs, strict=True)
    shapes = {x.shape for x, spec in pairs if spec.is_buffer}
    return any(
        spec.shape in shapes and not checks.is_nothing(x) and x.shape != spec.shape
        for x, spec in zip(trees.flatten(state)[0], array_spec.specs(state), strict=True)
        if spec.is_buffer and not spec.is_unpacked
    )
