"""Where the leaves of a tree are in packed buffers: static, hashable, and known without arrays.

A buffer is an array of shape (blocks, width). Each layer of a leaf starts on a block of its own, so
that a number per layer (a norm, a rate, a decay) is a column of one number per block. Behind the
last element of a layer is padding, always zero. A leaf too large to gain may stay unpacked, as a
buffer of its own shape.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jgrad._layers import layer_axes as axes_of
from jgrad._layers.layer_axes import Axes, LayerAxes
from jgrad._packed.row_order import RowOrder, Segment, assign_rows, item_shape
from jgrad._packed.shard import Shard
from jgrad._packed.spans import Span
from jgrad._trees import checks, trees
from jgrad._trees.blocks import SIZE
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

# Elements of a block. A wider block pads more: a transformer of 193 leaves by 1% at 128, 3% at 256,
# 9% at 512 and 19% at 1024; leaves of 16 x 16 by 0, 0, 100% and 300%. On two CPU cores Adam on 1000
# leaves of 32 x 32 takes the same time at each width. LAMB takes twice as long from 512 on, where
# the chunks of its norms leave the first-level cache (`rows`). A TPU's lanes are 128 wide, so a
# multiple of that. Unmeasured on accelerators. In 8 bits a row is what shares a scale.
WIDTH = SIZE

_SHOWN = 10  # leaves of a buffer that are printed

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where each leaf of a tree is in the buffers of a `Packed`.

    Attributes:
      structure: of the tree, in which None is a leaf.
      runs: the blocks of each leaf, or None for None.
      shapes: (name, shape) of each buffer, in the order in which JAX has them.
      share: None outside of `zero`; inside, the shard that says which rows of the buffers of these
        shapes are on this device.
      width: elements of a block.
      row_orders: (name, row order) of each buffer whose shards have whole matrices.

    Example:
      >>> packed = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> packed.layout.shapes
      (('float32', (2, 256)),)
      >>> packed.layout.tree()["w"].shape
      (3, 2)
    """

    structure: Any
    runs: tuple[Span | None, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    share: Shard | None = None
    row_orders: tuple[tuple[str, RowOrder], ...] = ()

    @property
    def width(self) -> int:
        """Elements of a block."""
        return WIDTH

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, *self._places))

    @property
    def _places(self) -> tuple[Any, ...]:
        """Everything but the structure of the tree."""
        return self.runs, self.shapes, self.share, self.row_orders

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # JAX compares at every call of a compiled function; mostly it is one object.
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return bool(self.structure == other.structure) and self._places == other._places

    @functools.cached_property
    def _within(self) -> dict[str, list[tuple[int, Span]]]:
        spans: dict[str, list[tuple[int, Span]]] = collections.defaultdict(list)
        for i, span in enumerate(self.runs):
            if span is not None:
                spans[span.buffer].append((i, span))
        for own in spans.values():
            # A leaf without elements starts where the next one does, and comes before it.
            own.sort(key=lambda pair: (pair[1].first, pair[1].num_blocks, pair[0]))
        return spans

    def within(self, name: str) -> list[tuple[int, Span]]:
        """The leaves of one buffer in the order in which they are there: positions and spans."""
        return self._within[name]

    def row_order(self, name: str) -> RowOrder | None:
        """The order of the rows of a buffer; None where leaves follow each other."""
        return dict(self.row_orders).get(name)

    def unpacked_leaf(self, name: str) -> int | None:
        """The position of the leaf that is this buffer, unpacked; None for a buffer of blocks."""
        (i, span), *_ = self.within(name)
        return i if span.is_unpacked else None

    def tree(self, dtypes: Mapping[str, Any] | None = None) -> PyTree:
        """Shapes and dtypes of what was packed; the dtypes of buffers where they are given."""
        given = dtypes or {}
        structs = [
            None
            if span is None
            else jax.ShapeDtypeStruct(span.layers.shape, given.get(span.buffer, span.dtype))
            for span in self.runs
        ]
        return self.structure.unflatten(structs)

    def is_part_of(self, other: "Layout") -> bool:
        """Whether each leaf is one of the other's at its position, in trees of any structure."""
        if self == other:
            return True
        pairs = list(zip(self.runs, other.runs, strict=False))
        same = all(own is None or (its and own.is_alike(its)) for own, its in pairs)
        return same and len(self.runs) == len(other.runs)

    # A copy is this very layout. Structures of nodes that are not JAX's own cannot be pickled, and
    # hashes of strings differ from process to process: a tree of numbers and plain data go instead.

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self

    def __reduce__(self) -> Any:
        numbers = self.structure.unflatten(range(len(self.runs)))
        spans = [
            span and (*span[:2], dataclasses.astuple(span.layers), *span[3:]) for span in self.runs
        ]
        shard = self.share and tuple(self.share)
        orders = [(name, x.shards, tuple(map(tuple, x.segments))) for name, x in self.row_orders]
        return Layout._rebuilt, (numbers, spans, self.shapes, shard, self.width, orders)

    @staticmethod
    def _rebuilt(
        numbers: PyTree, spans: list[Any], shapes: Any, shard: Any, width: int, orders: Any = ()
    ) -> "Layout":
        if width != WIDTH:
            raise ValueError(f"Layout: blocks of {width} elements, expected {WIDTH}.")
        structure = trees.flatten(numbers)[1]
        runs = tuple(x and Span(*x)._replace(layers=LayerAxes(*x[2])) for x in spans)
        row_orders = tuple(
            (name, RowOrder(n, tuple(Segment(*x) for x in rows))) for name, n, rows in orders
        )
        return Layout(structure, runs, shapes, shard and Shard(*shard), row_orders)

    def differences(self, other: "Layout", own_name: str, other_name: str) -> Iterator[str]:
        """Where two layouts differ: a phrase for each place."""
        found = False
        for phrase in trees.differences(self.tree(), other.tree(), own_name, other_name):
            found = True
            yield f"{phrase} packed"
        if found or self.structure != other.structure:
            return
        for path, *pair in zip(trees.paths(self.tree()), self.runs, other.runs, strict=True):
            own, its = map(_described, pair)
            if own != its:
                found = True
                yield f"{own_name} has {own}{checks.at(path)} where {other_name} has {its}"
        if not found:
            yield f"{own_name} has buffers {dict(self.shapes)}, {other_name} {dict(other.shapes)}"

    def __repr__(self) -> str:
        spans = [span for span in self.runs if span is not None]
        elements = sum(span.size for span in spans)
        room = sum(math.prod(shape) for _, shape in self.shapes)
        padding = 0 if room == 0 else 100 * (1 - elements / room)
        count = "1 leaf" if len(spans) == 1 else f"{len(spans)} leaves"
        lines = [f"{count}, {elements:,} elements, {padding:.1f}% padding"]
        unpacked = []
        for name, shape in self.shapes:
            own = [span for _, span in self.within(name)]
            if own[0].is_unpacked:
                unpacked += own
                continue
            lines.append(f"  {name} {shape}")
            lines += _listed(own)
        return "\n".join([*lines, *(["  unpacked", *_listed(unpacked)] if unpacked else [])])


