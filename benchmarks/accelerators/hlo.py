"""What a compiled program moves, read from XLA's text of it (HLO).

XLA's own "bytes accessed" counts VMEM as if it were HBM, and of a branch the dearest. Here:

- A buffer counts when it is in HBM, by its shape: memory space 0. On a TPU, `S(1)` in a layout is
  VMEM and `S(6)` the memory of scalars; `S(5)` is the host's on both.
- An operation reads its operands and writes its results, once each. So does a kernel of Pallas
  (`tpu_custom_call`), whose results may be in the place of operands.
- A slice is read as the slice, and an array updated in place as the part that is updated: inside
  fusions, too.
- An asynchronous copy counts where it starts.
- The body of a loop counts as often as it runs.
- A conditional is its cheapest branch. What the dearest adds is counted beside it, as rare.

What is approximated: a kernel of Pallas counts whole operands and results, so one that reads or
writes a part is counted too high; what a fusion reads twice counts once; the padding of arrays to
tiles is left out; `scatter` counts as many bytes as it adds; a loop that does not count from 0 to a
constant counts once.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Operations that move nothing: a `-done` ends what its `-start` has begun.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
    *("copy-done", "slice-done", "async-update", "async-done", "call-done", "send-done"),
    *("all-gather-done", "all-reduce-done", "collective-permute-done", "recv-done"),
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "Sharding"}
# Operations that compute nothing: also a fusion of nothing else is a copy.
_MOVING = {
    *("copy", "transpose", "reshape", "concatenate", "pad"),
    *("slice", "dynamic-slice", "dynamic-update-slice"),
}
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?"
)

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_NAMED = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:body|to_apply|calls|called_computations?)=\{?%?([\w.-]+)")


class Array(NamedTuple):
    """Bytes of an array, and whether it is in HBM."""

    size: int
    in_hbm: bool
    is_scalar: bool


class Operation(NamedTuple):
    """A line of a computation.

    Attributes:
      name: of its result.
      kind: "fusion", "copy" and so on.
      results: its array, or those of a tuple.
      operands: names of operations in the same computation.
      number: the index of a parameter, the value of a constant that is an integer.
      rest: what stands behind the operands.
    """

    name: str
    kind: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    number: int | None
    rest: str

    @property
    def called(self) -> str:
        """The computation of a fusion, a loop or a call."""
        found = _CALLED.search(self.rest)
        return found[1] if found else ""


class Computation(NamedTuple):
    """Operations by name, in their order; the last one is not always the root."""

    operations: dict[str, Operation]
    root: str


@dataclasses.dataclass
class Traffic:
    """Of one run of a program.

    Attributes:
      bytes: read from HBM and written to it.
      rare: bytes that the dearest branches of conditionals add to those of the cheapest.
      copied: of the bytes, those from HBM to HBM with which nothing is computed.
      kernels: operations that are launched; asynchronous copies and, outside fusions, those on
        scalars are none.
      products: of matrices.
    """

    bytes: int = 0
    rare: int = 0
    copied: int = 0
    kernels: int = 0
    products: int = 0

    def add(self, other: "Traffic", times: int = 1) -> None:
        """What another program does, so many times."""
        for field in dataclasses.fields(self):
            sums = getattr(self, field.name) + times * getattr(other, field.name)
            setattr(self, field.name, sums)


def traffic(text: str) -> Traffic:
    """Of a compiled program."""
    program = _Program(text)
    return program.traffic(program.entry)


def collectives(text: str) -> dict[str, int]:
    """How many of each kind the text has: those of rare branches too, and those of loops once."""
    program = _Program(text)
    kinds = (x.kind for own in program.computations.values() for x in own.operations.values())
    found = collections.Counter(x[1] for kind in kinds if (x := _COLLECTIVE.fullmatch(kind)))
    return dict(sorted(found.items()))


class Placed(NamedTuple):
    """How many collectives of each kind a program has.

    Attributes:
      outside: of conditionals.
      branches: in each branch of a conditional that has any, those of conditionals in it too.
    """

    outside: dict[str, int]
    branches: list[dict[str, int]]


def collectives_by_place(text: str) -> Placed:
    """As `collectives`, outside of branches and in each of them.

    What XLA for TPUs does beside several fusions stands in each of these, as one chain: here it
    counts once.
    """
    program = _Program(text)
    outside = list(program.reached(program.entry, into_branches=False))
    branches = [
        _counted(program.reached(name, into_branches=True))
        for x in outside
        for name in _branches(x)
    ]
    return Placed(_counted(outside), [x for x in branches if x])


def _counted(operations: Iterable[Operation]) -> dict[str, int]:
    kinds = {}
    for x in operations:
        if found := _COLLECTIVE.fullmatch(x.kind):
            chain = re.search(r'channel_id=\d+.*chain_id="\d+"', x.rest)
            kinds[chain[0] if chain else x.name] = found[1]
    return dict(sorted(collections.Counter(kinds.values()).items()))


def _branches(x: Operation) -> list[str]:
    """The computations of a conditional; of another operation none."""
    if x.kind != "conditional":
        return []
    if found := re.search(r"branch_computations=\{([^}]*)\}", x.rest):
        return _OPERAND.findall(found[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", x.rest)


def _arrays(text: str) -> tuple[Array, ...]:
    """Those of a type: `f32[8,128]{1,0:T(8,128)S(1)}`, or a tuple of such."""
    found = []
    for letters, bits, shape, layout in _ARRAY.findall(text):
        size = int(bits) if bits else 8 if letters == "pred" else 0  # of a token nothing
        lengths = [int(x) for x in shape.split(",") if x]
        nbytes = math.prod(lengths) * size // 8
        found.append(Array(nbytes, not re.search(r"S\([1-9]", layout), not lengths))
    return tuple(found)


def _closing(text: str) -> int:
    """Where the parenthesis closes that the text starts with."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at
    raise ValueError(f"a parenthesis that does not close: {text[:80]}")


