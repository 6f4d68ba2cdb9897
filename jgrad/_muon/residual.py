"""How far results of Newton-Schulz are from orthogonal matrices, for a wrapper that reports it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import jit_static_kwargs
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.notes import Notes
from jgrad._muon import split_leaves
from jgrad._muon.matrix_axes import MatrixAxes, Part
from jgrad._packed import packing
from jgrad._trees import trees
from jgrad._trees.shardings import replicated


def note(
    inputs: Inputs,
    notes: Notes,
    axes: Sequence[MatrixAxes | None],
    parts: Sequence[Part],
    found: dict[int, jax.Array],
    like: Sequence[Any],
    join: Callable[[list[Any]], list[Any]],
) -> None:
    """Notes the largest |X X^T - I| / sqrt(rows) of the matrices of each leaf, X wide.

    NaN inside `zero`, where a device has some of the matrices of a leaf.

    Args:
      inputs: of the update.
      notes: where.
      axes: for each leaf of the unpacked tree where its matrices are; None for no matrix.
      parts: those of the arrays of the update.
      found: X, as `Part.to_matrices` has matrices, by the number of the part.
      like: an array in the shape of each part.
      join: makes arrays of their parts.
    """
    leaves: list[Any] = list(map(found.get, range(len(parts))))
    is_shard = any(spec.shard is not None for spec in inputs.specs)
    if inputs.has_buffers and not is_shard:
        rows = zip(parts, leaves, like, strict=True)
        arrays = join([None if x is None else part.from_matrices(x, g) for part, x, g in rows])
        tree = trees.flatten(inputs.tree)[1].unflatten(arrays)
        leaves = trees.flatten(packing.unpack(tree))[0]
    for i, (name, own) in enumerate(zip(trees.names(inputs.shapes), axes, strict=True)):
        if own is not None and is_shard:
            notes.add(f"muon_residual/{name}", jnp.nan)
        elif own is not None and leaves[i] is not None:
            notes.add(f"muon_residual/{name}", _largest(replicated(leaves[i]), axes=own.whole))


@jit_static_kwargs
def _largest(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    pairs = zip(split_leaves.cut(x, axes), split_leaves.pieces(axes), strict=True)
    return functools.reduce(jnp.maximum, [_largest_of_run(y, own) for y, own in pairs])


def _largest_of_run(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    x = axes.to_wide(x)
    rows = x.shape[1]
    stacked, over = ((0,), (0,)), ((2,), (2,))
    product = jax.lax.dot_general(x, x.conj(), (over, stacked))
    apart = product - jnp.eye(rows, dtype=x.dtype)[None]
    squares = jnp.sum(numerics.abs_squared(apart), axis=(1, 2))
    return jnp.max(jnp.sqrt(squares / np.float32(max(1, rows)).astype(squares.dtype)), initial=0.0)
