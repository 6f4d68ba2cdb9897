"""How far the results of Newton-Schulz are from orthogonal matrices, which `watch` notes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import jit_static_kwargs
from jgrad._inputs import matrix_axes
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.matrix_axes import Array, MatrixAxes
from jgrad._muon import rows
from jgrad._muon.parts import Matrices, Part, Parts, PerLeaf, PerPart
from jgrad._muon.rows import Rows
from jgrad._packed import packing
from jgrad._trees import trees
from jgrad._trees.shardings import replicated


def note(
    inputs: Inputs,
    matrices: Matrices,
    parts: Parts,
    x: PerPart[Array],
    fraction: float | None,
    *,
    of_outputs: bool,
) -> None:
    """Notes the largest |X X^T - I| / sqrt(rows) of the matrices of each layer of a leaf, X wide.

    NaN inside `zero`, where a device has some of the matrices of a leaf.

    Args:
      inputs: of the update, which has notes.
      matrices: where those of each leaf are.
      parts: of the arrays.
      x: results of Newton-Schulz, of each part.
      fraction: of the rows, which alone are in X; None for all.
      of_outputs: whether rows are outputs in every matrix.
    """
    assert inputs.notes is not None
    leaves: PerLeaf[Array] = x
    is_shard = any(spec.shard is not None for spec in inputs.specs)
    if inputs.has_buffers and not is_shard:
        arrays = parts.join(parts.map(Part.from_matrices, x), inputs.g)
        tree = trees.flatten(inputs.tree)[1].unflatten(arrays)
        leaves = trees.flatten(packing.unpack(tree))[0]
    of = functools.partial(_residual, fraction=fraction, of_outputs=of_outputs)
    for i, (name, axes) in enumerate(zip(trees.names(inputs.shapes), matrices, strict=True)):
        if axes is not None and is_shard:
            unknown = jnp.full([axes.shape[axis] for axis in axes.stacked], jnp.nan)
            inputs.notes.add(f"muon_residual/{name}", unknown)
        elif axes is not None and (leaf := leaves[i]) is not None:
            inputs.notes.add(f"muon_residual/{name}", of(replicated(leaf), axes=axes.whole))


@jit_static_kwargs
def _residual(
    x: jax.Array, *, axes: MatrixAxes, fraction: float | None, of_outputs: bool
) -> jax.Array:
    runs = list(zip(matrix_axes.cut(x, axes), matrix_axes.pieces(axes), strict=True))
    if fraction is not None:
        chosen = [(y, Rows.of(of, fraction, are_outputs=of_outputs)) for y, of in runs]
        runs = [(rows.not_zero(y, rows=of), of.taken(None, {})) for y, of in chosen]
    of_runs = [_residual_of_run(y, of) for y, of in runs]
    # The axis that counts the blocks of a run is the one behind the layers in front of outputs.
    first, layers = sum(axis < axes.outputs[0] for axis in axes.stacked), len(axes.stacked)
    of_layers = [jnp.max(y, first) if y.ndim > layers else y for y in of_runs]
    return functools.reduce(jnp.maximum, of_layers)


def _residual_of_run(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    stack = [axes.shape[axis] for axis in axes.stacked]
    x = axes.as_wide.of(x)
    rows = x.shape[1]
    apart = numerics.product(x, x, adjoint_y=True) - jnp.eye(rows, dtype=x.dtype)[None]
    squares = jnp.sum(numerics.abs_squared(apart), axis=(1, 2))
    return jnp.sqrt(squares / np.float32(max(1, rows)).astype(squares.dtype)).reshape(stack)
