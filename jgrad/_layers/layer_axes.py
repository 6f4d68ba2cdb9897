"""Which axes of an array make up a layer, because LARS and LAMB need one norm per layer.

A leaf is one layer, or a stack of layers as in models with `lax.scan` (`layer_axes`). Inside
`shard_map` and `pmap`, a layer may be sharded over mesh axes (`mesh_axes`). The caller has to name
both; jgrad does not detect them. Under `jit`, a sharded array is whole and needs no option.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._arithmetic.leafwise import Function
from jgrad._layers.array_spec import ArraySpec
from jgrad._trees import trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import (
    Placement,
    invariant_axes,
    read_leaves,
    read_mesh_axes,
    replicated,
    unknown_axes,
)


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


# ---- what a user gives as `layer_axes` ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axes:
    """Indices of axes of an array, or sizes along them. A bare tuple would be a subtree."""

    values: tuple[Any, ...] = ()


def read_layer_axes(function: str, layer_axes: PyTree, name: str = "layer_axes") -> PyTree:
    """A tree of `Axes` with indices of array axes; of an option of another name, if it is given."""
    expected = "None, an int, or a tuple of ints"
    return read_leaves(function, name, layer_axes, _axes, expected)


def axis_exists(name: str) -> bool:
    """Whether there is a mesh axis of this name where this is traced."""
    try:
        jax.lax.psum(1, name)
    except NameError:
        return False
    return True


def all_names(function: str, mesh_axes: PyTree) -> set[str]:
    """All mesh axes that the option names, whether they are here or not."""
    return {name for x in trees.flatten(read_mesh_axes(function, mesh_axes))[0] for name in x.names}


def in_shard_map(mesh_axes: ArgLeaves, arrays: Sequence[Any]) -> ArgLeaves:
    """A `Placement` for each leaf, along axes by whose names devices talk to each other.

    Under `jit` leaves are whole along all axes of their mesh, or of `jax.set_mesh`.
    """
    there: dict[Placement, Placement] = {}
    for i, (x, array) in enumerate(zip(mesh_axes.leaves, arrays, strict=True)):
        if x not in there:
            names = x.within(())
            there[x] = among(x, existing(mesh_axes, i, names, array)) if names else x
    return mesh_axes._replace(leaves=[there[x] for x in mesh_axes.leaves])


def among(place: Placement, names: Collection[str]) -> Placement:
    """The same, along some mesh axes alone."""
    *per_axis, anywhere = (
        tuple(name for name in row if name in names)
        for row in (*(place.per_axis or ()), place.anywhere)
    )
    known = None if place.per_axis is None else tuple(per_axis)
    return dataclasses.replace(place, per_axis=known, anywhere=anywhere)


def existing(mesh_axes: ArgLeaves, i: int, names: Collection[str], array: Any) -> tuple[str, ...]:
    """Those of the names that are axes of the `shard_map` or `pmap` around; all are of a mesh."""
    here = tuple(filter(axis_exists, names))
    if others := [name for name in names if name not in here]:
        meshes = [jax.sharding.get_abstract_mesh()]
        meshes += [jax.typeof(array).sharding.mesh] if isinstance(array, jax.Array) else []
        known = dict.fromkeys(itertools.chain(*(mesh.axis_names for mesh in meshes)))
        if missing := [name for name in others if name not in known]:
            remedy = "; `mesh_axes` is for `shard_map` and `pmap`; under `jit` leaves are whole"
            if known:
                remedy = f", expected one of the mesh: {', '.join(map(repr, known))}"
            mesh_axes.fail(i, ValueError, f"no axis {missing[0]!r} here{remedy}")
    return here


def of_leaves(
    layer_axes: ArgLeaves, reference: ArgLeaves, mesh_axes: ArgLeaves | None = None
) -> list[LayerAxes]:
    """The layers of each leaf of the reference, from an entry of both options for each leaf."""
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
        names = () if mesh_axes is None else mesh_axes.leaves[i].within(stacked)
        layers.append(LayerAxes(shape, stacked, names))
    return layers


def of_arrays(
    arrays: Sequence[ArraySpec], mesh_axes: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """Where the layers of each array are, from arguments with an entry per leaf of the tree."""
    mesh_axes = in_shard_map(mesh_axes, reference.leaves)
    per_leaf = of_leaves(layer_axes, reference, mesh_axes)
    return [spec.layer_axes(per_leaf, mesh_axes, layer_axes) for spec in arrays]


def as_typed(
    layers: Iterable[LayerAxes], mesh_axes: ArgLeaves, arrays: Iterable[Sequence[jax.Array | None]]
) -> list[LayerAxes]:
    """The layers of arrays, whose types may say more; None for an array that is not there.

    An array that is the same along a mesh axis is no part of a layer, but a copy: such an axis is
    not summed over where one entry says so for all leaves. An entry of a tree is the user's word
    for the leaves below it: a shard of constants that is made inside is the same everywhere, too.
    """
    entry = mesh_axes.leaves[0] if mesh_axes.leaves else Placement()
    is_for_many = entry.is_for_all and (len(mesh_axes.leaves) > 1 or mesh_axes.paths() != [""])
    overruled = entry.names if is_for_many else ()
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


def _axes(x: PyTree) -> Axes | None:
    """`Axes` of None, of an int, or of a tuple of those; True is no int here."""
    if x is None:
        return Axes()
    values = x if type(x) is tuple else (x,)
    fits = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return Axes(values) if fits else None
