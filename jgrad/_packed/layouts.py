"""Where the leaves of a tree are in packed buffers: static, hashable, and known without arrays.

A buffer is an array of shape (blocks, width). Each layer of a leaf starts on a block of its own, so
that a number per layer (a norm, a rate, a decay) is a column of one number per block. Behind the
last element of a layer is padding, always zero. A leaf too large to gain may stay unpacked, as a
buffer of its own shape.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jgrad._layers.layer_axes import LayerAxes
from jgrad._packed.row_order import RowOrder, Segment
from jgrad._packed.shard import Shard
from jgrad._packed.spans import Span
from jgrad._trees import checks, trees
from jgrad._trees.blocks import SIZE
from jgrad._trees.renamed import private_attribute
from jgrad._trees.trees import PyTree

# Elements of a block. A wider block pads more: a transformer of 193 leaves by 1% at 128, 3% at 256,
# 9% at 512 and 19% at 1024; leaves of 16 x 16 by 0, 0, 100% and 300%. On two CPU cores Adam on 1000
# leaves of 32 x 32 takes the same time at each width. LAMB takes twice as long from 512 on, where
# the chunks of its norms leave the first-level cache (`rows`). A TPU's lanes are 128 wide, so a
# multiple of that. Unmeasured on accelerators. In 8 bits a row is what shares a scale.
WIDTH = SIZE

_SHOWN = 10  # leaves of a buffer that are printed
APART = " small"  # how the names of buffers end that have small leaves alone


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where each leaf of a tree is in the buffers of a `Packed`.

    Attributes:
      shapes: (name, shape) of each buffer, in the order in which JAX has them.
      width: elements of a block.

    Example:
      >>> packed = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> packed.layout.shapes
      (('float32', (2, 256)),)
      >>> packed.layout.tree()["w"].shape
      (3, 2)
    """

    _structure: Any  # of the tree, in which None is a leaf
    _spans: tuple[Span | None, ...]  # the blocks of each leaf, or None for None
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    _shard: Shard | None = None  # inside `zero`, the rows that this device has
    _row_orders: tuple[tuple[str, RowOrder], ...] = ()  # where shards have whole matrices

    @property
    def width(self) -> int:
        """Elements of a block."""
        return WIDTH

    def tree(self, dtypes: Mapping[str, Any] | None = None) -> PyTree:
        """Shapes and dtypes of what was packed, None for None.

        Where dtypes of buffers are given, the leaves have these; None for a dtype of None.
        """
        of_buffers = dtypes or {}
        structs = [
            None
            if span is None or (dtype := of_buffers.get(span.buffer, span.dtype)) is None
            else jax.ShapeDtypeStruct(span.layers.shape, dtype)
            for span in self._spans
        ]
        return self._structure.unflatten(structs)

    def __jgrad_differences__(self, other: "Layout", name: str, other_name: str) -> Iterator[str]:
        """What `trees.differences` says of two packed trees."""
        return differences(self, other, name, other_name)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self._structure, *self._places))

    @property
    def _places(self) -> tuple[Any, ...]:
        """Everything but the structure of the tree."""
        return self._spans, self.shapes, self._shard, self._row_orders

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # JAX compares at every call of a compiled function; mostly it is one object.
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return bool(self._structure == other._structure) and self._places == other._places

    @functools.cached_property
    def _by_buffer(self) -> dict[str, list[tuple[int, Span]]]:
        buffers: dict[str, list[tuple[int, Span]]] = collections.defaultdict(list)
        for i, span in enumerate(self._spans):
            if span is not None:
                buffers[span.buffer].append((i, span))
        for pairs in buffers.values():
            # A leaf without elements starts where the next one does, and comes before it.
            pairs.sort(key=lambda pair: (pair[1].first, pair[1].num_blocks, pair[0]))
        return buffers

    # A copy is this very layout. Structures of nodes that are not JAX's own cannot be pickled, and
    # hashes of strings differ from process to process: a tree of numbers and plain data go instead.

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self

    def __reduce__(self) -> Any:
        numbers = self._structure.unflatten(range(len(self._spans)))
        spans = [
            span and (*span[:2], dataclasses.astuple(span.layers)[:3], *span[3:])
            for span in self._spans
        ]
        shard = self._shard and tuple(self._shard)
        orders = [(name, x.shards, tuple(map(tuple, x.segments))) for name, x in self._row_orders]
        return Layout._rebuilt, (numbers, spans, self.shapes, shard, self.width, orders)

    @staticmethod
    def _rebuilt(
        numbers: PyTree, spans: list[Any], shapes: Any, shard: Any, width: int, orders: Any = ()
    ) -> "Layout":
        if width != WIDTH:
            raise ValueError(f"Layout: blocks of {width} elements, expected {WIDTH}.")
        structure = trees.flatten(numbers)[1]
        rebuilt = tuple(x and Span(*x)._replace(layers=LayerAxes(*x[2])) for x in spans)
        row_orders = tuple(
            (name, RowOrder(n, tuple(Segment(*x) for x in rows))) for name, n, rows in orders
        )
        return Layout(structure, rebuilt, shapes, shard and Shard(*shard), row_orders)

    def __repr__(self) -> str:
        spans = [span for span in self._spans if span is not None]
        elements = sum(span.size for span in spans)
        room = sum(math.prod(shape) for _, shape in self.shapes)
        padding = 0 if room == 0 else 100 * (1 - elements / room)
        count = "1 leaf" if len(spans) == 1 else f"{len(spans)} leaves"
        lines = [f"{count}, {elements:,} elements, {padding:.1f}% padding"]
        unpacked = []
        for name, shape in self.shapes:
            in_buffer = [span for _, span in within(self, name)]
            if in_buffer[0].is_unpacked:
                unpacked += in_buffer
                continue
            lines.append(f"  {name} {shape}")
            lines += _listed(in_buffer)
        return "\n".join([*lines, *(["  unpacked", *_listed(unpacked)] if unpacked else [])])


