"""Newton-Schulz for many arrays together, with one iteration per shape; and for a tree.

A thousand leaves only have a few shapes. Tall matrices are transposed, so up and down projections
share an iteration.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function
from jgrad._arithmetic.rules import cast_back
from jgrad._inputs import matrix_options
from jgrad._layers import matrix_axes
from jgrad._layers.layer_axes import of_leaves, read_layer_axes
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._muon import all_to_all, rows
from jgrad._muon.all_to_all import Dealing, Mesh
from jgrad._muon.newton_schulz import read_steps
from jgrad._muon.rows import Rows
from jgrad._packed import buffers, packing
from jgrad._trees import checks, trees
from jgrad._trees.annotations import ArrayAxes, ComputeDType, Polynomials, Tree
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.places import partition_spec
from jgrad._trees.shardings import (
    MeshAxesPerAxis,
    axes_in_type,
    replicated,
    sharded_as,
    unknown_axes,
)

_NAME = "orthogonalize"


@explained
def orthogonalize(
    x: Tree,
    *,
    coefficients: Polynomials = "jordan",
    output_axes: ArrayAxes = (-1,),
    layer_axes: ArrayAxes = None,
    compute_dtype: ComputeDType = None,
) -> Tree:
    """Brings the singular values of each matrix close to 1, and keeps its singular vectors.

        X = x / |x|, then for each (a, b, c):  A = X X^H;  X = a X + (b A + c A A) X

    where |.| is the 2-norm of a matrix, computed without overflow or underflow, and X = 0 where x =
    0. Matrices of equal shape are iterated on together, even if they are in different leaves.

    Args:
      x: an array of a floating or complex dtype, with two axes or more, or a tree of them.
      coefficients: "jordan", with which singular values end up between 0.68 and 1.13 if none was
        below a hundredth of |x|; "you", between 0.97 and 1.04; "polar_express", between 0.85 and
        1.15; "deepseek_v4", 1 to three digits; or a sequence of triples, one per step.
      output_axes: axes that are the outputs of a matrix: an int, a tuple of ints, or a prefix tree
        of these. All other axes except `layer_axes` are inputs.
      layer_axes: axes along which matrices are stacked: an int, a tuple of ints, None, or a prefix
        tree of these.
      compute_dtype: dtype to which the factors of matrix products are rounded, such as bfloat16;
        sums are in float32. None for float32 or wider, with JAX's default precision of products.

    Returns:
      Arrays of the shapes and dtypes of `x`.

    Raises:
      ValueError: an array has fewer than two axes, an axis does not exist, or a name is unknown.
      TypeError: a leaf is not a floating array, or an option has the wrong type.

    Example:
      >>> x = {"query": jnp.ones((3, 2)), "key": jnp.ones((3, 2))}
      >>> found = jgrad.orthogonalize(x, coefficients="polar_express")
      >>> jax.tree.map(jnp.shape, found)
      {'key': (3, 2), 'query': (3, 2)}

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Amsel
      et al., "The Polar Express" (2025), algorithm 1.
    """
    packing.check_unpacked(_NAME, "x", x)
    arg = ArgLeaves.from_tree(_NAME, "x", checks.values_of(x)).with_arrays()
    there = [i for i, leaf in enumerate(arg.leaves) if leaf is not None]
    for i in there:
        leaf = arg.leaves[i]
        if not checks.is_inexact(leaf):
            arg.fail(i, TypeError, f"{checks.describe(leaf)}, expected a floating array")
    stacked = ArgLeaves.from_prefix(_NAME, "layer_axes", read_layer_axes(_NAME, layer_axes), "x", x)
    axes_given = read_layer_axes(_NAME, output_axes, "output_axes")
    outputs = ArgLeaves.from_prefix(_NAME, "output_axes", axes_given, "x", x)
    arg, stacked, outputs = (x.at(there) for x in (arg, stacked, outputs))
    layers = list(enumerate(of_leaves(stacked, arg)))
    for i, where in layers:
        matrix_options.check_is_matrix(arg, i, where)
    new = orthogonalized(
        _NAME,
        arg.leaves,
        [matrix_options.of_leaf(i, where, outputs, arg) for i, where in layers],
        read_steps(_NAME, coefficients, compute_dtype),
    )
    leaves = dict(zip(there, cast_back(new, arg.leaves), strict=True))
    structure = trees.flatten(x)[1]
    return structure.unflatten(map(leaves.get, range(structure.num_leaves)))


def orthogonalized(
    function: str,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    steps: Function,
    shard_over: tuple[str, ...] = (),
) -> list[jax.Array]:
    """Each matrix of each array, in float32 or wider.

    Args:
      function: whose errors they are.
      arrays: in which the matrices are.
      axes: where they are.
      steps: of Newton-Schulz, on a stack.
      shard_over: mesh axes over which the matrices of a shape are dealt out, under `jit`.
    """

    def compute(*runs: Any) -> tuple[list[jax.Array]]:
        return (_on_whole_matrices(steps, *runs),)

    return _on_runs(function, arrays, axes, shard_over, compute)[0]


def orthogonalized_rows(
    function: str,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    steps: Function,
    shard_over: tuple[str, ...] = (),
    *,
    fraction: float,
    of_outputs: bool,
) -> list[list[jax.Array]]:
    """Of each matrix the rows with the largest 1-norms, orthogonalized, and zeros in the others.

    And of each array which of its elements are in such rows.

    Args:
      function: as in `orthogonalized`, and so are the next four.
      arrays: in which the matrices are.
      axes: where they are.
      steps: of Newton-Schulz.
      shard_over: mesh axes over which the matrices of a shape are dealt out.
      fraction: how many of the rows, below 1.
      of_outputs: whether rows are outputs in every matrix; else they are the shorter side.
    """

    def compute(
        runs: Sequence[jax.Array], run_axes: Sequence[MatrixAxes], dealing: Dealing | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        chosen = [rows.Rows.of(of, fraction, are_outputs=of_outputs) for of in run_axes]
        return _on_rows(steps, runs, chosen, dealing)

    return _on_runs(function, arrays, axes, shard_over, compute)


def _on_runs(
    function: str,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    shard_over: tuple[str, ...],
    compute: Callable[..., tuple[list[jax.Array], ...]],
) -> list[list[jax.Array]]:
    """What is computed of arrays that are not split, as arrays like those that are given.

    Args:
      function: see `orthogonalized`.
      arrays: see there.
      axes: see there.
      shard_over: see there.
      compute: (arrays, axes, dealing) -> lists of arrays of the same shapes.
    """
    pairs = list(zip(arrays, axes, strict=True))
    dealing = mesh_with(function, arrays, shard_over) if shard_over else None
    ready = [_ready_to_cut(x, of, dealing) for x, of in pairs]
    runs = [y for x, of in ready for y in matrix_axes.cut(x, of)]
    axes_here = [matrix_axes.axes_of_runs(of) for _, of in ready]
    run_axes = list(itertools.chain(*axes_here))
    lists = []
    for column in compute(runs, run_axes, dealing):
        remaining, new = iter(column), []
        for (x, of), (_, moved), there in zip(pairs, ready, axes_here, strict=True):
            o = matrix_axes.joined([next(remaining) for _ in there], of, of.shape)
            if dealing and of.mesh_axes is not None and moved.mesh_axes not in (None, of.mesh_axes):
                o = _moved(o, dealing.mesh, moved.mesh_axes, of.mesh_axes)
            new.append(sharded_as(o, x))
        lists.append(new)
    return lists


def _ready_to_cut(
    x: jax.Array, axes: MatrixAxes, dealing: Dealing | None
) -> tuple[jax.Array, MatrixAxes]:
    """An array that is to be cut in pieces, sharded so that each device cuts its part by itself."""
    if not axes.runs:
        return x, axes
    known = None if dealing is None or not x.size else axes.mesh_axes or axes_in_type(x)
    if dealing is None or known is None:
        return replicated(x), dataclasses.replace(axes, mesh_axes=None)
    to = matrix_axes.mesh_axes_to_cut(
        dataclasses.replace(axes, mesh_axes=known), dict(dealing.mesh.shape)
    )
    if to != known:
        x = _moved(x, dealing.mesh, known, to)
    return x, dataclasses.replace(axes, mesh_axes=to)


def _moved(x: jax.Array, mesh: Mesh, start: MeshAxesPerAxis, to: MeshAxesPerAxis) -> jax.Array:
    """`x`, sharded over some mesh axes, sharded over others: here, and nowhere before or behind."""
    shard = jax.lax.with_sharding_constraint if axes_in_type(x) is None else jax.sharding.reshard
    for names in (start, to):
        x = shard(x, NamedSharding(mesh, partition_spec(names)))
    return x


# ---- some rows of each matrix ------------------------------------------------------------------


def _on_rows(
    steps: Function, arrays: Sequence[jax.Array], chosen: Sequence[Rows], dealing: Dealing | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The rows that are taken, orthogonalized, and which they are.

    They are put together in arrays of their own, of which devices have parts as of the whole; only
    these are dealt out.
    """
    new, is_taken = list(arrays), [jnp.ones(x.shape, bool) for x in arrays]
    alike: dict[object, list[int]] = collections.defaultdict(list)
    for i, (x, of) in enumerate(zip(arrays, chosen, strict=True)):
        if x.size:
            alike[of, x.dtype, axes_in_type(x), unknown_axes(x)].append(i)
    few: dict[int, jax.Array] = {}
    axes: dict[int, MatrixAxes] = {}
    groups: dict[tuple[int, bool] | None, list[int]] = collections.defaultdict(list)
    back: list[tuple[list[int], Callable[[list[jax.Array]], list[jax.Array]]]] = []
    for members in alike.values():
        of = chosen[members[0]]
        compacted, masks, where, put_back = _compact([arrays[i] for i in members], of, dealing)
        back.append((members, put_back))
        slots, *columns = where.shape[len(where.stacked) :]
        key = (of.count, slots > math.prod(columns)) if slots > of.count else None
        groups[key] += members
        for i, x, mask in zip(members, compacted, masks, strict=True):
            few[i], axes[i] = x, where
            is_taken[i] = sharded_as(jnp.broadcast_to(mask, new[i].shape), new[i])
    for key, members in groups.items():
        on_few = steps if key is None else rows.on_few_rows(steps, key[0], are_columns=key[1])
        together = [few[i] for i in members], [axes[i] for i in members]
        few |= zip(members, _on_whole_matrices(on_few, *together, dealing), strict=True)
    for members, put_back in back:
        for i, x in zip(members, put_back([few[i] for i in members]), strict=True):
            new[i] = x
    return new, is_taken


