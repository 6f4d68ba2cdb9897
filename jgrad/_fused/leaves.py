"""The operations of a step that one kernel computes: from a leaf's codes to its new ones.

A *kernel* starts from what is decoded and takes every elementwise operation that depends on it, as
far as no sum over elements stands in between. What these operations read is computed in it again,
as far as that is elementwise too: a clipped gradient, one in float32.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jgrad._fused.graph import Graph, Operation
from jgrad._quantized.regions import DECODE, ENCODE, ENCODE_IF
from jgrad._trees.blocks import SIZE

CODINGS = (ENCODE, ENCODE_IF)

# Of each element by itself, and in a kernel as well as outside of it.
_ARITHMETIC = "add add_any sub mul div neg abs sqrt rsqrt square integer_pow max min clamp sign"
_LOGIC = (
    "select_n eq ne lt le gt ge and or xor not is_finite shift_left shift_right_logical "
    "shift_right_arithmetic convert_element_type bitcast_convert_type"
)
_SAME_VALUE = "copy copy_p stop_gradient optimization_barrier sharding_constraint"
ELEMENTWISE = frozenset(f"{_ARITHMETIC} {_LOGIC} {_SAME_VALUE}".split())
SAME_VALUE = frozenset(_SAME_VALUE.split())

_KINDS: tuple[Any, ...] = np.float32, jnp.bfloat16, np.int32, np.uint32  # of arrays in memory
_IN_MEMORY = frozenset(map(np.dtype, _KINDS))
_STORED = _IN_MEMORY | {np.dtype(np.int8), np.dtype(np.uint8)}
_DTYPES = _STORED | {np.dtype(np.uint16), np.dtype(bool)}
KEYS, FLAG = slice(3, 6), 6  # inputs of a region that encodes


class Kernel(NamedTuple):
    """What one kernel computes.

    Attributes:
      shape: of the leaf.
      operations: in order.
      arrays: what it reads of the leaf's shape.
      columns: what it reads with one element for each row.
      scalars: what it reads with one element.
      scales: the old scales.
      keys: what its random bits are a hash of; see `random_bits`.
      outputs: what it writes of the leaf's shape.
      new_scales: the scales that it writes.
    """

    shape: tuple[int, ...]
    operations: list[Operation]
    arrays: list[int]
    columns: list[int]
    scalars: list[int]
    scales: list[int]
    keys: list[tuple[int, ...]]
    outputs: list[int]
    new_scales: list[int]

    @property
    def reads(self) -> list[int]:
        """All that it reads."""
        keys = [x for key in self.keys for x in key]
        return [*self.arrays, *self.columns, *self.scalars, *self.scales, *keys]

    @property
    def writes(self) -> list[int]:
        """All that it writes."""
        return [*self.outputs, *self.new_scales]

    def unwritable(self, graph: Graph) -> list[int]:
        """What it would read or write, of a dtype that is not in memory."""
        return [x for x in (*self.arrays, *self.outputs) if graph.dtype(x) not in _STORED]


class Plan(NamedTuple):
    """A step, cut into what is computed before all kernels, the kernels, and what comes after.

    Attributes:
      before: operations.
      kernels: none of which reads what another one writes.
      after: operations.
    """

    before: list[Operation]
    kernels: list[Kernel]
    after: list[Operation]


def plan(graph: Graph, replacing: Set[int]) -> Plan:
    """Which operations are in kernels; `replacing` are results that replace an argument."""
    return _Planner(graph, replacing).plan()


class _Planner:
    def __init__(self, graph: Graph, replacing: Set[int]) -> None:
        self.graph, self.replacing = graph, replacing
        self.place = {id(op): i for i, op in enumerate(graph.operations)}
        self.leaf: dict[int, int] = {}  # of a value, by the place of one of its operations
        self.parent: dict[int, int] = {}  # leaves that turned out to be the same
        self.members: dict[int, Operation] = {}
        self.is_late: set[int] = set()

    def plan(self) -> Plan:
        for op in self.graph.operations:
            self._visit(op)
        leaves: dict[int, list[Operation]] = {}
        for place, op in self.members.items():
            leaves.setdefault(self._root(place), []).append(op)
        read_outside = self._read_outside()
        kernels = []
        inside: set[int] = set()
        for operations in leaves.values():
            if any(op.name in CODINGS for op in operations):
                operations, last = self._without_last(operations, read_outside)
                self.is_late |= {x for op in last for x in op.outputs}
                read_outside |= {x for op in last for x in op.inputs}
                kernels.append(self._kernel(operations, read_outside))
                inside |= {id(op) for op in operations}
        rest = [op for op in self.graph.operations if id(op) not in inside]
        after = [op for op in rest if self.is_late & set(op.outputs)]
        before = [op for op in rest if not self.is_late & set(op.outputs)]
        needed = set(self.graph.outputs)
        after = _live(after, needed)
        needed |= {x for kernel in kernels for x in kernel.reads}
        return Plan(_live(before, needed), kernels, after)

    # ---- which operations depend on what is decoded ----------------------------------------------

    def _visit(self, op: Operation) -> None:
        known = [x for x in op.inputs if x in self.leaf]
        if self.is_late & set(op.inputs):
            self.is_late |= set(op.outputs)
        elif op.name == DECODE and self._is_leaf(self.graph.shape(op.inputs[0])):
            self._add(op, known)
        elif known and self._is_inside(op):
            self._add(op, known)
            if op.name in CODINGS:
                self.is_late |= set(op.outputs)
        elif known:
            self.is_late |= set(op.outputs)

    def _add(self, op: Operation, known: Sequence[int]) -> None:
        place = self.place[id(op)]
        self.members[place], self.parent[place] = op, place
        for x in known:
            self.parent[self._root(self.leaf[x])] = place
        if op.name not in CODINGS:
            self.leaf |= dict.fromkeys(op.outputs, place)

    def _root(self, place: int) -> int:
        while self.parent[place] != place:
            self.parent[place] = place = self.parent[self.parent[place]]
        return place

    def _is_inside(self, op: Operation) -> bool:
        shape = self._shape_of(op)
        if not self._is_leaf(shape):
            return False
        if op.name in CODINGS:
            return op.inputs[2] in self.leaf
        return self._is_elementwise(op, shape)

    def _shape_of(self, op: Operation) -> tuple[int, ...]:
        return self.graph.shape(op.outputs[0])

    def _is_elementwise(self, op: Operation, shape: tuple[int, ...]) -> bool:
        """Whether it is of elements, of arrays of one shape and of scalars."""
        types = [*op.inputs, *op.outputs]
        if op.name not in ELEMENTWISE or len(op.outputs) != 1 or self._shape_of(op) != shape:
            return False
        if self._has_16_bits(op):
            return False
        narrow = (), (*shape[:-1], 1), (1,) * len(shape)
        fits = all(self.graph.shape(x) in (shape, *narrow) for x in types)
        return fits and all(self.graph.dtype(x) in _DTYPES for x in types)

    def _has_16_bits(self, op: Operation) -> bool:
        """Whether it is of integers of 16 bits, but for their way from 32 bits to bfloat16."""
        inputs = [self.graph.dtype(x) for x in op.inputs]
        output = self.graph.dtype(op.outputs[0])
        if op.name == "convert_element_type" and np.uint16 not in inputs:
            return False
        if op.name == "bitcast_convert_type" and output == jnp.bfloat16:
            return False
        return np.uint16 in (*inputs, output)

    @staticmethod
    def _is_leaf(shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and 0 not in shape and shape[-1] % SIZE == 0

    # ---- what a kernel reads and writes ----------------------------------------------------------

    def _read_outside(self) -> set[int]:
        """What some operation that is in no kernel reads, or the caller."""
        inside = set(map(id, self.members.values()))
        found = set(self.graph.outputs)
        for op in self.graph.operations:
            found.update(() if id(op) in inside else op.inputs)
        return found

    def _without_last(
        self, operations: list[Operation], read_outside: Set[int]
    ) -> tuple[list[Operation], list[Operation]]:
        """The operations, and apart from them those at the end that cost less outside.

        There XLA fuses them with what reads their results. They are computed from what is written
        anyway, or from one array in the place of the one that would be written.
        """
        kept: list[Operation] = []
        last: list[Operation] = []
        written, read_inside = set(read_outside), set[int]()
        for op in reversed(operations):
            inputs = {x for x in op.inputs if x in self.leaf}
            is_last = not read_inside.union(self.replacing) & set(op.outputs)
            if (
                is_last
                and inputs
                and op.name not in CODINGS
                and (inputs <= written or (len(inputs) == 1 and self._is_as_small(op, *inputs)))
            ):
                last.append(op)
                written |= inputs
            else:
                kept.append(op)
                read_inside |= inputs
        return kept[::-1], last

    def _is_as_small(self, op: Operation, x: int) -> bool:
        dtype = self.graph.dtype(x)
        most = self.graph.dtype(op.outputs[0]).itemsize
        return dtype in _IN_MEMORY and dtype.itemsize <= most

    def _kernel(self, operations: list[Operation], read_outside: set[int]) -> Kernel:
        shape = self._shape_of(operations[0])
        kernel = Kernel(shape, [], [], [], [], [], [], [], [])
        seen: set[int] = set()
        own = {x for op in operations for x in op.outputs}
        for op in operations:
            for x in _elements(op):
                if x not in own:
                    self._read(x, kernel, seen)
            kernel.operations.append(op)
            for scale in op.inputs[1:2] if op.name in (DECODE, ENCODE_IF) else ():
                if scale not in kernel.scales:
                    kernel.scales.append(scale)
            if op.name in CODINGS:
                if op.inputs[KEYS] not in kernel.keys:
                    kernel.keys.append(op.inputs[KEYS])
                kernel.outputs.append(op.outputs[0])
                kernel.new_scales.append(op.outputs[1])
            else:
                kernel.outputs.extend(x for x in op.outputs if x in read_outside)
        return kernel

    def _read(self, x: int, kernel: Kernel, seen: set[int]) -> None:
        """Adds what computes a value that depends on nothing decoded, or the value itself."""
        if x in seen:
            return
        seen.add(x)
        if self.graph.is_literal(x):
            return  # written out
        op, shape = self.graph.maker.get(x), kernel.shape
        if self.graph.shape(x) == () or self.graph.shape(x) == (1,) * len(shape):
            kernel.scalars.append(x)
        elif self.graph.shape(x) != shape:
            kernel.columns.append(x)
        elif op is not None and self._is_computed_inside(op, shape):
            for y in op.inputs:
                self._read(y, kernel, seen)
            kernel.operations.append(op)
        else:
            kernel.arrays.append(x)

    def _is_computed_inside(self, op: Operation, shape: tuple[int, ...]) -> bool:
        if op.name == "iota":
            return self.graph.dtype(op.outputs[0]) in _IN_MEMORY
        if op.name == "broadcast_in_dim":
            return len(op.inputs) == 1 and self._is_narrow(op, shape)
        return self._is_elementwise(op, shape)

    def _is_narrow(self, op: Operation, shape: tuple[int, ...]) -> bool:
        """Whether what is broadcast is a scalar, or a number for each row."""
        x = op.inputs[0]
        of, to = self.graph.shape(x), op.params["broadcast_dimensions"]
        if self.graph.dtype(x) not in _DTYPES:
            return False
        if all(n == 1 for n in of):
            return of == () or len(of) == len(shape)
        return of == (*shape[:-1], 1) and tuple(to) == tuple(range(len(shape)))


def _elements(op: Operation) -> Iterator[int]:
    """What an operation reads element by element."""
    if op.name == DECODE:
        yield op.inputs[0]
    elif op.name == ENCODE:
        yield op.inputs[2]
    elif op.name == ENCODE_IF:
        yield from (op.inputs[i] for i in (0, 2, FLAG))
    else:
        yield from op.inputs


def _live(operations: list[Operation], needed: set[int]) -> list[Operation]:
    """Those that something needs; what they read is added to `needed`."""
    live = []
    for op in reversed(operations):
        if needed & set(op.outputs):
            live.append(op)
            needed |= set(op.inputs)
    return live[::-1]
