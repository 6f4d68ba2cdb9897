"""Matrices of many arrays, orthogonalized together: one iteration for each shape.

A thousand leaves have a few shapes. Tall matrices are transposed, so that projections up and down
share an iteration.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function
from jgrad._muon import dealt, newton_schulz, split_leaves
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._muon.newton_schulz import Coefficients
from jgrad._packed import splitting
from jgrad._trees.shardings import places, replicated, sharded_as, unknown_axes


def orthogonalized(
    function: str,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    *,
    coefficients: Coefficients,
    compute_dtype: np.dtype | None,
    shard_over: tuple[str, ...] = (),
) -> list[jax.Array]:
    """Each matrix of each array, in float32 or wider.

    Args:
      function: whose errors they are.
      arrays: in which the matrices are.
      axes: where they are.
      coefficients: of Newton-Schulz.
      compute_dtype: of what its products read.
      shard_over: mesh axes over which the matrices of a shape are dealt out, under `jit`.
    """
    steps = functools.partial(
        newton_schulz.orthogonalized, coefficients=coefficients, compute_dtype=compute_dtype
    )
    mesh = _mesh(function, arrays, shard_over) if shard_over else None
    ready = [_ready_to_cut(*pair, mesh) for pair in zip(arrays, axes, strict=True)]
    runs = [split_leaves.cut(x, own) for x, own in ready]
    pieces = itertools.chain(*(split_leaves.pieces(own) for _, own in ready))
    flat = list(itertools.chain(*runs))
    new = iter(_orthogonalized(steps, flat, list(pieces), mesh, shard_over))
    found = [
        split_leaves.joined(list(itertools.islice(new, len(own_runs))), own)
        for own_runs, own in zip(runs, axes, strict=True)
    ]
    for i, (own, (_, moved)) in enumerate(zip(axes, ready, strict=True)):
        if own.places is not None and moved.places not in (None, own.places):
            found[i] = _moved(found[i], mesh, moved.places, own.places)
    return [sharded_as(o, x) for o, x in zip(found, arrays, strict=True)]


def _ready_to_cut(x: jax.Array, axes: MatrixAxes, mesh: Any) -> tuple[jax.Array, MatrixAxes]:
    """An array that is to be cut in blocks, sharded so that each device cuts its part by itself."""
    if not axes.blocks:
        return x, axes
    known = None if mesh is None or not x.size else axes.places or places(x)
    if known is None:
        return replicated(x), dataclasses.replace(axes, places=None)
    to = split_leaves.places_to_cut(dataclasses.replace(axes, places=known), dict(mesh.shape))
    if to != known:
        x = _moved(x, mesh, known, to)
    return x, dataclasses.replace(axes, places=to)


def _moved(x: jax.Array, mesh: Any, start: dealt.Places, to: dealt.Places) -> jax.Array:
    """`x`, sharded over some mesh axes, sharded over others: here, and nowhere before or behind."""
    place = jax.lax.with_sharding_constraint if places(x) is None else jax.sharding.reshard
    for names in (start, to):
        x = place(x, NamedSharding(mesh, PartitionSpec(*(own or None for own in names))))
    return x


def _orthogonalized(
    steps: Function,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    mesh: Any,
    shard_over: tuple[str, ...],
) -> list[jax.Array]:
    """Likewise, of arrays without blocks."""
    found: dict[int, jax.Array] = {}
    if shard_over:
        found = _dealt(steps, arrays, axes, mesh, shard_over)
    others = [i for i in range(len(arrays)) if i not in found]
    stacks = {i: axes[i].to_wide(replicated(arrays[i])) for i in others}
    groups: dict[object, list[int]] = collections.defaultdict(list)
    for i, x in stacks.items():
        # JAX loses track of replication when replicated and sharded arrays are concatenated, so
        # they are grouped apart.
        groups[*_kind(x, axes[i]), unknown_axes(x)].append(i)
    for members in groups.values():
        counts, own = [axes[i].count for i in members], [stacks[i] for i in members]
        if shard_over:
            parts = jax.lax.split(_shared(steps, _concatenated(own), mesh, shard_over), counts)
        else:
            parts = _split(steps(_joined(own)), counts)
        stacks |= zip(members, parts, strict=True)
    found |= {i: axes[i].from_wide(x) for i, x in stacks.items()}
    return [found[i] for i in range(len(arrays))]


def _kind(x: jax.Array, axes: MatrixAxes) -> tuple[object, ...]:
    """What matrices have in common that share an iteration."""
    return axes.wide, numerics.real_dtype(x), np.iscomplexobj(x)


def _dealt(
    steps: Function,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    mesh: Any,
    shard_over: tuple[str, ...],
) -> dict[int, jax.Array]:
    """Those of which it is known how they are sharded, by number."""
    known = [own.places or places(x) for x, own in zip(arrays, axes, strict=True)]
    groups: dict[object, list[int]] = collections.defaultdict(list)
    for i, (x, own) in enumerate(zip(arrays, axes, strict=True)):
        if known[i] is not None and x.size:
            groups[_kind(x, own)].append(i)
    found: dict[int, jax.Array] = {}
    for members in groups.values():
        new = dealt.orthogonalized(
            steps,
            [arrays[i] for i in members],
            [axes[i] for i in members],
            [known[i] or () for i in members],
            mesh,
            shard_over,
        )
        found |= zip(members, new, strict=True)
    return found


def _shared(steps: Function, x: jax.Array, mesh: Any, shard_over: tuple[str, ...]) -> jax.Array:
    """The steps, of which each device along the mesh axes takes some matrices.

    Two all-to-alls where matrices are sharded, one all-gather where they are replicated: the stack
    is not sharded over its count before and after, which the partitioner does not find by itself.
    """
    count, devices = len(x), math.prod(mesh.shape[name] for name in shard_over)
    missing = -count % devices
    x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, missing, 0), (0, 0, 0), (0, 0, 0)))
    is_auto = all(mesh.axis_types[mesh.axis_names.index(x)] == AxisType.Auto for x in shard_over)
    free = PartitionSpec.UNCONSTRAINED if is_auto else None
    whole = NamedSharding(mesh, PartitionSpec(None, free, free))
    place = jax.lax.with_sharding_constraint if is_auto else jax.sharding.reshard
    dealt = PartitionSpec(shard_over)
    shared = jax.shard_map(steps, mesh=mesh, in_specs=dealt, out_specs=dealt, check_vma=False)
    x = place(shared(place(x, whole if is_auto else NamedSharding(mesh, dealt))), whole)
    return x[:count]


def _mesh(function: str, arrays: Sequence[jax.Array], shard_over: tuple[str, ...]) -> Any:
    """The mesh of the arrays that has these axes, or that of `jax.set_mesh`."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if set(shard_over) <= set(mesh.axis_names):
            return mesh
    names = ", ".join(map(repr, shard_over))
    raise ValueError(
        f"{function}: `shard_over`: no mesh with {names} here, expected leaves with a "
        "NamedSharding on such a mesh, or a call of the compiled function under "
        "`jax.set_mesh(mesh)`."
    )


def _concatenated(stacks: list[jax.Array]) -> jax.Array:
    real = numerics.real_dtype(*stacks)
    return jax.lax.concatenate([numerics.widen(x, real) for x in stacks], 0)


def _joined(stacks: list[jax.Array]) -> jax.Array:
    if len(stacks) == 1:
        return stacks[0]
    real = numerics.real_dtype(*stacks)
    wide = [numerics.widen(x, real) for x in stacks]
    shape = wide[0].shape[1:]
    return splitting.join([x.reshape(-1) for x in wide]).reshape(-1, *shape)


def _split(x: jax.Array, counts: list[int]) -> list[jax.Array]:
    if len(counts) == 1:
        return [x]
    shape = x.shape[1:]
    size = shape[0] * shape[1]
    parts = splitting.split(x.reshape(-1), tuple(count * size for count in counts))
    return [part.reshape(-1, *shape) for part in parts]