Layout.__module__ = "jgrad"  # where users import it from, and what a pickle names


# ---- what the library asks a layout, and its users need not know -------------------------------


def structure(layout: Layout) -> Any:
    """That of the tree, in which None is a leaf."""
    return layout._structure


def spans(layout: Layout) -> tuple[Span | None, ...]:
    """The blocks of each leaf, or None for None."""
    return layout._spans


def shard(layout: Layout) -> Shard | None:
    """Which rows of the buffers are on this device; None outside of `zero`."""
    return layout._shard


def within(layout: Layout, name: str) -> list[tuple[int, Span]]:
    """The leaves of one buffer in the order in which they are there: positions and spans."""
    return layout._by_buffer[name]


def row_order(layout: Layout, name: str) -> RowOrder | None:
    """The order of the rows of a buffer; None where leaves follow each other."""
    return dict(layout._row_orders).get(name)


def unpacked_leaf(layout: Layout, name: str) -> int | None:
    """The position of the leaf that is this buffer, unpacked; None for a buffer of blocks."""
    (i, span), *_ = within(layout, name)
    return i if span.is_unpacked else None


def with_structure(layout: Layout, structure: Any) -> Layout:
    """The same places, for another tree with the same leaves."""
    return dataclasses.replace(layout, _structure=structure)


def with_shard(layout: Layout, shard: Shard | None) -> Layout:
    """The same places, with what says which rows of the buffers are on this device."""
    return dataclasses.replace(layout, _shard=shard)


def with_places(
    layout: Layout,
    spans: Sequence[Span | None],
    shapes: Mapping[str, tuple[int, ...]],
    row_orders: Mapping[str, RowOrder],
) -> Layout:
    """The same tree in other places of buffers of other shapes; equal layouts are one object."""
    orders = {**dict(layout._row_orders), **row_orders}
    places = tuple(spans), tuple(sorted(shapes.items())), tuple(sorted(orders.items()))
    new = Layout(layout._structure, *places[:2], layout._shard, places[2])
    return layout if new == layout else new


def is_part_of(layout: Layout, other: Layout) -> bool:
    """Whether each leaf is one of the other's at its position, in trees of any structure."""
    if layout == other:
        return True
    pairs = list(zip(layout._spans, other._spans, strict=False))
    same = all(ours is None or (its and ours.is_alike(its)) for ours, its in pairs)
    return same and len(layout._spans) == len(other._spans)


def differences(layout: Layout, other: Layout, name: str, other_name: str) -> Iterator[str]:
    """Where two layouts differ: a phrase for each place."""
    differ = False
    for phrase in trees.differences(layout.tree(), other.tree(), name, other_name):
        differ = True
        yield f"{phrase} packed"
    if differ or layout._structure != other._structure:
        return
    for path, *pair in zip(trees.paths(layout.tree()), layout._spans, other._spans, strict=True):
        ours, its = map(_described, pair)
        if ours != its:
            differ = True
            yield f"{name} has {ours}{checks.at(path)} where {other_name} has {its}"
    if not differ:
        yield f"{name} has buffers {dict(layout.shapes)}, {other_name} {dict(other.shapes)}"


def _method(f: Callable[..., Any]) -> Callable[[Layout], Any]:
    return lambda layout: functools.partial(f, layout)


# Until 0.6 users could read these of a layout.
_PRIVATE: dict[str, Callable[[Layout], Any]] = {
    "structure": structure,
    "runs": spans,
    "share": shard,
    "deals": lambda layout: layout._row_orders,
    "within": _method(within),
    "deal": _method(row_order),
    "unpacked_leaf": _method(unpacked_leaf),
    "is_part_of": _method(is_part_of),
    "differences": _method(differences),
}
for _name, _read in _PRIVATE.items():
    setattr(Layout, _name, private_attribute(_name, _read, "`tree()`, `shapes` or `width`"))


def _described(span: Span | None) -> str:
    """All that a user gave: where a span starts depends on the leaves before it."""
    if span is None:
        return "None"
    axes = f" stacked over axes {span.layers.stacked}" if span.layers.stacked else ""
    kind = "unpacked" if span.is_unpacked else "packed"
    kind += " apart," if span.buffer.endswith(APART) else ""
    return f"{kind} {span.dtype} of shape {span.layers.shape}{axes}"


def _listed(spans: list[Span]) -> list[str]:
    more = [f"    and {len(spans) - _SHOWN} more"] if len(spans) > _SHOWN else []
    return [f"    {span}" for span in spans[:_SHOWN]] + more
