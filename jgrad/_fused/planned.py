"""A step with the place of each of its kernels, and how it is run with them."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # may change, checked in JAX 0.7 to 0.12
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._fused import leaves, two_passes
from jgrad._fused.graph import Graph, Operation
from jgrad._fused.kernel import LeafKernel, Operands
from jgrad._fused.leaves import Kernel
from jgrad._quantized.regions import DECODE
from jgrad._trees.blocks import SIZE

# How a leaf is computed: by a kernel of Pallas, or by two passes of XLA.
Form = Literal["kernel", "two passes"]


class Place(NamedTuple):
    """How a leaf is sharded.

    Attributes:
      mesh: with the axes; None where the leaf is whole, or what is traced is a shard.
      spec: an entry for each axis of the leaf.
    """

    mesh: Any = None
    spec: tuple[Any, ...] = ()

    def shards(self, axis: int) -> int:
        """Into how many parts an axis of the leaf is cut."""
        return math.prod(self.mesh.shape[name] for name in _names(self.spec[axis]))

    def index_of(self, axis: int) -> jax.Array:
        """Which of these parts is here."""
        index = jnp.zeros((), jnp.int32)
        for name in _names(self.spec[axis]):
            index = index * self.mesh.shape[name] + jax.lax.axis_index(name)
        return index


class Planned(NamedTuple):
    """A step, with a place for each kernel, or the reason why a leaf has none.

    Attributes:
      graph: the traced step.
      plan: its kernels.
      places: where each is; a text that says why it cannot be.
      replaced: for each result the position of the argument that it may replace.
      form: of all kernels.
      is_local: whether no array is sharded.
    """

    graph: Graph
    plan: leaves.Plan
    places: list[Place | str]
    replaced: tuple[int | None, ...]
    form: Form
    is_local: bool

    @classmethod
    def of(
        cls, jaxpr: ClosedJaxpr, replaced: tuple[int | None, ...], form: Form, *, is_local: bool
    ) -> "Planned":
        """The kernels of a traced step; `is_local` says that no array is sharded."""
        graph = Graph.of(jaxpr)
        pairs = zip(graph.outputs, replaced, strict=True)
        plan = leaves.plan(graph, {y for y, i in pairs if i is not None})
        found: list[Place | str] = []
        for kernel in plan.kernels:
            if form == "kernel" and (others := kernel.unwritable(graph)):
                found.append(f"a kernel has no arrays of {graph.dtype(others[0])}")
            elif is_local:
                found.append(Place())
            else:
                found.append(
                    _place(kernel, graph) if form == "kernel" else _automatic(kernel, graph)
                )
        return cls(graph, plan, found, replaced, form, is_local)

    def run(self, args: Sequence[Any], *, interpret: bool = False) -> list[Any]:
        """The step."""
        graph = self.graph
        values = dict(graph.constants) | dict(zip(graph.inputs, args, strict=True))

        def run(operations: Sequence[Operation]) -> None:
            for op in operations:
                results = self._run(op, values, interpret=interpret)
                values.update(zip(op.outputs, results, strict=True))

        run(self.plan.before)
        for kernel, place in zip(self.plan.kernels, self.places, strict=True):
            if isinstance(place, str):
                run(kernel.operations)
            elif self.form == "two passes":
                found = two_passes.run(kernel, graph, values)
                values.update(zip(kernel.writes, found, strict=True))
            else:
                leaf = LeafKernel(kernel, graph, self._aliases(kernel))
                found = _on_shards(leaf, leaf.operands(values), place, interpret=interpret)
                values.update(zip(kernel.writes, found, strict=True))
        run(self.plan.after)
        return [values[x] for x in graph.outputs]

    def _run(self, op: Operation, values: dict[int, Any], *, interpret: bool) -> Sequence[Any]:
        """An operation outside of all kernels.

        What a branch reads, or a barrier, is written. So it reads what was widened, and that is
        widened again behind it. A branch may have kernels of its own.
        """
        inputs = list(op.inputs)
        if op.name == "optimization_barrier" or _is_conditional(op):
            inputs = [y if (y := self._narrow(x)) in values else x for x in inputs]
        args = [values[x] for x in inputs]
        if inputs == list(op.inputs) and not _reads_codes(op):
            return op.run(args)
        dtypes = [self.graph.dtype(x) for x in op.inputs]
        if op.name == "optimization_barrier":
            return _as(op.run(args), dtypes)
        functions = [
            functools.partial(self._in_branch, body, dtypes[1:], interpret)
            for body in op.params["branches"]
        ]
        with op.scope():
            return jax.lax.switch(args[0].astype(jnp.int32), functions, *args[1:])

    def _in_branch(
        self, body: ClosedJaxpr, dtypes: Sequence[Any], interpret: bool, *args: Any
    ) -> list[Any]:
        """A branch, of arguments that are widened in it."""
        traced = jax.make_jaxpr(lambda *xs: jaxpr_as_fun(body)(*_as(xs, dtypes)))(*args)
        nothing = (None,) * len(body.out_avals)
        planned = Planned.of(traced, nothing, self.form, is_local=self.is_local)
        return planned.run(args, interpret=interpret)

    def _narrow(self, x: int) -> int:
        """The array in bfloat16 that was widened to this one, or this one."""
        graph, op = self.graph, self.graph.maker.get(x)
        if op is None or op.name != "convert_element_type" or graph.dtype(x) != jnp.float32:
            return x
        return op.inputs[0] if graph.dtype(op.inputs[0]) == jnp.bfloat16 else x

    def branches(self, op: Operation) -> "list[Planned]":
        """Those of a conditional, if codes are read there."""
        if not _reads_codes(op):
            return []
        nothing = (None,) * len(op.outputs)
        return [
            Planned.of(body, nothing, self.form, is_local=self.is_local)
            for body in op.params["branches"]
        ]

    def _aliases(self, kernel: Kernel) -> dict[int, int]:
        """Results that are written where the argument was that they replace."""
        graph, aliases = self.graph, dict[int, int]()
        read, written = {*kernel.arrays, *kernel.scales}, set(kernel.writes)
        for y, i in zip(graph.outputs, self.replaced, strict=True):
            x = None if i is None else graph.inputs[i]
            if x in read and y in written and graph.dtype(x) == graph.dtype(y):
                aliases[y] = x
        return aliases


def _as(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def _is_conditional(op: Operation) -> bool:
    """Whether it has branches of which a number chooses one; not the platform."""
    return op.name == "cond" and op.params.get("branches_platforms") is None


def _reads_codes(op: Operation) -> bool:
    """Whether it is a conditional, and codes are read in a branch."""
    return _is_conditional(op) and any(map(_has_codes, op.params["branches"]))


def _has_codes(traced: ClosedJaxpr) -> bool:
    return any(op.name == DECODE for op in Graph.of(traced).operations)


# ---- sharded leaves ----------------------------------------------------------------------------


def _place(kernel: Kernel, graph: Graph) -> Place | str:
    """Where the kernel of a leaf is on a mesh; a text that says why it cannot be."""
    shardings = [graph.types[x].sharding for x in kernel.arrays if _is_sharded(graph.types[x])]
    constraints = (op for op in kernel.operations if op.name == "sharding_constraint")
    shardings.extend(op.params["sharding"] for op in constraints)
    if not all(map(_is_closed, shardings)):
        return "a constraint leaves open how it is sharded"
    missing = [len(kernel.shape) - len(sharding.spec) for sharding in shardings]
    pairs = zip(shardings, missing, strict=True)
    known = [Place(x.mesh, tuple(x.spec) + (None,) * count) for x, count in pairs]
    if not known and (mesh := _explicit_mesh(kernel, graph)) is not None:
        known = [Place(mesh, (None,) * len(kernel.shape))]  # replicated
    if not known:
        return "nothing says how it is sharded; `mesh_axes` does"
    place = known[0]
    if any(other.spec != place.spec for other in known):
        return "what it is computed from is sharded in different ways"
    last = len(kernel.shape) - 1
    for axis, n in enumerate(kernel.shape):
        size = SIZE if axis == last else 1
        if n % (place.shards(axis) * size):
            return f"its shards along axis {axis} have no whole blocks of {size}"
    return place


def _is_closed(sharding: Any) -> bool:
    """Whether a sharding says everything, by names."""
    parts = sharding.spec if isinstance(sharding, NamedSharding) else [PartitionSpec.UNCONSTRAINED]
    return all(part is None or isinstance(part, str | tuple) for part in parts)


def _explicit_mesh(kernel: Kernel, graph: Graph) -> Any:
    """The mesh of arrays whose types say how they are sharded; None where they do not."""
    for x in kernel.arrays:
        mesh = graph.types[x].sharding.mesh
        if mesh.axis_types and all(kind == AxisType.Explicit for kind in mesh.axis_types):
            return mesh
    return None


def _automatic(kernel: Kernel, graph: Graph) -> Place | str:
    """XLA shards what it compiles, except where types say how."""
    is_explicit = any(_is_sharded(graph.types[x]) for x in kernel.arrays)
    return "its mesh has explicit axes" if is_explicit else Place()


def _is_sharded(type_: Any) -> bool:
    sharding = getattr(type_, "sharding", None)
    return sharding is not None and any(part is not None for part in sharding.spec)


def _on_shards(
    leaf: LeafKernel, operands: Operands, place: Place, *, interpret: bool
) -> list[jax.Array]:
    """The kernel, on each shard of a leaf."""
    ndim = operands.arrays[0].ndim
    if place.mesh is None:
        return leaf(operands, jnp.zeros((ndim,), jnp.int32), interpret=interpret)
    spec, of_rows = PartitionSpec(*place.spec), PartitionSpec(*place.spec[:-1], None)
    specs = Operands(
        [spec] * len(operands.arrays),
        [spec] * len(operands.scales),
        [of_rows] * len(operands.columns),
        [PartitionSpec()] * len(operands.scalars),
    )

    if AxisType.Explicit in place.mesh.axis_types:  # types of arrays are as these say
        put = functools.partial(NamedSharding, place.mesh)
        operands = jax.tree.map(jax.sharding.reshard, operands, jax.tree.map(put, specs))

    def on_shard(operands: Operands) -> list[jax.Array]:
        shape = operands.arrays[0].shape
        starts = jnp.stack([place.index_of(axis) * n for axis, n in enumerate(shape)])
        return leaf(operands, starts, interpret=interpret)

    return jax.shard_map(
        on_shard,
        mesh=place.mesh,
        in_specs=(specs,),
        out_specs=[spec] * len(leaf.kernel.writes),
        check_vma=False,
    )(operands)


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)
