"""Where the leaves of a tree are in packed buffers: static, hashable, and known without arrays.

A buffer is an array of shape (rows, width). Each layer of a leaf starts on its own row, so that
one number per layer (a norm, a learning rate, a weight decay) is a column of one number per row.
After the last element of a layer comes padding, which is always zero. A leaf that is too large to
gain from packing may stay unpacked, as a buffer of its own shape.

A `Span` says where one leaf is, a `Shard` which rows of a buffer this device has. A `Layout` has
the spans of a whole tree.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jgrad._layers import layer_axes as layer_axes_of
from jgrad._layers.layer_axes import LayerAxes, axis_exists
from jgrad._quantized.blocks import SIZE
from jgrad._trees import checks, leaf_names, shardings, trees
from jgrad._trees.annotations import Count
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import SMALLEST
from jgrad._trees.protocols import PyTree

# Number of elements in a row. Wider rows pad more: a transformer of 193 leaves by 1% at 128, 3%
# at 256, 9% at 512 and 19% at 1024; leaves of 16 x 16 by 0, 0, 100% and 300%. On two CPU cores,
# Adam on 1000 leaves of 32 x 32 takes the same time at each width. LAMB takes twice as long from
# 512 on, where the chunks of its norms no longer fit the first-level cache (`rows`). It is a
# multiple of 128, the width of a TPU's lanes; unmeasured on accelerators. In 8 bits, the elements
# of a row share a scale.
WIDTH = SIZE

_SHOWN = 10  # leaves of a buffer that are printed
APART = " small"  # ends the names of buffers with only small leaves


# ---- one leaf ----------------------------------------------------------------------------------


class Span(NamedTuple):
    """The rows of one leaf.

    Attributes:
      path: of the leaf in its tree.
      dtype: of the leaf when the layout was made.
      layers: its shape, and the axes over which layers are stacked.
      buffer: name of the buffer: that of its dtype, or "leaf 3" for the leaf at index 3 if it stays
        unpacked.
      start: first row in the buffer; None for an unpacked leaf.
      rows_per_layer: each layer starts on a row of its own.
    """

    path: str
    dtype: np.dtype
    layers: LayerAxes
    buffer: str
    start: int | None
    rows_per_layer: int

    @property
    def is_unpacked(self) -> bool:
        """Whether the leaf is not packed: its buffer has its own shape."""
        return self.start is None

    @property
    def first(self) -> int:
        """The first row; 0 for an unpacked leaf."""
        return self.start or 0

    def is_alike(self, other: "Span") -> bool:
        """Whether it is the same leaf, from whatever row of the buffer of that name."""
        mine, its = ((x.dtype, x.layers, x.buffer) for x in (self, other))
        return mine == its

    @property
    def num_rows(self) -> int:
        """Rows of the leaf."""
        return self.layers.num_layers * self.rows_per_layer

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.layers.shape)

    def __str__(self) -> str:
        layers = f", {self.layers.num_layers} layers" if self.layers.stacked else ""
        rows = "" if self.start is None else f"[{self.start}:{self.start + self.num_rows}] "
        return f"{rows}{self.path or 'the leaf'} {self.layers.shape}{layers}"


# ---- rows on devices ---------------------------------------------------------------------------


class Shard(NamedTuple):
    """A device's rows of each buffer, where buffers are sharded over mesh axes, as inside `zero`.

    Attributes:
      axes: their names.
      devices: the number of devices along them.
    """

    axes: tuple[str, ...]
    devices: int

    @classmethod
    def over(cls, axes: tuple[str, ...]) -> "Shard | None":
        """This device's shard along mesh axes; None where none of them exist, as under `jit`.

        Raises:
          NameError: some of them exist, and others do not.
        """
        return cls(axes, jax.lax.psum(1, axes)) if any(map(axis_exists, axes)) else None

    def num_rows(self, rows_of_buffer: int) -> int:
        """How many rows this device has of a buffer with so many."""
        return rows_of_buffer // self.devices

    def first_row(self, rows_of_buffer: int) -> jax.Array:
        """The first row that this device has of a buffer with so many."""
        return jax.lax.axis_index(self.axes) * self.num_rows(rows_of_buffer)

    def slice(self, x: ArrayLike) -> jax.Array:
        """This device's rows of an array that is replicated."""
        x = jnp.asarray(x)
        return jax.lax.dynamic_slice_in_dim(x, self.first_row(len(x)), self.num_rows(len(x)))

    def mean(self, x: jax.Array) -> jax.Array:
        """This device's rows of the mean over devices."""
        total = jax.lax.psum_scatter(x, self.axes, scatter_dimension=0, tiled=True)
        return total / self.devices

    def gather(self, x: jax.Array) -> jax.Array:
        """All rows on each device."""
        return shardings.all_gather(x, self.axes)

    def is_known_to_be_invariant(self, x: jax.Array) -> bool:
        """Whether `shard_map` with `check_vma=True` knows that `x` is the same on some devices."""
        return any(shardings.is_known_to_be_invariant(axis, x) for axis in self.axes)