def _compact(
    arrays: list[jax.Array], of: Rows, dealing: Dealing | None
) -> tuple[
    list[jax.Array], list[jax.Array], MatrixAxes, Callable[[list[jax.Array]], list[jax.Array]]
]:
    """The rows that are taken, which they are, where they are matrices; and the way back.

    On each device of its part, where it is known how the arrays are sharded.
    """
    known = None if dealing is None else of.axes.mesh_axes or axes_in_type(arrays[0])
    if known is None or dealing is None:
        arrays = [replicated(x) for x in arrays]
        masks = rows.largest(arrays, rows=of)
        few = rows.compact(arrays, masks, rows=of)
        return few, masks, of.taken(None, {}), lambda new: rows.spread(new, masks, rows=of)
    sizes = dict(dealing.mesh.shape)
    local = of.on_device(known, sizes)
    axes = local.taken(known, sizes)
    per_row = tuple(() if i in of.sides[1] else names for i, names in enumerate(known))
    whole, few_spec, mask_spec = map(partition_spec, (known, axes.mesh_axes, per_row))
    on_each = functools.partial(jax.shard_map, mesh=dealing.mesh, check_vma=False)

    def first(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        masks = rows.largest(arrays, rows=local)
        return rows.compact(arrays, masks, rows=local), masks

    few, masks = on_each(first, in_specs=whole, out_specs=(few_spec, mask_spec))(arrays)
    spread = functools.partial(rows.spread, rows=local)
    put_back = on_each(spread, in_specs=(few_spec, mask_spec), out_specs=whole)
    return few, masks, axes, lambda new: put_back(new, masks)


# ---- whole matrices ----------------------------------------------------------------------------


def _on_whole_matrices(
    steps: Function,
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    dealing: Dealing | None,
) -> list[jax.Array]:
    """Each matrix of each array, of arrays that are not split."""
    new = {} if dealing is None else _exchanged(steps, arrays, axes, dealing)
    stacks = {
        i: of.as_wide.of(replicated(x))
        for i, (x, of) in enumerate(zip(arrays, axes, strict=True))
        if i not in new
    }
    groups: dict[object, list[int]] = collections.defaultdict(list)
    for i, x in stacks.items():
        # JAX loses track of replication when replicated and sharded arrays are concatenated, so
        # they are grouped separately.
        groups[*_kind(x, axes[i]), unknown_axes(x)].append(i)
    for members in groups.values():
        counts, alike = [axes[i].count for i in members], [stacks[i] for i in members]
        if dealing is not None:
            stack = jax.lax.concatenate(_alike(alike), 0)
            parts = jax.lax.split(dealt_out(steps, stack, dealing), counts)
        else:
            stack = alike[0] if len(alike) == 1 else buffers.join(_alike(alike))
            parts = _split(steps(stack), counts)
        new |= {i: axes[i].as_wide.back(x) for i, x in zip(members, parts, strict=True)}
    return [new[i] for i in range(len(arrays))]


def _kind(x: jax.Array, axes: MatrixAxes) -> tuple[object, ...]:
    """What matrices have in common that share an iteration."""
    return axes.wide, numerics.real_dtype(x), np.iscomplexobj(x)


def _exchanged(
    steps: Function, arrays: Sequence[jax.Array], axes: Sequence[MatrixAxes], dealing: Dealing
) -> dict[int, jax.Array]:
    """Those of which it is known how they are sharded, by number."""
    known: dict[int, MatrixAxes] = {}
    groups: dict[object, list[int]] = collections.defaultdict(list)
    for i, (x, of) in enumerate(zip(arrays, axes, strict=True)):
        if x.size and (names := of.mesh_axes or axes_in_type(x)) is not None:
            known[i] = dataclasses.replace(of, mesh_axes=names)
            groups[_kind(x, of)].append(i)
    new: dict[int, jax.Array] = {}
    for members in groups.values():
        alike = [arrays[i] for i in members], [known[i] for i in members]
        orthogonal = all_to_all.orthogonalized(steps, *alike, dealing)
        new |= zip(members, orthogonal, strict=True)
    return new


def dealt_out(steps: Function, x: jax.Array, dealing: Dealing) -> jax.Array:
    """The steps on a stack, of which each device along the mesh axes takes some matrices.

    Two all-to-alls where matrices are sharded, one all-gather where they are replicated: the stack
    is not sharded over its count before and after, which the partitioner does not find by itself.
    """
    mesh, shard_over = dealing
    count, devices = len(x), math.prod(mesh.shape[name] for name in shard_over)
    missing = -count % devices
    x = jax.lax.pad(x, np.zeros((), x.dtype), ((0, missing, 0), (0, 0, 0), (0, 0, 0)))
    is_auto = all(mesh.axis_types[mesh.axis_names.index(x)] == AxisType.Auto for x in shard_over)
    free = PartitionSpec.UNCONSTRAINED if is_auto else None
    whole = NamedSharding(mesh, PartitionSpec(None, free, free))
    shard = jax.lax.with_sharding_constraint if is_auto else jax.sharding.reshard
    dealt = PartitionSpec(shard_over)
    on_each = jax.shard_map(steps, mesh=mesh, in_specs=dealt, out_specs=dealt, check_vma=False)
    x = shard(on_each(shard(x, whole if is_auto else NamedSharding(mesh, dealt))), whole)
    return x[:count]


def mesh_with(function: str, arrays: Sequence[jax.Array], shard_over: tuple[str, ...]) -> Dealing:
    """The axes on the mesh of the arrays that has these axes, or that of `jax.set_mesh`."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if set(shard_over) <= set(mesh.axis_names):
            return Dealing(mesh, shard_over)
    names = ", ".join(map(repr, shard_over))
    raise ValueError(
        f"{function}: `shard_over`: no mesh with {names} here, expected leaves with a "
        "NamedSharding on such a mesh, or a call of the compiled function under "
        "`jax.set_mesh(mesh)`."
    )


def _alike(stacks: list[jax.Array]) -> list[jax.Array]:
    real = numerics.real_dtype(*stacks)
    return [numerics.widen(x, real) for x in stacks]


def _split(x: jax.Array, counts: list[int]) -> list[jax.Array]:
    if len(counts) == 1:
        return [x]
    shape = x.shape[1:]
    sizes = tuple(count * math.prod(shape) for count in counts)
    return [part.reshape(-1, *shape) for part in buffers.split(x.reshape(-1), sizes)]
