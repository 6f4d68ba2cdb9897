"""What one operation on an 8-bit leaf computes, and how the leaf is sharded.

XLA's partitioner cannot look into Pallas kernels, so each device runs the kernel on its shard of
the leaf. How the leaf is sharded is known from explicit mesh axes, or has to be given by the user.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._arithmetic.leaf_moment import LeafMoment, Moments, written
from jgrad._arithmetic.leafwise import Function
from jgrad._arithmetic.programs import ArrayType, ClosedProgram
from jgrad._quantized.blocks import SIZE
from jgrad._trees.places import WHOLE, partition_spec, shard_count, shard_index
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement, axes_of_spec
from jgrad._trees.trees import Structure
from jgrad._trees.unpromised import Unpromised

core = Unpromised("moments in 8 bits")

M = TypeVar("M", bound=Moments)

_KINDS = (np.float32, jnp.bfloat16, np.int32, np.uint32, np.int8, np.uint8)
_IN_MEMORY = frozenset(np.dtype(x) for x in _KINDS)  # of arrays that a kernel reads and writes

# How a leaf is computed: by a Pallas kernel, or by two passes of XLA.
Lowering = Literal["kernel", "two passes"]


class LeafStep(NamedTuple):
    """What one operation computes; static.

    Attributes:
      function: of the arguments, some of which are moments, to a tuple of arrays.
      structure: of the arguments.
      positions: for each of their leaves that of the operand that it is.
      replaces: for the last arrays of that tuple the position of the operand that each replaces, or
        None.
      place: how the leaf is sharded, if the user says it.
      no_kernel: why the function cannot be a kernel of a TPU; "" if it can.
      traced: the plain step, which has all results: those of the tuple, then codes and scale of
        each moment. None before it is traced.
      used: which of them are read.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    structure: Structure
    positions: tuple[int, ...]
    replaces: tuple[int | None, ...]
    place: Placement | None
    no_kernel: str
    traced: ClosedProgram | None
    used: tuple[bool, ...]

    @property
    def types(self) -> tuple[ArrayType, ...]:
        """Of all results."""
        return () if self.traced is None else tuple(self.traced.out_avals)

    def arguments(self, operands: Sequence[Leaf]) -> PyTree:
        """The arguments of the function."""
        return jax.tree.unflatten(self.structure, [operands[i] for i in self.positions])

    @property
    def codes(self) -> list[int]:
        """For each moment the position of its codes among the operands; the scale comes next."""
        args = self.arguments(range(1 + max(self.positions)))
        return [moment.old.codes for moment in moments_of(args)]

    @property
    def aliases(self) -> dict[int, int]:
        """The operand that each result replaces, by the position of the result."""
        operands = [*self.replaces, *itertools.chain(*((i, i + 1) for i in self.codes))]
        first = len(self.types) - len(operands)
        return {first + i: operand for i, operand in enumerate(operands) if operand is not None}

    def call(
        self, args: PyTree, make: Callable[[LeafMoment], M]
    ) -> tuple[tuple[jax.Array, ...], list[M]]:
        """What the function returns, and the moments that it was given in the place of its own."""
        leaves: list[Leaf] = jax.tree.leaves(args, is_leaf=_is_moment)
        structure: Structure = jax.tree.structure(args, is_leaf=_is_moment)
        arguments = [make(x) if _is_moment(x) else x for x in leaves]
        values = self.function(*structure.unflatten(arguments))
        return values, [x for x, old in zip(arguments, leaves, strict=True) if _is_moment(old)]

    def plain(self, *operands: jax.Array) -> list[jax.Array]:
        """The results as any program of XLA computes them."""
        args = self.arguments(operands)
        return self.results(self.function(*args), moments_of(args))

    def results(self, values: Sequence[jax.Array], moments: Sequence[Moments]) -> list[jax.Array]:
        """The results that are read, of what the function returned and what moments stored."""
        flat = [*values, *itertools.chain(*written(moments))]
        return list(itertools.compress(flat, self.used)) if self.used else flat


def needed(function: Function, operands: Sequence[jax.Array]) -> list[bool]:
    """Which arguments the results of a function are computed from."""
    traced = jax.make_jaxpr(function)(*operands)
    return list(core.dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))[1])


def moments_of(args: PyTree) -> list[LeafMoment]:
    """The moments among some arguments."""
    leaves = jax.tree.leaves(args, is_leaf=_is_moment)
    return list(filter(_is_moment, leaves))


def _is_moment(x: object) -> bool:
    return isinstance(x, LeafMoment)


def in_memory(*arrays: Leaf) -> bool:
    """Whether kernels have arrays of these dtypes; of float16 there are none."""
    return all(x.dtype in _IN_MEMORY for x in arrays)


def place_of(
    step: LeafStep, operands: Sequence[ArrayType], form: Lowering, *, is_local: bool
) -> Placement | str:
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
        return WHOLE
    mesh = codes.sharding.mesh
    is_explicit = any(kind == AxisType.Explicit for kind in mesh.axis_types)
    if form == "two passes":
        return "its mesh has explicit axes" if is_explicit else WHOLE
    place = step.place
    if is_explicit:
        place = Placement(axes_of_spec(codes.sharding.spec), mesh=mesh)
    if place is None:
        return "nothing says how it is sharded; a PartitionSpec as `mesh_axes` does"
    for axis, n in enumerate(codes.shape):
        size = SIZE if axis == codes.ndim - 1 else 1
        if n % (shard_count(place, axis) * size):
            return f"its shards along axis {axis} have no whole blocks of {size}"
    return place


def on_shards(
    kernel: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    shape: tuple[int, ...],
    place: Placement,
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
    spec = partition_spec(place.per_axis)
    row_spec = PartitionSpec(*spec[: len(shape) - 1])
    widths = {shape[-1]: spec, 1: row_spec, shape[-1] // SIZE: spec}
    specs = [widths[x.shape[-1]] if x.ndim > 1 else PartitionSpec() for x in operands]
    if AxisType.Explicit in place.mesh.axis_types:  # types of arrays are as these say
        put = functools.partial(NamedSharding, place.mesh)
        operands = jax.tree.map(jax.sharding.reshard, list(operands), list(map(put, specs)))

    def on_shard(operands: Sequence[jax.Array]) -> list[jax.Array]:
        numbers = zip(shape, range(len(shape)), strict=True)
        starts = [shard_index(place, axis) * (n // shard_count(place, axis)) for n, axis in numbers]
        return kernel(operands, jnp.stack(starts))

    return jax.shard_map(
        on_shard, mesh=place.mesh, in_specs=(specs,), out_specs=spec, check_vma=False
    )(list(operands))
