"""Where the leaves of a tree lie in packed buffers: static, hashable, and known without arrays.

A buffer is an array of shape (blocks, 256). Each layer of a leaf starts on a block of its own, so
that a number per layer (a norm, a rate, a decay) is a column of one number per block. What is
behind the last element of a layer is padding, always zero.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jgrad import checks, places, trees
from jgrad.checks import Row
from jgrad.places import Place
from jgrad.trees import PyTree

BLOCK = 256

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


class Run(NamedTuple):
    """The blocks of one leaf.

    Attributes:
      path: of the leaf in its tree.
      dtype: of the leaf when the layout was made; its name is that of the buffer.
      place: its shape, and the axes over which layers are stacked.
      start: first block in the buffer.
      per_layer: blocks of each layer.
    """

    path: str
    dtype: np.dtype
    place: Place
    start: int
    per_layer: int

    @property
    def blocks(self) -> int:
        """Blocks of the leaf."""
        return self.place.layers * self.per_layer

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.place.shape)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where each leaf of a tree lies.

    Attributes:
      structure: of the tree, in which None is a leaf.
      runs: for each leaf, or None for None.
      blocks: (name, number of blocks) for each buffer; the names are those of dtypes, in order.
    """

    structure: Any
    runs: tuple[Run | None, ...]
    blocks: tuple[tuple[str, int], ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.runs, self.blocks))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # JAX compares at every call of a compiled function; mostly it is one object.
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        own, its = ((x.structure, x.runs, x.blocks) for x in (self, other))
        return own == its

    def within(self, name: str) -> list[Run]:
        """The runs of one buffer, in order."""
        return [run for run in self.runs if run is not None and run.dtype.name == name]

    def __repr__(self) -> str:
        runs = [run for run in self.runs if run is not None]
        elements = sum(run.size for run in runs)
        room = BLOCK * sum(blocks for _, blocks in self.blocks)
        padding = 0 if room == 0 else 100 * (1 - elements / room)
        lines = [f"{len(runs)} leaves, {elements:,} elements, {padding:.1f}% padding"]
        for name, blocks in self.blocks:
            own = self.within(name)
            lines.append(f"  {name} ({blocks}, {BLOCK})")
            lines += [f"    {_line(run)}" for run in own[:_SHOWN]]
            if len(own) > _SHOWN:
                lines.append(f"    and {len(own) - _SHOWN} more")
        return "\n".join(lines)


_SHOWN = 10  # leaves of a buffer that are printed


def _line(run: Run) -> str:
    layers = f", {run.place.layers} layers" if run.place.stacked else ""
    end = run.start + run.blocks
    return f"[{run.start}:{end}] {run.path or 'the leaf'} {run.place.shape}{layers}"


def of(
    function: str, tree: PyTree, layer_axes: PyTree = None, multiple_of: int = 1
) -> tuple[Layout, list[Any]]:
    """The layout for a tree of floating arrays, and its leaves."""
    row = Row.of(function, "tree", tree).with_arrays()
    for i, x in enumerate(row.leaves):
        if x is not None and not (checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)):
            row.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = places.indices(function, layer_axes)
    checks.same_structure(function, "layer_axes", axes, "tree", tree, prefix=True)
    stacked = row._replace(name="layer_axes", leaves=trees.broadcast(axes, tree))
    none = row._replace(name="norm_axes", leaves=[places.Axes()] * len(row.leaves))
    runs: list[Run | None] = []
    ends: dict[str, int] = {}
    for path, x, place in zip(
        row.paths(), row.leaves, places.in_rows(none, stacked, row), strict=True
    ):
        if x is None:
            runs.append(None)
            continue
        start = ends.setdefault(x.dtype.name, 0)
        size = math.prod(place.shape[axis] for axis in place.within)
        run = Run(path, np.dtype(x.dtype), place, start, -(-size // BLOCK))
        runs.append(run)
        ends[x.dtype.name] = start + run.blocks
    blocks = tuple(
        (name, -(-end // multiple_of) * multiple_of) for name, end in sorted(ends.items())
    )
    return Layout(trees.flatten(tree)[1], tuple(runs), blocks), list(row.leaves)
