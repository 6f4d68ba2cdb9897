"""Which axes of an array make up a layer, because LARS and LAMB need one norm per layer.

A leaf is one layer, or a stack of layers as in models with `lax.scan` (`layer_axes`). Inside
`shard_map` and `pmap`, a layer may be sharded over mesh axes (`mesh_axes`). The caller has to name
both; jgrad does not detect them. Under `jit`, a sharded array is whole and needs no option.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jgrad._arithmetic.leafwise import Function
from jgrad._layers.array_spec import ArraySpec
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import invariant_axes, replicated, unknown_axes


@dataclasses.dataclass(frozen=True)
class LayerAxes:
    """Where the layers of one array are.

    Attributes:
      shape: shape of the array.
      stacked: axes of the array with a layer for each index, in order and none negative.
      mesh_axes: names of the mesh axes over which each layer is sharded.
      varying: mesh axes along which it is known to vary, or not known to be the same: these, and
        those along which each device has layers of its own.
    """

    shape: tuple[int, ...]
    stacked: tuple[int, ...] = ()
    mesh_axes: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """The number of layers in the array."""
        return math.prod(map(self.shape.__getitem__, self.stacked))

    @property
    def within(self) -> tuple[int, ...]:
        """The axes of a single layer."""
        axes = set(range(len(self.shape)))
        return tuple(sorted(axes.difference(self.stacked)))

    @property
    def layer_size(self) -> int:
        """The number of elements of a single layer."""
        return math.prod(self.shape[axis] for axis in self.within)

    @property
    def nonempty(self) -> np.ndarray | jax.Array:
        """Whether each layer has elements on this device, of shape (num_layers,)."""
        return np.full((self.num_layers,), 0 not in self.shape)

    @property
    def in_chunks(self) -> bool:
        """Whether sums are taken some rows at a time, so that their terms are not written."""
        return False

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """Arrays with equal keys are alike: norms of neighbours that are alike compile once."""
        return *self.devices, self.shape, self.stacked

    @property
    def devices(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Arrays with equal ones may share vectors of norms: these vary as each norm in them."""
        return self.varying, self.mesh_axes

    def to_elements(self, numbers: jax.Array) -> jax.Array:
        """A vector with an entry per layer as a scalar, or in a shape that broadcasts."""
        if not self.stacked:
            return numbers.reshape(())
        ones = [n if axis in self.stacked else 1 for axis, n in enumerate(self.shape)]
        return numbers.reshape(ones)

    def per_layer(self, number: ArrayLike) -> jax.Array:
        """One number for all layers in shape (num_layers,)."""
        return jnp.broadcast_to(jnp.asarray(number, dtype=float), (self.num_layers,))

    def sum(self, f: Function, arrays: Sequence[jax.Array | None]) -> jax.Array:
        """The sum of `f(*arrays)` over each layer, of shape (num_layers,)."""
        return replicated(jnp.sum(f(*arrays), axis=self.within)).reshape(-1)


# ---- what a user gives as `mesh_axes` and `layer_axes` -----------------------------------------


@dataclasses.dataclass(frozen=True)
class Axes:
    """A leaf of a tree of axes. A bare tuple would be a subtree.

    Attributes:
      values: names of mesh axes, or indices of axes of arrays.
      spec: the PartitionSpec that a user gave.
      is_for_all: whether they are one entry for all leaves, and not in a tree.
    """

    values: tuple[Any, ...] = ()
    spec: PartitionSpec | None = dataclasses.field(default=None, compare=False)
    is_for_all: bool = False


def read_mesh_axes(function: str, mesh_axes: PyTree, *, names: bool = True) -> PyTree:
    """A tree of `Axes` with names of mesh axes; or of PartitionSpecs alone."""

    def read(x: PyTree) -> Axes | None:
        if not isinstance(x, PartitionSpec):
            return _axes(str, x) if names or x is None else None
        parts = [part if isinstance(part, tuple) else (part,) for part in x]
        named = [name for part in parts for name in part if name is not None]
        is_named = all(isinstance(name, str) for name in named)
        return Axes(tuple(sorted(named)), x) if is_named else None

    expected = "None, an axis name, a tuple of names, or a PartitionSpec"
    if not names:
        expected = "None or a PartitionSpec, which says which axis of a leaf is sharded"
    tree = read_axes(function, "mesh_axes", mesh_axes, read, expected)
    return dataclasses.replace(tree, is_for_all=True) if isinstance(tree, Axes) else tree


def read_layer_axes(function: str, layer_axes: PyTree, name: str = "layer_axes") -> PyTree:
    """A tree of `Axes` with indices of array axes; of an option of another name, if it is given."""
    expected = "None, an int, or a tuple of ints"
    return read_axes(function, name, layer_axes, functools.partial(_axes, int), expected)


# Trees as `jax.jit` wants static arguments: hashable, as structure and leaves.
StaticTree = tuple[PyTreeDef, tuple[Any, ...]]
StaticAxes = tuple[StaticTree, StaticTree]


def static_axes(function: str, mesh_axes: PyTree, layer_axes: PyTree) -> StaticAxes:
    """`mesh_axes` and `layer_axes` of a functional update, hashable."""
    return (
        static_tree(read_mesh_axes(function, mesh_axes)),
        static_tree(read_layer_axes(function, layer_axes)),
    )