# ---- a tree of leaves --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Describes where each leaf of a tree is in the buffers of a `Packed`.

    Attributes:
      structure: the structure of the tree, in which None is a leaf.
      spans: the rows of each leaf; None for a leaf that is None.
      shapes: (name, shape) of each buffer, in JAX's order.
      shard: inside `zero`, the rows that this device has; None for all of them.
      width: number of elements in a row.

    Example:
      >>> packed = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> packed.layout.shapes
      (('float32', (2, 256)),)
      >>> packed.layout.tree()["w"].shape
      (3, 2)
    """

    structure: PyTreeDef
    spans: tuple[Span | None, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    shard: Shard | None = None

    @property
    def width(self) -> int:
        """Number of elements in a row."""
        return WIDTH

    def tree(self, dtypes: Mapping[str, np.dtype | None] | None = None) -> PyTree:
        """Shapes and dtypes of the leaves that were packed; None for leaves that are None.

        If dtypes of buffers are given, the leaves have these; None for a dtype of None.
        """
        dtype_of_buffer = dtypes or {}
        structs = [
            None
            if span is None or (dtype := dtype_of_buffer.get(span.buffer, span.dtype)) is None
            else jax.ShapeDtypeStruct(span.layers.shape, dtype)
            for span in self.spans
        ]
        return self.structure.unflatten(structs)

    def within(self, name: str) -> list[tuple[int, Span]]:
        """The leaves of one buffer in the order in which they are there: positions and spans."""
        return self._by_buffer[name]

    def unpacked_leaf(self, name: str) -> int | None:
        """The position of the leaf that is this buffer, unpacked; None for a buffer of rows."""
        (i, span), *_ = self.within(name)
        return i if span.is_unpacked else None

    def is_part_of(self, other: "Layout") -> bool:
        """Whether each leaf is the other's of that name, in trees of any containers."""
        if self == other:
            return True
        if other_leaves(self, other, "", ""):
            return False
        both = zip(self.spans, other.spans, strict=True)
        return all(ours is None or (its and ours.is_alike(its)) for ours, its in both)

    def __jgrad_differences__(self, other: "Layout", name: str, other_name: str) -> Iterator[str]:
        """Where two layouts differ, phrase by phrase: what `trees.differences` says of them."""
        differ = False
        for phrase in trees.differences(self.tree(), other.tree(), name, other_name):
            differ = True
            yield f"{phrase} packed"
        if differ or self.structure != other.structure:
            return
        for path, *pair in zip(trees.paths(self.tree()), self.spans, other.spans, strict=True):
            ours, its = map(_described, pair)
            if ours != its:
                differ = True
                yield f"{name} has {ours}{checks.at(path)} where {other_name} has {its}"
        if not differ:
            yield f"{name} has buffers {dict(self.shapes)}, {other_name} {dict(other.shapes)}"

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.structure, self.spans, self.shapes, self.shard

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # JAX compares it in every call of a compiled function; usually it is the same object.
        if self is other:
            return True
        if not isinstance(other, Layout):
            return False
        return self._hash == other._hash and self._key == other._key

    @functools.cached_property
    def _by_buffer(self) -> dict[str, list[tuple[int, Span]]]:
        buffers: dict[str, list[tuple[int, Span]]] = collections.defaultdict(list)
        for i, span in enumerate(self.spans):
            if span is not None:
                buffers[span.buffer].append((i, span))
        for members in buffers.values():
            # A leaf without elements starts where the next one does, and comes before it.
            members.sort(key=lambda member: (member[1].first, member[1].num_rows, member[0]))
        return buffers

    # A copy is the same object. Structures with nodes that are not JAX's own cannot be pickled, and
    # hashes of strings differ between processes, so a tree of numbers and plain data is stored
    # instead.

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: object) -> "Layout":
        return self

    def __reduce__(self) -> tuple[Callable[..., "Layout"], tuple[object, ...]]:
        numbers = self.structure.unflatten(range(len(self.spans)))
        spans = [
            span and (*span[:2], dataclasses.astuple(span.layers)[:3], *span[3:])
            for span in self.spans
        ]
        shard = self.shard and tuple(self.shard)
        return Layout._rebuilt, (numbers, spans, self.shapes, shard, self.width)

    @staticmethod
    def _rebuilt(
        numbers: PyTree, spans: list[Any], shapes: Any, shard: Any, width: int, orders: Any = ()
    ) -> "Layout":
        if width != WIDTH:
            raise ValueError(f"Layout: rows of {width} elements, expected {WIDTH}.")
        if orders:  # up to 1.1, of whole matrices for each shard
            came = "a file with the rows of `pack(matrices=...)`, which is gone in 2.0"
            raise ValueError(f"Layout: {came}, expected it unpacked: `unpack` it with jgrad 1.1.")
        structure = trees.flatten(numbers)[1]
        rebuilt = tuple(x and Span(*x)._replace(layers=LayerAxes(*x[2])) for x in spans)
        return Layout(structure, rebuilt, shapes, shard and Shard(*shard))

    def __repr__(self) -> str:
        leaves = [span for span in self.spans if span is not None]
        elements = sum(span.size for span in leaves)
        room = sum(math.prod(shape) for _, shape in self.shapes)
        padding = 0 if room == 0 else 100 * (1 - elements / room)
        count = "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"
        lines = [f"{count}, {elements:,} elements, {padding:.1f}% padding"]
        for name, shape in self.shapes:
            if self.unpacked_leaf(name) is None:
                lines += [f"  {name} {shape}", *_listed([span for _, span in self.within(name)])]
        buffers = (self.within(name) for name, _ in self.shapes)
        if unpacked := [span for ((_, span), *_) in buffers if span.is_unpacked]:
            lines += ["  unpacked", *_listed(unpacked)]
        return "\n".join(lines)


