"""Where a layer lives: LARS and LAMB need the norm of each, and a leaf is not always one layer.

A leaf may be a stack of layers, as models under `lax.scan` have them (`layer_axes`), or a part of
one that is cut over the axes of a mesh inside `shard_map` or `pmap` (`norm_axes`). Under `jit` a
sharded leaf is whole, and nothing has to be said.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jgrad._trees import checks, trees
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the layers of one leaf live.

    Attributes:
      shape: shape of the leaf.
      stacked: axes of the leaf with a layer for each index, in order and none negative.
      cut: names of the mesh axes over which each layer is cut.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """The number of layers in the leaf."""
        return math.prod(self.shape[axis] for axis in self.stacked)

    @property
    def filled(self) -> np.ndarray | jax.Array:
        """Whether each layer has elements here."""
        return np.full((self.layers,), 0 not in self.shape)

    def spread(self, numbers: jax.Array) -> jax.Array:
        """A number per layer as a scalar, or as an array that broadcasts to the leaf."""
        return numbers.reshape(self.column)

    def collect(self, number: ArrayLike) -> jax.Array:
        """A number per layer as a vector, from one for all."""
        return jnp.broadcast_to(jnp.asarray(number, dtype=float), (self.layers,))

    @property
    def within(self) -> tuple[int, ...]:
        """The axes of a single layer."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.stacked)

    @property
    def layer_size(self) -> int:
        """Elements of a single layer."""
        return math.prod(self.shape[axis] for axis in self.within)

    @property
    def column(self) -> tuple[int, ...]:
        """The shape in which a number per layer broadcasts to the leaf."""
        if not self.stacked:
            return ()
        return tuple(n if axis in self.stacked else 1 for axis, n in enumerate(self.shape))


@dataclasses.dataclass(frozen=True)
class Axes:
    """A leaf of a tree of axes: a tuple would be a tree itself."""

    values: tuple[Any, ...] = ()


def names(function: str, norm_axes: PyTree) -> PyTree:
    """A tree of `Axes` with names of mesh axes, from what a user may give as `norm_axes`."""

    def is_name(x: Any) -> bool:
        return isinstance(x, str)

    def read(x: Any) -> Axes | None:
        if isinstance(x, PartitionSpec):
            parts = [part if isinstance(part, tuple) else (part,) for part in x]
            found = [name for part in parts for name in part if name is not None]
            return Axes(tuple(sorted(found))) if all(map(is_name, found)) else None
        return _axes(x, is_name)

    expected = "None, an axis name, a tuple of names, or a PartitionSpec"
    return _read(function, "norm_axes", norm_axes, read, expected)


def indices(function: str, layer_axes: PyTree) -> PyTree:
    """A tree of `Axes` with indices, from what a user may give as `layer_axes`."""

    def is_index(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    expected = "None, an int, or a tuple of ints"
    return _read(function, "layer_axes", layer_axes, lambda x: _axes(x, is_index), expected)


def exists(name: str) -> bool:
    """Whether there is such a mesh axis where this is traced."""
    try:
        jax.lax.psum(1, name)
    except NameError:
        return False
    return True


def mesh_axes(norm_axes: Row) -> tuple[str, ...]:
    """All mesh axes of a row of `Axes`; they exist where the update is traced."""
    cuts = set(norm_axes.leaves)
    for cut in cuts:
        _bound(norm_axes, cut)
    return tuple(sorted({name for cut in cuts for name in cut.values}))


def in_rows(norm_axes: Row, layer_axes: Row, reference: Row) -> list[Place]:
    """The place of each leaf of the reference, from rows of `Axes`."""
    mesh_axes(norm_axes)
    found = []
    for i, x in enumerate(reference.leaves):
        shape: tuple[int, ...] = () if x is None else x.shape
        axes: tuple[int, ...] = () if x is None else layer_axes.leaves[i].values
        inside = all(-len(shape) <= axis < len(shape) for axis in axes)
        stacked = tuple(sorted(axis % len(shape) for axis in axes if inside))
        if not inside or len(set(stacked)) != len(stacked):
            shown = axes[0] if len(axes) == 1 else axes
            problem = f"{shown}, expected different axes of an array of shape {shape}"
            layer_axes.fail(i, ValueError, problem)
        found.append(Place(shape, stacked, norm_axes.leaves[i].values))
    return found


# The trees of axes as `jax.jit` wants static arguments: hashable.
Static = tuple[tuple[Any, tuple[Axes, ...]], tuple[Any, tuple[Axes, ...]]]


def static(function: str, norm_axes: PyTree, layer_axes: PyTree) -> Static:
    """What a user gave as axes to a functional update."""

    def hashable(tree: PyTree) -> tuple[Any, tuple[Axes, ...]]:
        leaves, structure = trees.flatten(tree)
        return structure, tuple(leaves)

    return hashable(names(function, norm_axes)), hashable(indices(function, layer_axes))


def _axes(x: Any, fits: Any) -> Axes | None:
    """`Axes` of None, of one value, or of a tuple of values."""
    x = () if x is None else x if type(x) is tuple else (x,)
    return Axes(x) if all(map(fits, x)) else None


def _read(function: str, name: str, tree: PyTree, read: Any, expected: str) -> PyTree:
    """`tree` with each leaf as `read` understands it."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or read(x) is not None
    )
    leaves = [x for _, x in pairs]
    row = Row(function, name, leaves, lambda: [jax.tree_util.keystr(path) for path, _ in pairs])
    found = [read(x) for x in leaves]
    if None in found:
        i = found.index(None)
        row.fail(i, TypeError, f"{checks.describe(leaves[i])}, expected {expected}")
    return jax.tree.unflatten(structure, found)


def _bound(norm_axes: Row, cut: Axes) -> None:
    """The mesh axes exist where the update is traced."""
    for name in cut.values:
        if not exists(name):
            i = norm_axes.leaves.index(cut)
            remedy = "`norm_axes` is for `shard_map` and `pmap`; under `jit` norms are whole"
            norm_axes.fail(i, ValueError, f"no axis {name!r} here; {remedy}")
