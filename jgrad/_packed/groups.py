"""Matrices of many arrays, orthogonalized together: one iteration for each shape.

A thousand leaves have a few shapes. Tall matrices are transposed, so that projections up and down
share an iteration.
"""

import collections
from collections.abc import Sequence

import jax
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._layers import newton_schulz
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._layers.newton_schulz import Coefficients
from jgrad._packed import splitting


def orthogonalized(
    arrays: Sequence[jax.Array],
    axes: Sequence[MatrixAxes],
    *,
    coefficients: Coefficients,
    compute_dtype: np.dtype | None,
) -> list[jax.Array]:
    """Each matrix of each array, in float32 or wider."""
    stacks = [own.to_wide(x) for x, own in zip(arrays, axes, strict=True)]
    groups: dict[object, list[int]] = collections.defaultdict(list)
    for i, x in enumerate(stacks):
        groups[x.shape[1:], numerics.real_dtype(x), np.iscomplexobj(x)].append(i)
    for members in groups.values():
        together = newton_schulz.orthogonalized(
            _joined([stacks[i] for i in members]),
            coefficients=coefficients,
            compute_dtype=compute_dtype,
        )
        parts = _split(together, [axes[i].count for i in members])
        for i, x in zip(members, parts, strict=True):
            stacks[i] = x
    return [own.from_wide(x) for x, own in zip(stacks, axes, strict=True)]


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
