"""How far results of Newton-Schulz are from orthogonal matrices, for a wrapper that reports it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import jit_static_kwargs
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.notes import Notes
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._packed import packing
from jgrad._trees import trees


def note(
    inputs: Inputs, notes: Notes, axes: Sequence[MatrixAxes | None], arrays: Sequence[Any]
) -> None:
    """Notes the largest |X X^T - I| / sqrt(rows) of the matrices of each leaf, X wide.

    NaN inside `zero`, where a device has some of the matrices of a leaf.

    Args:
      inputs: of the update.
      notes: where.
      axes: for each leaf of the unpacked tree where its matrices are, whole; None for no matrix.
      arrays: an array with X for each array of the update, whole; None for no matrix.
    """
    leaves = list(arrays)
    is_shard = any(spec.shard is not None for spec in inputs.specs)
    if inputs.has_buffers and not is_shard:
        structure = trees.flatten(inputs.tree)[1]
        leaves = trees.flatten(packing.unpack(structure.unflatten(leaves)))[0]
    for i, (name, own) in enumerate(zip(trees.names(inputs.shapes), axes, strict=True)):
        if own is not None and is_shard:
            notes.add(f"muon_residual/{name}", jnp.nan)
        elif own is not None and leaves[i] is not None:
            notes.add(f"muon_residual/{name}", _largest(leaves[i], axes=own))


@jit_static_kwargs
def _largest(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    x = axes.to_wide(x)
    rows = x.shape[1]
    stacked, over = ((0,), (0,)), ((2,), (2,))
    product = jax.lax.dot_general(x, x.conj(), (over, stacked))
    apart = product - jnp.eye(rows, dtype=x.dtype)[None]
    squares = jnp.sum(numerics.abs_squared(apart), axis=(1, 2))
    return jnp.max(jnp.sqrt(squares / np.float32(max(1, rows)).astype(squares.dtype)), initial=0.0)