def _operation(name: str, text: str) -> Operation | None:
    """From what stands behind `name =`: the type, the kind, operands in parentheses, the rest."""
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    kind, _, behind = text[end:].strip().partition("(")
    if not re.fullmatch(r"[\w-]+", kind):
        return None
    close = _closing("(" + behind) - 1
    inside, rest = behind[:close], behind[close:]
    number = int(inside) if inside.isdecimal() else None
    operands = tuple(_OPERAND.findall(inside))
    return Operation(name, kind, _arrays(text[:end]), operands, number, rest)


class _Program:
    """The computations of a text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        own: dict[str, Operation] = {}
        name = root = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                name, root, own = head[2], "", {}
                self.entry = name if head[1] else self.entry
            elif line.startswith("}") and name:
                self.computations[name] = Computation(own, root or next(reversed(own)))
                name = ""
            elif name and (found := _NAMED.match(line)):
                operation = _operation(found[2], found[3])
                if operation:
                    own[found[2]] = operation
                    root = found[2] if found[1] else root
        self._traffic = functools.cache(self._uncached_traffic)
        self._users = functools.cache(self._uncached_users)

    def reached(self, name: str, *, into_branches: bool) -> Iterator[Operation]:
        """The operations of a computation, of loops, fusions and calls in it, and of branches."""
        for x in self.computations[name].operations.values():
            yield x
            for called in (x.called, *(_branches(x) if into_branches else ())):
                if called in self.computations:
                    yield from self.reached(called, into_branches=into_branches)

    def traffic(self, name: str) -> Traffic:
        return self._traffic(name)

    def _uncached_traffic(self, name: str) -> Traffic:
        own = self.computations[name].operations
        total = Traffic()
        for x in own.values():
            if x.kind == "conditional":
                total.add(self._conditional(x))
            elif x.kind == "while":
                total.add(self.traffic(x.called), self._trips(x))
            elif x.kind in ("call", "async-start") and x.called in self.computations:
                total.add(self.traffic(x.called))
            elif x.kind not in _FREE and not _is_free_call(x):
                total.add(self._one(own, x))
        return total

    def _conditional(self, x: Operation) -> Traffic:
        branches = sorted((self.traffic(name) for name in _branches(x)), key=lambda y: y.bytes)
        total = Traffic(rare=branches[-1].bytes - branches[0].bytes, kernels=1)
        total.add(branches[0])
        return total

    def _trips(self, x: Operation) -> int:
        """As XLA says, or by the constant up to which the condition counts."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', x.rest):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.-]+)", x.rest)
        own = self.computations[condition[1]] if condition else None
        if own and "direction=LT" in own.operations[own.root].rest:
            end = own.operations[own.operations[own.root].operands[1]]
            if end.kind == "constant" and end.number is not None:
                return end.number
        return 1

    def _one(self, own: dict[str, Operation], x: Operation) -> Traffic:
        """An operation that is no call."""
        operands = [y for name in x.operands if name in own for y in own[name].results]
        if x.kind in ("copy-start", "slice-start"):
            # The result of the first is (to, from, context), of the second ((from), to, context).
            to = x.results[0 if x.kind == "copy-start" else 1]
            sides = [y.in_hbm for y in (to, operands[0])]
            moved = to.size * sum(sides)
            return Traffic(moved, copied=moved if all(sides) else 0)
        if x.kind == "fusion":
            moved = self._written(x.called, x.results) + self._read(x, own)
        elif x.kind in ("slice", "dynamic-slice", "gather"):
            moved = x.results[0].size * (x.results[0].in_hbm + operands[0].in_hbm)
        elif x.kind in ("dynamic-update-slice", "scatter"):
            update = operands[1 if x.kind == "dynamic-update-slice" else 2]
            moved = update.size * (update.in_hbm + operands[0].in_hbm)
        else:
            moved = sum(y.size for y in (*x.results, *operands) if y.in_hbm)
        within = all(y.in_hbm or y.is_scalar for y in (*x.results, *operands))
        on_scalars = x.kind not in ("fusion", "custom-call") and all(
            y.is_scalar for y in (*x.results, *operands)
        )
        return Traffic(
            moved,
            copied=moved if within and self._moves(x) else 0,
            kernels=0 if on_scalars else 1,
            products=self._products(x),
        )

    def _moves(self, x: Operation) -> bool:
        """Whether it computes nothing."""
        if x.kind != "fusion":
            return x.kind in _MOVING
        inner = self.computations[x.called].operations.values()
        return all(y.kind in _FREE or self._moves(y) for y in inner)

    def _products(self, x: Operation) -> int:
        if x.kind == "fusion":
            return sum(map(self._products, self.computations[x.called].operations.values()))
        is_call = x.kind == "custom-call" and 'custom_call_target="__cublas' in x.rest
        return int(x.kind in ("dot", "convolution") or is_call)

    def _uncached_users(self, name: str) -> dict[str, list[Operation]]:
        users: dict[str, list[Operation]] = collections.defaultdict(list)
        for x in self.computations[name].operations.values():
            for operand in dict.fromkeys(x.operands):
                users[operand].append(x)
        return users

    def _read(self, x: Operation, own: dict[str, Operation]) -> int:
        """Bytes of HBM that a fusion reads."""
        names = self._parameters(x.called)
        total = 0
        for index, operand in enumerate(x.operands):
            whole = sum(y.size for y in own[operand].results if y.in_hbm)
            total += min(whole, self._read_of(x.called, names[index], whole)) if whole else 0
        return total

    def _parameters(self, name: str) -> dict[int | None, str]:
        own = self.computations[name].operations.values()
        return {x.number: x.name for x in own if x.kind == "parameter"}

    def _read_of(self, name: str, array: str, whole: int) -> int:
        """Of an array inside a fused computation, the bytes that its users read."""
        total = 0
        for x in self._users(name)[array]:
            if x.kind in ("slice", "dynamic-slice", "gather") and x.operands[0] == array:
                total += sum(y.size for y in x.results)
            elif x.kind in ("dynamic-update-slice", "scatter") and x.operands[0] == array:
                pass  # in place: what is not updated is not read
            elif x.kind in ("bitcast", "reshape"):
                total += self._read_of(name, x.name, whole)
            elif x.kind == "fusion":
                names = self._parameters(x.called)
                ways = (names[i] for i, y in enumerate(x.operands) if y == array)
                total += sum(self._read_of(x.called, y, whole) for y in ways)
            else:
                return whole
        return total

    def _written(self, name: str, results: tuple[Array, ...]) -> int:
        """Bytes of HBM that a fusion writes."""
        return sum(
            min(result.size, self._written_of(name, root))
            for result, root in zip(results, self._roots(name), strict=True)
            if result.in_hbm
        )

    def _roots(self, name: str) -> Iterator[str]:
        """The results of a fused computation."""
        own = self.computations[name]
        root = own.operations[own.root]
        yield from root.operands if root.kind == "tuple" else [own.root] * len(root.results)

    def _written_of(self, name: str, array: str) -> float:
        """Bytes of a result: all of them, or those of an update in place."""
        own = self.computations[name].operations
        x = own[array]
        if x.kind in ("bitcast", "reshape"):
            return self._written_of(name, x.operands[0])
        if x.kind in ("dynamic-update-slice", "scatter"):
            update = own[x.operands[1 if x.kind == "dynamic-update-slice" else 2]]
            return sum(y.size for y in update.results)
        if x.kind == "fusion" and len(x.results) == 1:
            (root,) = self._roots(x.called)
            return self._written_of(x.called, root)
        return math.inf


def _is_free_call(x: Operation) -> bool:
    target = re.search(r'custom_call_target="([^"]*)"', x.rest)
    return x.kind == "custom-call" and bool(target) and target[1] in _FREE_CALLS