Layout.__module__ = "jgrad"  # where users import it from, and what a pickle names


def other_leaves(a: Layout, b: Layout, a_name: str, b_name: str) -> str:
    """Where the names of leaves differ, or their order; "" if they are the same.

    A name is a path as rules are written: containers may differ, and flax's variables around
    leaves, which nnx shows to `init` alone.
    """
    if a.structure == b.structure:
        return ""
    names_a, names_b = (leaf_names.rule_names(x.tree()) for x in (a, b))
    both = (a_name, names_a, {*names_b}), (b_name, names_b, {*names_a})
    firsts = [(who, next((x for x in names if x not in other), None)) for who, names, other in both]
    if only := [f"only {who} has {x!r}" for who, x in firsts if x is not None]:
        return "; ".join(only)
    pairs = itertools.zip_longest(names_a, names_b)  # one name may be that of two leaves
    x, y = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return "" if x == y else f"{a_name} has {x!r} where {b_name} has {y!r}"


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


# ---- of a tree ----------------------------------------------------------------------------------

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


def layout_of(
    function: str,
    tree: PyTree,
    layer_axes: PyTree = None,
    multiple_of: Count = 1,
    max_size: Count | None = None,
    *,
    small_apart: bool = False,
    others: bool = False,
) -> tuple[Layout, list[jax.Array | None]]:
    """The layout for a tree of floating arrays, and its leaves; with `others`, for any arrays.

    Leaves of more than `max_size` elements stay unpacked, and so do others than floating ones. With
    `small_apart`, leaves that are too small for 8 bits share no buffer with larger ones.
    """
    arg = ArgLeaves.from_tree(function, "tree", tree).with_arrays()
    for i, x in enumerate(arg.leaves):
        if not (x is None or checks.is_inexact(x) or (others and checks.is_numeric(x))):
            arg.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = layer_axes_of.read_layer_axes(function, layer_axes)
    stacked = ArgLeaves.from_prefix(function, "layer_axes", axes, "tree", tree)
    layers = layer_axes_of.of_leaves(stacked, arg)

    spans: list[Span | None] = [None] * len(arg.leaves)
    packed: list[tuple[int, Span]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (x, path, leaf_layers) in enumerate(zip(arg.leaves, arg.paths(), layers, strict=True)):
        if x is None:
            continue
        large = max_size is not None and math.prod(x.shape) > max_size
        if large or not checks.is_inexact(x):
            name = f"leaf {i}"  # not by path: two leaves may share one
            spans[i] = Span(path, np.dtype(x.dtype), leaf_layers, name, None, 0)
            shapes[name] = x.shape
            continue
        rows_per_layer = -(-leaf_layers.layer_size // WIDTH)
        is_apart = small_apart and math.prod(x.shape) < SMALLEST
        name = x.dtype.name + (APART if is_apart else "")
        packed.append((i, Span(path, np.dtype(x.dtype), leaf_layers, name, 0, rows_per_layer)))
    # Equal leaves are neighbours, because XLA compiles equal work once.
    packed.sort(key=lambda member: (member[1].layers.shape, member[1].layers.stacked))
    rows = collections.Counter[str]()  # of each buffer, as far as it is filled
    for i, span in packed:
        spans[i] = span._replace(start=rows[span.buffer])
        rows[span.buffer] += span.num_rows
    for name, count in rows.items():
        shapes[name] = (-(-count // multiple_of) * multiple_of, WIDTH)
    layout = Layout(trees.flatten(tree)[1], tuple(spans), tuple(sorted(shapes.items())))
    return layout, list(arg.leaves)