Layout.__module__ = "jgrad"  # where users import it from, and what a pickle names


def _described(span: Span | None) -> str:
    """All that a user gave: where a span starts depends on the leaves before it."""
    if span is None:
        return "None"
    axes = f" stacked over axes {span.layers.stacked}" if span.layers.stacked else ""
    kind = "unpacked" if span.is_unpacked else "packed"
    return f"{kind} {span.dtype} of shape {span.layers.shape}{axes}"


def _listed(spans: list[Span]) -> list[str]:
    more = [f"    and {len(spans) - _SHOWN} more"] if len(spans) > _SHOWN else []
    return [f"    {span}" for span in spans[:_SHOWN]] + more


def layout_of(
    function: str,
    tree: PyTree,
    layer_axes: PyTree = None,
    multiple_of: int = 1,
    max_size: int | None = None,
    matrices: Sequence[bool] | None = None,
    *,
    others: bool = False,
) -> tuple[Layout, list[Any]]:
    """The layout for a tree of floating arrays, and its leaves; with `others`, for any arrays.

    Leaves of more than `max_size` elements stay unpacked, and so do others than floating ones. The
    layers of leaves with True in `matrices` are whole in each of `multiple_of` shards.
    """
    arg = ArgLeaves.from_tree(function, "tree", tree).with_arrays()
    for i, x in enumerate(arg.leaves):
        if not (x is None or checks.is_inexact(x) or (others and checks.is_numeric(x))):
            arg.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = axes_of.read_layer_axes(function, layer_axes)
    stacked = ArgLeaves.from_prefix(function, "layer_axes", axes, "tree", tree)
    not_sharded = arg._replace(name="mesh_axes", leaves=[Axes()] * len(arg.leaves))
    layers = axes_of.of_leaves(not_sharded, stacked, arg)

    spans: list[Span | None] = [None] * len(arg.leaves)
    packed: list[tuple[int, Span]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (x, path, own) in enumerate(zip(arg.leaves, arg.paths(), layers, strict=True)):
        if x is None:
            continue
        large = max_size is not None and math.prod(x.shape) > max_size
        if large or not checks.is_inexact(x):
            name = f"leaf {i}"  # not the path: two leaves may have one
            spans[i] = Span(path, np.dtype(x.dtype), own, name, None, 0)
            shapes[name] = x.shape
            continue
        blocks_per_layer = -(-own.layer_size // WIDTH)
        packed.append((i, Span(path, np.dtype(x.dtype), own, x.dtype.name, 0, blocks_per_layer)))
    # Leaves that are alike are neighbours: XLA compiles equal pieces of work once.
    packed.sort(key=lambda pair: (pair[1].layers.shape, pair[1].layers.stacked))
    row_orders: dict[str, RowOrder] = {}
    for name in dict.fromkeys(span.buffer for _, span in packed):
        within = [(i, span) for i, span in packed if span.buffer == name]
        chosen = [matrices is not None and matrices[i] for i, _ in within]
        if any(chosen) and multiple_of > 1:
            starts, row_order = assign_rows([span for _, span in within], chosen, multiple_of)
            row_orders[name], rows = row_order, multiple_of * row_order.rows_per_shard
            _check_padding(arg, within, chosen, row_order)
        else:
            *starts, end = itertools.accumulate((x.num_blocks for _, x in within), initial=0)
            rows = -(-end // multiple_of) * multiple_of
        for start, (i, span) in zip(starts, within, strict=True):
            spans[i] = span._replace(start=start)
        shapes[name] = (rows, WIDTH)
    structure = trees.flatten(tree)[1]
    layout = Layout(
        structure,
        tuple(spans),
        tuple(sorted(shapes.items())),
        row_orders=tuple(sorted(row_orders.items())),
    )
    return layout, list(arg.leaves)


def _check_padding(
    arg: ArgLeaves, own: list[tuple[int, Span]], chosen: list[bool], row_order: RowOrder
) -> None:
    """No more than half of such a buffer is padding: some shape has too few matrices."""
    rows, used = (
        row_order.shards * row_order.rows_per_shard,
        sum(span.num_blocks for _, span in own),
    )
    if 2 * used >= rows:
        return
    wasted: dict[tuple[int, ...], list[int]] = {}
    for (i, span), is_matrix in zip(own, chosen, strict=True):
        if is_matrix:
            wasted.setdefault(item_shape(span), []).append(i)
    spans = dict(own)

    def padding(shape: tuple[int, ...]) -> int:
        first = spans[wasted[shape][0]]
        count = sum(spans[i].layers.num_layers for i in wasted[shape])
        return (-count % row_order.shards) * first.blocks_per_layer

    shape = max(wasted, key=padding)
    count = sum(spans[i].layers.num_layers for i in wasted[shape])
    problem = (
        f"{'1 matrix' if count == 1 else f'{count} matrices'} of shape {shape} for "
        f"{row_order.shards} shards: {100 * (rows - used) // rows}% of the buffer would be "
        "padding, expected at most half; shard over a smaller mesh axis, with a smaller "
        "`multiple_of`"
    )
    arg.fail(wasted[shape][0], ValueError, problem)
