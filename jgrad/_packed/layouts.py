"""Where the leaves of a tree lie in packed buffers: static, hashable, and known without arrays.

A buffer is an array of shape (blocks, 256). Each layer of a leaf starts on a block of its own, so
that a number per layer (a norm, a rate, a decay) is a column of one number per block. What is
behind the last element of a layer is padding, always zero. A leaf too large to gain may stay as it
is, in a buffer of its own shape.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jgrad._layers import layer_axes as places
from jgrad._packed.blocks import BLOCK, Run
from jgrad._packed.rows import Share
from jgrad._trees import checks, trees
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree

_SHOWN = 10  # leaves of a buffer that are printed

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where each leaf of a tree lies.

    Attributes:
      structure: of the tree, in which None is a leaf.
      runs: for each leaf, or None for None.
      shapes: (name, shape) of each buffer, in the order in which JAX has them.
      share: None, but inside of `zero`: buffers are a device's rows of those of these shapes.
    """

    structure: Any
    runs: tuple[Run | None, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    share: Share | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.runs, self.shapes, self.share))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # JAX compares at every call of a compiled function; mostly it is one object.
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        own, its = ((x.structure, x.runs, x.shapes, x.share) for x in (self, other))
        return own == its

    @functools.cached_property
    def _within(self) -> dict[str, list[tuple[int, Run]]]:
        found: dict[str, list[tuple[int, Run]]] = collections.defaultdict(list)
        for i, run in enumerate(self.runs):
            if run is not None:
                found[run.buffer].append((i, run))
        for own in found.values():
            own.sort(key=lambda pair: (pair[1].start or 0, pair[0]))
        return found

    def within(self, name: str) -> list[tuple[int, Run]]:
        """The leaves of one buffer in the order in which they lie there: positions and runs."""
        return self._within[name]

    def tree(self, dtypes: Mapping[str, Any] | None = None) -> PyTree:
        """Shapes and dtypes of what was packed; those of buffers where they are given."""
        given = dtypes or {}
        structs = [
            None
            if run is None
            else jax.ShapeDtypeStruct(run.place.shape, given.get(run.buffer, run.dtype))
            for run in self.runs
        ]
        return self.structure.unflatten(structs)

    def is_like(self, other: "Layout") -> bool:
        """Whether the same leaves lie in the same places, in trees of any structure."""
        if self == other:
            return True
        own, its = ([run and run._replace(path="") for run in x.runs] for x in (self, other))
        return own == its and (self.shapes, self.share) == (other.shapes, other.share)

    # A copy is this very layout. Structures are not copied by `pickle` where nodes are not JAX's
    # own, and hashes of strings differ from process to process: a tree of numbers goes instead.

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: Any) -> "Layout":
        return self

    def __reduce__(self) -> Any:
        numbers = self.structure.unflatten(range(len(self.runs)))
        return _rebuilt, (numbers, self.runs, self.shapes, self.share)

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
        runs = [run for run in self.runs if run is not None]
        elements = sum(run.size for run in runs)
        room = sum(math.prod(shape) for _, shape in self.shapes)
        padding = 0 if room == 0 else 100 * (1 - elements / room)
        count = "1 leaf" if len(runs) == 1 else f"{len(runs)} leaves"
        lines = [f"{count}, {elements:,} elements, {padding:.1f}% padding"]
        alone = []
        for name, shape in self.shapes:
            own = [run for _, run in self.within(name)]
            if own[0].is_whole:
                alone += own
                continue
            lines.append(f"  {name} {shape}")
            lines += _listed(own)
        return "\n".join([*lines, *(["  as they are", *_listed(alone)] if alone else [])])


def whole_name(i: int) -> str:
    """The name of the buffer that is the i-th leaf as it is."""
    return f"leaf {i}"


def is_whole_name(name: str) -> bool:
    """Whether a buffer of this name is a leaf as it is; others have the names of dtypes."""
    return name.startswith("leaf ")


def _rebuilt(numbers: PyTree, *rest: Any) -> Layout:
    return Layout(trees.flatten(numbers)[1], *rest)


def _described(run: Run | None) -> str:
    """All that a user gave: where a run starts depends on the leaves before it."""
    if run is None:
        return "None"
    axes = f" stacked over axes {run.place.stacked}" if run.place.stacked else ""
    kept = " as it is" if run.is_whole else ""
    return f"packed {run.dtype} of shape {run.place.shape}{axes}{kept}"


def _listed(runs: list[Run]) -> list[str]:
    more = [f"    and {len(runs) - _SHOWN} more"] if len(runs) > _SHOWN else []
    return [f"    {run}" for run in runs[:_SHOWN]] + more


def of(
    function: str,
    tree: PyTree,
    layer_axes: PyTree = None,
    multiple_of: int = 1,
    max_size: int | None = None,
    *,
    others: bool = False,
) -> tuple[Layout, list[Any]]:
    """The layout for a tree of floating arrays, and its leaves; with `others`, for any arrays.

    Leaves of more than `max_size` elements stay as they are, and others than floating ones.
    """
    row = Row.of(function, "tree", tree).with_arrays()
    for i, x in enumerate(row.leaves):
        if not (x is None or checks.is_floating(x) or (others and checks.is_numeric(x))):
            row.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = places.indices(function, layer_axes)
    stacked = Row.spread(function, "layer_axes", axes, "tree", tree)
    none = row._replace(name="norm_axes", leaves=[places.Axes()] * len(row.leaves))
    each = list(zip(row.leaves, row.paths(), places.in_rows(none, stacked, row), strict=True))

    runs: list[Run | None] = [None] * len(each)
    small: list[tuple[int, Run]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (x, path, place) in enumerate(each):
        if x is None:
            continue
        large = max_size is not None and math.prod(x.shape) > max_size
        if large or not checks.is_floating(x):
            name = whole_name(i)  # not the path: two leaves may have one
            runs[i] = Run(path, np.dtype(x.dtype), place, name, None, 0)
            shapes[name] = x.shape
            continue
        per_layer = -(-place.layer_size // BLOCK)
        small.append((i, Run(path, np.dtype(x.dtype), place, x.dtype.name, 0, per_layer)))
    # Leaves that are alike lie side by side: XLA compiles equal pieces of work once.
    small.sort(key=lambda pair: (pair[1].place.shape, pair[1].place.stacked))
    ends: dict[str, int] = {}
    for i, run in small:
        start = ends.get(run.buffer, 0)
        runs[i] = run._replace(start=start)
        ends[run.buffer] = start + run.blocks
    for name, end in ends.items():
        shapes[name] = (-(-end // multiple_of) * multiple_of, BLOCK)
    return Layout(trees.flatten(tree)[1], tuple(runs), tuple(sorted(shapes.items()))), list(
        row.leaves
    )
