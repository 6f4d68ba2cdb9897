"""All-to-alls that distribute whole matrices over devices, if it is known how they are sharded.

Each device has a part of every matrix, and gets all parts of some. The partitioner only finds
these all-to-alls if matrices are sharded over a single mesh axis. With two axes, or if layers are
sharded as well, it gathers the matrices.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function
from jgrad._layers.matrix_axes import MatrixAxes, View
from jgrad._trees.places import partition_spec
from jgrad._trees.shardings import MeshAxesPerAxis

Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


class Dealing(NamedTuple):
    """The mesh of arrays, and the axes over which their matrices are dealt out."""

    mesh: Mesh
    over: tuple[str, ...]


def orthogonalized(
    steps: Function, arrays: Sequence[jax.Array], axes: Sequence[MatrixAxes], dealing: Dealing
) -> list[jax.Array]:
    """Each matrix of each array, all of one shape.

    Args:
      steps: of Newton-Schulz, on a stack of wide matrices.
      arrays: in which the matrices are.
      axes: where they are, with `mesh_axes`.
      dealing: over which mesh axes, beside those over which they are sharded.
    """
    real = numerics.real_dtype(*arrays)
    arrays = [numerics.widen(x, real) for x in arrays]
    specs = tuple(partition_spec(where.mesh_axes) for where in axes)
    exchanges = _exchanges(axes, dealing)

    def on_each(*parts: jax.Array) -> tuple[jax.Array, ...]:
        dealt = [exchange.deal(parts) for exchange in exchanges]
        new = jax.lax.split(steps(jax.lax.concatenate(dealt, 0)), [len(x) for x in dealt])
        collected: dict[int, jax.Array] = {}
        for exchange, x in zip(exchanges, new, strict=True):
            collected |= exchange.collect(x)
        return tuple(collected[i] for i in range(len(parts)))

    shared = jax.shard_map(
        on_each, mesh=dealing.mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    return list(shared(*arrays))


class _Kind(NamedTuple):
    """How a wide matrix is divided into parts, one for each device.

    Attributes:
      shape: of a part: its rows and columns; more axes where those have several that are sharded.
      mesh_axes: those over which each axis is sharded.
    """

    shape: tuple[int, ...]
    mesh_axes: MeshAxesPerAxis


# For the arrays of a kind, by number: what each device has of them, as (matrices, *part).
_Members = dict[int, View]


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Matrices that are dealt out by one all-to-all.

    Parts of several kinds travel as tiles, of which each of them is a grid.

    Attributes:
      over: mesh axes over which each is sharded, and their sizes.
      among: those over which they are replicated, and dealt out as well.
      kinds: the arrays of each kind.
      wide: the shape of a matrix.
    """

    over: dict[str, int]
    among: dict[str, int]
    kinds: dict[_Kind, _Members]
    wide: tuple[int, int]

    def deal(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The matrices of this device, from its parts of all of them."""
        tiles = []
        for kind, members in self.kinds.items():
            x = jax.lax.concatenate([view.of(arrays[i]) for i, view in members.items()], 0)
            tiles.append(self._tiles(kind, len(x)).of(x))
        x = jax.lax.concatenate(tiles, 0)
        over, among = math.prod(self.over.values()), math.prod(self.among.values())
        missing = -len(x) % (over * among)
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, missing, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        x = x.reshape(among, over, -1, *x.shape[1:])
        x = self._exchanged(x[jax.lax.axis_index(tuple(self.among))] if self.among else x[0])
        count = x.shape[1]
        x = self._taken([self._grids(kind, count).of(x) for kind in self.kinds], 0)
        return self._grids_of_wide(count).back(x)

    def collect(self, x: jax.Array) -> dict[int, jax.Array]:
        """The parts of this device, by array."""
        count = len(x)
        x = self._grids_of_wide(count).of(x)
        x = self._taken([self._grids(kind, count).back(x) for kind in self.kinds], 1)
        x = self._exchanged(x)
        if self.among:
            x = jax.lax.all_gather(x, tuple(self.among))
        x = x.reshape(-1, *x.shape[-1 - len(self._tile) :])
        arrays, first = {}, 0
        for kind, members in self.kinds.items():
            for i, view in members.items():
                count = view.shape[0]
                arrays[i] = view.back(self._tiles(kind, count).back(x[first : first + count]))
                first += count
        return arrays

    @property
    def _tile(self) -> tuple[int, ...]:
        lengths = zip(*(kind.shape for kind in self.kinds), strict=True)
        return tuple(itertools.starmap(math.gcd, lengths))

    def _grid(self, kind: _Kind, *, whole: bool) -> tuple[int, ...]:
        """How many tiles a part has along each axis, or a whole matrix."""
        rows = zip(kind.shape, self._tile, kind.mesh_axes, strict=True)
        return tuple(
            n // tile * (math.prod(self.over[name] for name in names) if whole else 1)
            for n, tile, names in rows
        )

    def _tiles(self, kind: _Kind, count: int) -> View:
        """Parts as (count, tiles, *tile)."""
        grid = self._grid(kind, whole=False)
        shape = (count, math.prod(grid), *self._tile)
        return _in_tiles((count, *kind.shape), grid, self._tile)._replace(shape=shape)

    def _grids(self, kind: _Kind, count: int) -> View:
        """What devices send, (devices, count, tiles, *tile), as matrices, (count, *grid, *tile)."""
        names, ndim = list(self.over), len(kind.shape)
        grid, sizes = self._grid(kind, whole=False), self.over.values()
        order = [len(names)]
        for axis, sharded_over in enumerate(kind.mesh_axes):
            order += [*map(names.index, sharded_over), len(names) + 1 + axis]
        first = len(names) + 1 + ndim
        return View(
            (math.prod(sizes), count, math.prod(grid), *self._tile),
            (*sizes, count, *grid, *self._tile),
            (*order, *range(first, first + ndim)),
            (count, *self._grid(kind, whole=True), *self._tile),
        )

    def _grids_of_wide(self, count: int) -> View:
        """Wide matrices as (count, *grid, *tile), which is the same for all kinds."""
        grid = self._grid(next(iter(self.kinds)), whole=True)
        return _in_tiles((count, *self.wide), grid, self._tile)

    def _exchanged(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, tuple(self.over), 0, 0, tiled=True) if self.over else x

    def _taken(self, candidates: list[jax.Array], axis: int) -> jax.Array:
        """Of each matrix of this device, along an axis, what fits its kind."""
        x, *others = candidates
        if not others:
            return x
        first = jax.lax.axis_index((*self.among, *self.over)) * x.shape[axis]
        number = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        bound = 0
        for members, other in zip(self.kinds.values(), others, strict=False):
            bound += _count(members)
            x = jax.lax.select(number < bound, x, other)
        return x


def _in_tiles(start: tuple[int, ...], grid: tuple[int, ...], tile: tuple[int, ...]) -> View:
    """Matrices or parts, of which the first axis is the count, as (count, *grid, *tile)."""
    count, ndim = start[0], 1 + 2 * len(grid)
    split = (count, *itertools.chain(*zip(grid, tile, strict=True)))
    order = (0, *range(1, ndim, 2), *range(2, ndim, 2))
    return View(start, split, order, (count, *grid, *tile))


def _exchanges(axes: Sequence[MatrixAxes], dealing: Dealing) -> list[_Exchange]:
    """Kinds are dealt out together where devices would have more matrices otherwise."""
    sizes = dict(dealing.mesh.shape)
    groups: dict[tuple[tuple[str, ...], ...], dict[_Kind, _Members]] = collections.defaultdict(dict)
    for i, where in enumerate(axes):
        kind, view = _divided(where, where.mesh_axes or (), sizes)
        within = {*itertools.chain(*kind.mesh_axes)}
        known = {*itertools.chain(*(where.mesh_axes or ()))}
        over = tuple(name for name in sizes if name in within)
        among = tuple(name for name in sizes if name in dealing.over and name not in known)
        groups[over, among].setdefault(kind, {})[i] = view
    exchanges = []
    for (over, among), kinds in groups.items():
        devices = math.prod(sizes[name] for name in (*over, *among))
        counts = [_count(members) for members in kinds.values()]
        apart = sum(-(-count // devices) for count in counts)
        together = len(kinds) > 2 or apart > -(-sum(counts) // devices)
        together &= all(len(kind.shape) == 2 for kind in kinds)
        alike = [kinds] if together else [{kind: members} for kind, members in kinds.items()]
        on, beside = ({name: sizes[name] for name in names} for names in (over, among))
        exchanges += [_Exchange(on, beside, members, axes[0].wide) for members in alike]
    return exchanges


def _divided(
    axes: MatrixAxes, mesh_axes: MeshAxesPerAxis, sizes: dict[str, int]
) -> tuple[_Kind, View]:
    """How the matrices of an array are divided; axes that are not sharded join those before."""
    shape = tuple(
        n // math.prod(sizes[name] for name in names)
        for n, names in zip(axes.shape, mesh_axes, strict=True)
    )
    order, stacked = axes.in_order, len(axes.stacked)
    columns = axes.inputs if order[stacked] in axes.outputs else axes.outputs
    lengths: list[int] = []
    names: list[tuple[str, ...]] = []
    for axis in order[stacked:]:
        if not lengths or axis == columns[0] or mesh_axes[axis]:
            lengths.append(shape[axis])
            names.append(mesh_axes[axis])
        else:
            lengths[-1] *= shape[axis]
    count = math.prod(shape[axis] for axis in axes.stacked)
    view = View(shape, shape, order, (count, *lengths))
    return _Kind(tuple(lengths), tuple(names)), view


def _count(members: _Members) -> int:
    """The number of matrices of which a device has parts."""
    return sum(view.shape[0] for view in members.values())
