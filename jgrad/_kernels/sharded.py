"""How the leaf of a kernel is sharded, or why no kernel can compute it.

A kernel of Pallas is opaque to XLA's partitioner. So each device runs it on its shard of the leaf,
for which types of explicit axes, or the user, say how the leaf is sharded.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._kernels.leaf_step import LeafStep, Lowering, Place, in_memory
from jgrad._trees.forms import SIZE


def place_of(
    step: LeafStep, operands: Sequence[Any], form: Lowering, *, is_local: bool
) -> Place | str:
    """The place of the kernel of a step; a text that says why it has none.

    Args:
      step: of the leaf.
      operands: their types.
      form: of the kernel.
      is_local: whether no array is sharded.
    """
    codes = operands[step.codes[0]]
    arrays = [x for x in (*operands, *step.types) if x.shape == codes.shape]
    if form == "kernel" and (others := [x for x in arrays if not in_memory(x)]):
        return f"a kernel has no arrays of {min(str(x.dtype) for x in others)}"
    if form == "kernel" and step.no_kernel:
        return step.no_kernel
    if is_local:
        return Place()
    mesh = codes.sharding.mesh
    is_explicit = any(kind == AxisType.Explicit for kind in mesh.axis_types)
    if form == "two passes":
        return "its mesh has explicit axes" if is_explicit else Place()
    place = step.place
    if is_explicit:
        place = Place(mesh, tuple(codes.sharding.spec))
    if place is None:
        return "nothing says how it is sharded; `mesh_axes` does"
    place = place._replace(spec=(*place.spec, *[None] * (codes.ndim - len(place.spec))))
    for axis, n in enumerate(codes.shape):
        size = SIZE if axis == codes.ndim - 1 else 1
        if n % (place.shards(axis) * size):
            return f"its shards along axis {axis} have no whole blocks of {size}"
    return place


def on_shards(
    kernel: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    shape: tuple[int, ...],
    place: Place,
) -> list[jax.Array]:
    """What a kernel writes, on each shard of a leaf.

    Args:
      kernel: of operands, and of the number of the first element here along each axis.
      operands: arrays of the shape of the leaf; of that of its scales; columns, with a number for
        each row, whose last axis has size 1; and vectors of one number.
      shape: of the leaf.
      place: how it is sharded.
    """
    if place.mesh is None:
        return kernel(operands, jnp.zeros((len(shape),), jnp.int32))
    spec, of_rows = PartitionSpec(*place.spec), PartitionSpec(*place.spec[:-1], None)
    widths = {shape[-1]: spec, 1: of_rows, shape[-1] // SIZE: spec}
    specs = [widths[x.shape[-1]] if x.ndim > 1 else PartitionSpec() for x in operands]
    if AxisType.Explicit in place.mesh.axis_types:  # types of arrays are as these say
        put = functools.partial(NamedSharding, place.mesh)
        operands = jax.tree.map(jax.sharding.reshard, list(operands), list(map(put, specs)))

    def on_shard(operands: Sequence[jax.Array]) -> list[jax.Array]:
        numbers = zip(shape, range(len(shape)), strict=True)
        starts = [place.index_of(axis) * (n // place.shards(axis)) for n, axis in numbers]
        return kernel(operands, jnp.stack(starts))

    return jax.shard_map(
        on_shard, mesh=place.mesh, in_specs=(specs,), out_specs=spec, check_vma=False
    )(list(operands))
