"""Sums over the rows of packed buffers, added up layer by layer.

XLA on CPU reduces the last axis of an array in scalar code, and writes out what is reduced in
parts. Taken some rows at a time, with halves added until few columns are left, sums are a few
times as quick, and what is added up is never as large as a buffer. Elsewhere the turns of a loop
would wait for each other, and a sum over rows is one kernel.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic.leafwise import Function
from jgrad._packed.rows import Rows

_ROWS = 64  # at a time: 64 kB in float32
_COLUMNS = 16  # left when halves are added


def sums(f: Function, place: Rows, arrays: Sequence[jax.Array | None]) -> jax.Array:
    """The sum of each layer of `f(*arrays)`, which has the rows of a buffer."""
    each = jax.lax.platform_dependent(
        arrays,
        cpu=lambda arrays: _in_turns(place.shape[0], lambda own: _rows(f(*own)), arrays),
        default=lambda arrays: jnp.sum(f(*arrays), axis=1),
    )
    return jax.ops.segment_sum(each, place.owners, place.layers, indices_are_sorted=True)


def _in_turns(rows: int, f: Function, arrays: Sequence[jax.Array | None]) -> jax.Array:
    """`f` of all rows of the arrays, a number for each row, some rows at a time."""
    if rows <= _ROWS:
        return f(arrays)

    def of_rows(start: jax.Array) -> jax.Array:
        def cut(x: jax.Array) -> jax.Array:
            if x.ndim == 2 and x.shape[0] == rows:
                return jax.lax.dynamic_slice_in_dim(x, start, _ROWS)
            return x

        return f(jax.tree.map(cut, arrays))

    # The last turn goes over some rows again, rather than be compiled apart.
    whole, left = divmod(rows, _ROWS)
    starts = [*range(0, whole * _ROWS, _ROWS), *([rows - _ROWS] if left else [])]
    parts = jax.lax.map(of_rows, jnp.asarray(starts, jnp.int32))
    return jnp.concatenate([parts[:whole].reshape(-1), parts[-1, _ROWS - left :]])


def _rows(x: jax.Array) -> jax.Array:
    """The sum of each row."""
    while x.shape[1] > _COLUMNS:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return jnp.sum(x, axis=1)
