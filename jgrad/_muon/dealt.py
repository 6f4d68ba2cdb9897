"""Matrices of which it is known how they are sharded, dealt out to devices by all-to-alls.

Each device has a block of each matrix, and gets all blocks of some. The partitioner finds these
all-to-alls only where matrices are sharded over one mesh axis, and gathers them where there are two
or where layers are sharded as well.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function
from jgrad._muon.matrix_axes import MatrixAxes

Places = tuple[tuple[str, ...], ...]


def orthogonalized(
    steps: Function,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    places: Sequence[Places],
    mesh: Any,
    shard_over: tuple[str, ...],
) -> list[jax.Array]:
    """Each matrix of each array, all of one shape.

    Args:
      steps: of Newton-Schulz, on a stack of wide matrices.
      arrays: in which the matrices are.
      axes: where they are.
      places: for each axis of each array the mesh axes over which it is sharded.
      mesh: of the arrays.
      shard_over: mesh axes over which matrices are dealt out, beside those over which they are
        sharded.
    """
    real = numerics.real_dtype(*arrays)
    arrays = [numerics.widen(x, real) for x in arrays]
    specs = tuple(PartitionSpec(*(names or None for names in own)) for own in places)
    hands = _hands(axes, places, mesh, shard_over)

    def on_each(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        dealt = [hand.deal(blocks) for hand in hands]
        new = jax.lax.split(steps(jax.lax.concatenate(dealt, 0)), [len(x) for x in dealt])
        found: dict[int, jax.Array] = {}
        for hand, x in zip(hands, new, strict=True):
            found |= hand.collect(x)
        return tuple(found[i] for i in range(len(blocks)))

    shared = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return list(shared(*arrays))


class _Kind(NamedTuple):
    """How a wide matrix is divided into blocks, one for each device.

    Attributes:
      shape: of a block: its rows and columns; more axes where those have several that are sharded.
      places: the mesh axes over which each is sharded.
    """

    shape: tuple[int, ...]
    places: Places


class _Member(NamedTuple):
    """Blocks of an array that a device has.

    Attributes:
      shape: of its part of the array.
      order: the axes over which matrices are stacked, those of rows, those of columns.
      matrices: their number.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    matrices: int

    def blocks(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Of the part of an array, the blocks along a first axis."""
        return x.transpose(self.order).reshape(self.matrices, *shape)

    def array(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `blocks`."""
        x = blocks.reshape([self.shape[axis] for axis in self.order])
        return x.transpose(np.argsort(self.order))


@dataclasses.dataclass(frozen=True)
class _Hand:
    """Matrices that are dealt out by one all-to-all.

    Blocks of several kinds travel as tiles, of which each of them is a grid.

    Attributes:
      over: mesh axes over which each is sharded, and their sizes.
      among: those over which they are replicated, and dealt out as well.
      kinds: the arrays of each kind, by number.
      wide: the shape of a matrix.
    """

    over: dict[str, int]
    among: dict[str, int]
    kinds: dict[_Kind, dict[int, _Member]]
    wide: tuple[int, int]

    def deal(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The matrices of this device, from its blocks of all of them."""
        tiles = []
        for kind, members in self.kinds.items():
            blocks = [own.blocks(arrays[i], kind.shape) for i, own in members.items()]
            x = _cut(jax.lax.concatenate(blocks, 0), self._tile)
            tiles.append(x.reshape(len(x), -1, *self._tile))
        x = jax.lax.concatenate(tiles, 0)
        over, among = math.prod(self.over.values()), math.prod(self.among.values())
        missing = -len(x) % (over * among)
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, missing, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        x = x.reshape(among, over, -1, *x.shape[1:])
        x = self._exchanged(x[jax.lax.axis_index(tuple(self.among))] if self.among else x[0])
        return _joined(self._taken([self._in_place(kind, x) for kind in self.kinds], 0), self.wide)

    def collect(self, x: jax.Array) -> dict[int, jax.Array]:
        """The blocks of this device, by array."""
        x = self._from_wide(x)
        x = self._exchanged(self._taken([self._sent(kind, x) for kind in self.kinds], 1))
        if self.among:
            x = jax.lax.all_gather(x, tuple(self.among))
        x = x.reshape(-1, *x.shape[-1 - len(self._tile) :])
        arrays, first = {}, 0
        for kind, members in self.kinds.items():
            for i, own in members.items():
                tiles = x[first : first + own.matrices]
                tiles = tiles.reshape(own.matrices, *_grid(kind.shape, self._tile), *self._tile)
                arrays[i] = own.array(_joined(tiles, kind.shape))
                first += own.matrices
        return arrays

    @property
    def _tile(self) -> tuple[int, ...]:
        lengths = zip(*(kind.shape for kind in self.kinds), strict=True)
        return tuple(math.gcd(*own) for own in lengths)

    def _in_place(self, kind: _Kind, x: jax.Array) -> jax.Array:
        """(matrices, *grid, *tile), from what devices sent, if it is of this kind."""
        grid = _grid(kind.shape, self._tile)
        x = x.reshape(*self.over.values(), x.shape[1], *grid, *self._tile)
        x = x.transpose(self._order(kind))
        return x.reshape(len(x), *self._whole_grid(kind), *self._tile)

    def _sent(self, kind: _Kind, x: jax.Array) -> jax.Array:
        """The inverse of `_in_place`: (devices, matrices, tiles of a block, *tile)."""
        count, order = len(x), self._order(kind)
        shape = (*self.over.values(), count, *_grid(kind.shape, self._tile), *self._tile)
        x = x.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        return x.reshape(math.prod(self.over.values()), count, -1, *self._tile)

    def _from_wide(self, x: jax.Array) -> jax.Array:
        """The tiles of matrices: (matrices, *grid, *tile)."""
        kind = next(iter(self.kinds))
        grid = self._whole_grid(kind)
        shape = [n * tile for n, tile in zip(grid, self._tile, strict=True)]
        return _cut(x.reshape(len(x), *shape), self._tile)

    def _whole_grid(self, kind: _Kind) -> tuple[int, ...]:
        pairs = zip(_grid(kind.shape, self._tile), kind.places, strict=True)
        return tuple(n * math.prod(self.over[name] for name in names) for n, names in pairs)

    def _order(self, kind: _Kind) -> list[int]:
        """Which axes of (*mesh axes, matrices, *grid, *tile) make up those of the whole grid."""
        names, ndim = list(self.over), len(kind.shape)
        order = [len(names)]
        for axis, own in enumerate(kind.places):
            order += [*map(names.index, own), len(names) + 1 + axis]
        first = len(names) + 1 + ndim
        return [*order, *range(first, first + ndim)]

    def _exchanged(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, tuple(self.over), 0, 0, tiled=True) if self.over else x

    def _taken(self, candidates: list[jax.Array], axis: int) -> jax.Array:
        """Of each matrix of this device, along an axis, what fits its kind."""
        x, *others = candidates
        if not others:
            return x
        first = jax.lax.axis_index((*self.among, *self.over)) * x.shape[axis]
        place = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        bound = 0
        for members, other in zip(self.kinds.values(), others, strict=False):
            bound += _count(members)
            x = jax.lax.select(place < bound, x, other)
        return x


def _cut(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
    """(count, *grid, *tile) of (count, *shape)."""
    grid = _grid(x.shape[1:], tile)
    x = x.reshape(len(x), *itertools.chain(*zip(grid, tile, strict=True)))
    return x.transpose(0, *range(1, x.ndim, 2), *range(2, x.ndim, 2))


def _joined(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """(count, *shape) of (count, *grid, *tile)."""
    ndim = x.ndim // 2
    pairs = zip(range(1, 1 + ndim), range(1 + ndim, 1 + 2 * ndim), strict=True)
    return x.transpose(0, *itertools.chain(*pairs)).reshape(len(x), *shape)


def _grid(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    return tuple(n // own for n, own in zip(shape, tile, strict=True))


def _hands(
    axes: Sequence[MatrixAxes], places: Sequence[Places], mesh: Any, shard_over: tuple[str, ...]
) -> list[_Hand]:
    """Kinds are dealt out together where devices would have more matrices otherwise."""
    sizes = dict(mesh.shape)
    groups: dict[Any, dict[_Kind, dict[int, _Member]]] = collections.defaultdict(dict)
    for i, (own, names) in enumerate(zip(axes, places, strict=True)):
        kind, member = _divided(own, names, sizes)
        within = {*itertools.chain(*kind.places)}
        known = {*itertools.chain(*names)}
        over = tuple(name for name in sizes if name in within)
        among = tuple(name for name in sizes if name in shard_over and name not in known)
        groups[over, among].setdefault(kind, {})[i] = member
    hands = []
    for (over, among), kinds in groups.items():
        devices = math.prod(sizes[name] for name in (*over, *among))
        counts = [_count(members) for members in kinds.values()]
        apart = sum(-(-count // devices) for count in counts)
        together = len(kinds) > 2 or apart > -(-sum(counts) // devices)
        together &= all(len(kind.shape) == 2 for kind in kinds)
        dealt = [kinds] if together else [{kind: own} for kind, own in kinds.items()]
        on, beside = ({name: sizes[name] for name in names} for names in (over, among))
        hands += [_Hand(on, beside, own, axes[0].wide) for own in dealt]
    return hands


def _divided(axes: MatrixAxes, places: Places, sizes: dict[str, int]) -> tuple[_Kind, _Member]:
    """How the matrices of an array are divided; axes that are not sharded join those before."""
    shape = tuple(
        n // math.prod(sizes[name] for name in names)
        for n, names in zip(axes.shape, places, strict=True)
    )
    order, stacked = axes.in_order, len(axes.stacked)
    columns = axes.inputs if order[stacked] in axes.outputs else axes.outputs
    lengths: list[int] = []
    names: list[tuple[str, ...]] = []
    for axis in order[stacked:]:
        if not lengths or axis == columns[0] or places[axis]:
            lengths.append(shape[axis])
            names.append(places[axis])
        else:
            lengths[-1] *= shape[axis]
    count = math.prod(shape[axis] for axis in axes.stacked)
    return _Kind(tuple(lengths), tuple(names)), _Member(shape, order, count)


def _count(members: dict[int, _Member]) -> int:
    """The number of matrices of which a device has blocks."""
    return sum(own.matrices for own in members.values())