def static_tree(tree: PyTree) -> StaticTree:
    """A tree of hashable leaves, hashable."""
    leaves, structure = trees.flatten(tree)
    return structure, tuple(leaves)


def axis_exists(name: str) -> bool:
    """Whether there is a mesh axis of this name where this is traced."""
    try:
        jax.lax.psum(1, name)
    except NameError:
        return False
    return True


def existing_mesh_axes(mesh_axes: ArgLeaves) -> tuple[str, ...]:
    """All mesh axes that are named, sorted; an error if one does not exist here."""
    existing: set[str] = set()
    for axes in set(mesh_axes.leaves):
        existing.update(axes.values)
        check_exist(mesh_axes, mesh_axes.leaves.index(axes), axes.values, "norms are of")
    return tuple(sorted(existing))


def check_exist(mesh_axes: ArgLeaves, i: int, names: Sequence[str], under_jit: str) -> None:
    """Mesh axes by whose names devices talk to each other; `under_jit` says what is whole there."""
    for name in names:
        if not axis_exists(name):
            remedy = f"is for `shard_map` and `pmap`; under `jit` {under_jit} whole leaves"
            problem = f"no axis {name!r} here; `{mesh_axes.name}` {remedy}"
            mesh_axes.fail(i, ValueError, problem)


def check_names(
    mesh_axes: ArgLeaves, i: int, names: Sequence[str], mesh: Mesh | AbstractMesh
) -> None:
    """Under `jit`, where a leaf is said to be sharded over axes of a mesh."""
    if others := [name for name in names if name not in mesh.axis_names]:
        expected = f"an axis of the mesh: {', '.join(map(repr, mesh.axis_names))}"
        mesh_axes.fail(i, ValueError, f"{others[0]!r}, expected {expected}")


def of_leaves(mesh_axes: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves) -> list[LayerAxes]:
    """The layers of each leaf of the reference; both arguments hold an `Axes` for each leaf."""
    existing_mesh_axes(mesh_axes)
    layers = []
    for i, x in enumerate(reference.leaves):
        shape: tuple[int, ...] = () if x is None else x.shape
        axes: tuple[int, ...] = () if x is None else layer_axes.leaves[i].values
        inside = all(-len(shape) <= axis < len(shape) for axis in axes)
        stacked = tuple(sorted(axis % len(shape) for axis in axes if inside))
        if not inside or len(set(stacked)) != len(stacked):
            shown = axes[0] if len(axes) == 1 else axes
            problem = f"{shown}, expected different axes of an array of shape {shape}"
            layer_axes.fail(i, ValueError, problem)
        layers.append(LayerAxes(shape, stacked, mesh_axes.leaves[i].values))
    return layers


def of_arrays(
    arrays: Sequence[ArraySpec], mesh_axes: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """Where the layers of each array are, from arguments with an entry per leaf of the tree."""
    per_leaf = of_leaves(mesh_axes, layer_axes, reference)
    return [spec.layer_axes(per_leaf, mesh_axes, layer_axes) for spec in arrays]


def as_typed(
    layers: Iterable[LayerAxes], mesh_axes: ArgLeaves, arrays: Iterable[Sequence[jax.Array | None]]
) -> list[LayerAxes]:
    """The layers of arrays, whose types may say more; None for an array that is not there.

    An array that is the same along a mesh axis is no part of a layer, but a copy: such an axis is
    not summed over where one entry says so for all leaves. An entry of a tree is the user's word
    for the leaves below it: a shard of constants that is made inside is the same everywhere, too.
    """
    entry = mesh_axes.leaves[0] if mesh_axes.leaves else Axes()
    is_for_many = entry.is_for_all and (len(mesh_axes.leaves) > 1 or mesh_axes.paths() != [""])
    overruled = entry.values if is_for_many else ()
    typed = []
    for axes, beside in zip(layers, arrays, strict=True):
        present = [x for x in beside if x is not None]
        varying = unknown_axes(*present)
        names = axes.mesh_axes
        if overruled:
            copies = {*overruled} & {*invariant_axes(*present)}
            names = tuple(name for name in names if name not in copies)
        if (varying, names) != axes.devices:
            axes = dataclasses.replace(axes, mesh_axes=names, varying=varying)
        typed.append(axes)
    return typed


def _axes(kind: type, x: PyTree) -> Axes | None:
    """`Axes` of None, of one value of a type, or of a tuple of those; True is no int here."""
    if x is None:
        return Axes()
    values = x if type(x) is tuple else (x,)
    fits = all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
    return Axes(values) if fits else None


def read_axes(
    function: str, name: str, tree: PyTree, read: Callable[[PyTree], Axes | None], expected: str
) -> PyTree:
    """`tree` with each leaf as `read` understands it, which returns None for what is no leaf."""
    if tree is None and (none := read(tree)) is not None:
        return none
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        trees.opened(tree), is_leaf=lambda x: x is None or read(x) is not None
    )
    axes = [read(x) for _, x in leaves]
    if None in axes:
        path, x = leaves[axes.index(None)]
        if isinstance(x, jax.Array):
            expected += f"; {checks.INJECTED}"
        arg = ArgLeaves(function, name, [x], lambda: [jax.tree_util.keystr(path)])
        arg.fail(0, TypeError, f"{checks.describe(x)}, expected {expected}")
    return jax.tree.unflatten(structure, axes)
