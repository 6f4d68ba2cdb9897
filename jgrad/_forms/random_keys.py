"""What the random bits of an array are a hash of, and how moments are rounded by them."""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise
from jgrad._forms.places import places_of
from jgrad._inputs.inputs import Inputs
from jgrad._layers.array_spec import ArraySpec
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.random_bits import ElementKeys, Part, leaf_keys, mixed, step_keys
from jgrad._trees import shares
from jgrad._trees.annotations import Count
from jgrad._trees.places import axes_cut, is_shard, shard_count, shard_index
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement, varying_axes
from jgrad._trees.told import told

_SEED = 0
_PURPOSE = 1  # moments; weights are rounded with other bits


class RandomKeys:
    """What the random bits of one update are a hash of; only computed if something is rounded."""

    def __init__(self, step: jax.Array) -> None:
        self._step = step
        self._known: dict[Hashable, tuple[ArraySpec, ElementKeys]] = {}

    @functools.cached_property
    def keys_of_step(self) -> jax.Array:
        """Of all elements."""
        return step_keys(self._step)

    def rounding(self, spec: ArraySpec, x: Leaf, place: Placement | None) -> Rounding:
        """How the elements of an array are rounded; moments of a leaf share their keys."""
        key = id(spec), x.shape, varying_axes(*jax.tree.leaves(x)), place
        if key not in self._known:
            self._known[key] = spec, element_keys(spec, _SEED, _PURPOSE, x, place)
        return Rounding(self.keys_of_step, self._known[key][1])

    def of_moment(
        self, inputs: Inputs, old: list[Leaf], mesh_axes: PyTree, *, is_whole: bool
    ) -> "MomentRounding":
        """How a moment of all leaves is rounded; `is_whole` where it is like the parameters."""
        places: list[Placement | None] = places_of(inputs, mesh_axes)
        if not is_whole:  # of a moment that is not like its leaf, nobody says it
            columns = zip(places, old, inputs.reference.leaves, strict=False)
            places = [
                place if place is not None and is_shard(place) and _is_alike(x, p) else None
                for place, x, p in columns
            ]
        return MomentRounding(self, inputs.specs, places)


def _is_alike(x: Leaf, p: Leaf) -> bool:
    return x is not None and x.shape == p.shape


class MomentRounding:
    """How a moment of each leaf is rounded.

    Attributes:
      places: how each array is sharded, if the user says so; else empty.
    """

    def __init__(
        self, keys: RandomKeys, specs: list[ArraySpec], places: list[Placement | None]
    ) -> None:
        self._keys, self._specs, self.places = keys, specs, places

    def of_leaf(self, i: int, old: Leaf) -> Rounding:
        """That of one leaf."""
        return self._keys.rounding(self._specs[i], old, self.places[i] if self.places else None)

    def at(self, rows: Sequence[int]) -> "MomentRounding":
        """That of some of these arrays, by their positions."""
        places = leafwise.at(self.places, rows) if self.places else []
        return MomentRounding(self._keys, leafwise.at(self._specs, rows), places)

    def of_parts(self) -> "MomentRounding":
        """That of parts of each leaf, whose places nobody says."""
        return MomentRounding(self._keys, self._specs, [])


def element_keys(
    spec: Any, seed: Count, purpose: int, x: Leaf, place: Placement | None = None
) -> ElementKeys:
    """What random bits are a hash of, so that a leaf has the same ones packed or not.

    The elements of a leaf are counted in order; of a packed one layer after layer, which is another
    order where layers are stacked over other axes than the first. So has one layer, updated by
    itself, those that it has in its stack, and a shard those that it has in its leaf. Where types
    or names alone say that it is a shard, its device has bits of its own.

    Args:
      spec: of the array, an `ArraySpec`.
      seed: of the user.
      purpose: what is rounded.
      x: the array, or another one that is sharded as it is.
      place: how it is sharded, if the user says it.
    """
    keys: Any = leaf_keys(seed, purpose, spec.positions)
    is_counted = spec.counts if spec.has_rows else functools.partial(_counts, spec)
    anywhere = place.anywhere if place is not None else ()
    place = place if place is not None and is_shard(place) and is_counted(place) else None
    known = (*(place.names if place else ()), *(spec.shard.axes if spec.shard else ()))
    varying = {*varying_axes(*jax.tree.leaves(x)), *anywhere}
    if apart := sorted(varying.difference(known)):
        keys = keys + mixed(jax.lax.axis_index(tuple(apart)).astype(jnp.uint32))
    if spec.has_rows:
        return ElementKeys(*spec.row_keys(keys, place))
    return _keys_of_leaf(spec, keys[0], x.shape, place)


def _keys_of_leaf(
    spec: ArraySpec, keys: Any, shape: tuple[int, ...], place: Placement | None
) -> ElementKeys:
    axes = range(len(shape))
    counts = [shard_count(place, i) if place else 1 for i in axes]
    index = [shard_index(place, i) if place and i in axes_cut(place) else None for i in axes]
    share, stack = told().share, spec.stack
    if share is None or share.layer is None or stack is None or not stack.axis:
        keys = shares.in_stack(keys, math.prod((*shape, *counts)))
    elif shape[stack.axis : stack.axis + 1] == (stack.length,):  # a part along that axis
        counts[stack.axis], index[stack.axis] = stack.layers, jnp.asarray(share.layer)
    is_whole = all(i is None for i in index)
    part = None if is_whole and place is None else Part(tuple(counts), tuple(index))
    return ElementKeys(keys, np.zeros((), np.uint32), part)


def _counts(spec: ArraySpec, place: Placement) -> bool:
    """Whether the elements of a shard can be counted from its first one.

    The layers of a stack that are updated one by one are counted by themselves, so that nothing
    says where those of a device begin.
    """
    if place.per_axis is None:
        return False
    share, axis = told().share, spec.stack.axis if spec.stack else 0
    return share is None or share.layer is None or axis not in axes_cut(place)
