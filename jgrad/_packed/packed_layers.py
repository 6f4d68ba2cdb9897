"""Layers in the rows of a packed buffer, and sums over them.

On CPUs, XLA reduces the last axis of an array in scalar code, and writes what it reduces in parts
to memory. Here, sums work on some rows at a time and add halves until few columns are left, which
is a few times faster and needs no temporary as large as a buffer. On other devices, the iterations
of such a loop would wait for each other, so a sum over rows is one kernel.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jgrad._arithmetic.leafwise import Function
from jgrad._layers.layer_axes import LayerAxes
from jgrad._packed.layouts import Shard
from jgrad._trees.shardings import is_on_mesh, is_sharded, on_automatic_axes

# Rows per iteration: 64 kB in float32 at a width of 256, which fits first-level caches together
# with everything else that the sum reads. 32 to 128 rows take the same time.
_ROWS = 64
# Columns that are left after adding halves: one vector register of AVX-512. XLA's own sum over the
# last axis is scalar code, 7 times slower for 33 M elements.
_COLUMNS = 16


@dataclasses.dataclass(frozen=True)
class PackedLayers(LayerAxes):
    """Where the layers of a packed buffer are; `shape` is that of the rows on this device.

    Attributes:
      rows: of each layer in the whole buffer. Rows behind the last layer are zeros.
      shard: the rows that this device has; None for all of them.
    """

    rows: tuple[int, ...] = ()
    shard: Shard | None = None

    @property
    def num_layers(self) -> int:
        return len(self.rows)

    @property
    def nonempty(self) -> np.ndarray | jax.Array:
        if self.shard is None:
            return np.array(self.rows) > 0
        first = self.shard.first_row(self._all_rows)
        starts, ends = self._bounds
        return jnp.minimum(ends, first + self.shape[0]) > jnp.maximum(starts, first)

    @property
    def in_chunks(self) -> bool:
        return True

    @property
    def sort_key(self) -> tuple[object, ...]:
        return (*super().sort_key, self.rows)

    @property
    def layer_of_row(self) -> np.ndarray | jax.Array:
        """The layer of each row; the last layer for the rows behind it."""
        layers = np.repeat(np.arange(len(self.rows), dtype=np.int32), self.rows)
        behind = (0, self._all_rows - len(layers))
        every = np.pad(layers, behind, constant_values=len(self.rows) - 1)
        return every if self.shard is None else self.shard.slice(every)

    def to_elements(self, numbers: jax.Array) -> jax.Array:
        return jnp.asarray(numbers)[self.layer_of_row][:, None]

    def per_layer(self, number: ArrayLike) -> jax.Array:
        """Also from a number per row, of shape (rows, 1).

        A layer without rows on this device gets any number: nothing here is scaled by it.
        """
        x = jnp.asarray(number, dtype=float)
        if x.ndim < 2:
            return super().per_layer(x)
        if self.shape[0] == 0:
            return jnp.zeros((self.num_layers,))
        first: np.ndarray | jax.Array = self._bounds[0]
        if self.shard is not None:
            first = jnp.maximum(first - self.shard.first_row(self._all_rows), 0)
        return x[jnp.minimum(first, self.shape[0] - 1), 0]

    def sum(self, f: Function, arrays: Sequence[jax.Array | None]) -> jax.Array:
        def at_once(arrays: Sequence[jax.Array | None]) -> jax.Array:
            return jnp.sum(f(*arrays), axis=1)

        def in_chunks(arrays: Sequence[jax.Array | None]) -> jax.Array:
            return _in_chunks(self.shape[0], lambda xs: row_sums(f(*xs)), arrays)

        # A loop over rows that are sharded under `jit` would gather them.
        if any(x is not None and is_on_mesh(x) for x in arrays):
            per_row = at_once(arrays)
        else:
            per_row = jax.lax.platform_dependent(arrays, cpu=in_chunks, default=at_once)

        def per_layer(per_row: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(
                per_row, self.layer_of_row, self.num_layers, indices_are_sorted=True
            )

        if not is_sharded(per_row):
            return per_layer(per_row)
        everywhere = NamedSharding(jax.typeof(per_row).sharding.mesh, PartitionSpec())
        return on_automatic_axes(per_layer, everywhere, per_row)

    @property
    def _all_rows(self) -> int:
        """Rows of the whole buffer."""
        return self.shape[0] * (1 if self.shard is None else self.shard.devices)

    @property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each layer, and the row behind its last."""
        ends = np.cumsum(self.rows, dtype=np.int32)
        return ends - np.array(self.rows, np.int32), ends


def _in_chunks(count: int, f: Function, arrays: Sequence[jax.Array | None]) -> jax.Array:
    """`f` of so many rows of the arrays, a number for each row, some rows at a time."""
    if count <= _ROWS:
        return f(arrays)

    def norms_of_chunk(start: jax.Array) -> jax.Array:
        def chunk(x: jax.Array) -> jax.Array:
            if x.ndim == 2 and x.shape[0] == count:
                return jax.lax.dynamic_slice_in_dim(x, start, _ROWS)
            return x

        return f(jax.tree.map(chunk, arrays))

    # The last chunk overlaps the one before it, so that it needs no compilation of its own.
    full, left = divmod(count, _ROWS)
    starts = [*range(0, full * _ROWS, _ROWS), *([count - _ROWS] if left else [])]
    parts = jax.lax.map(norms_of_chunk, jnp.asarray(starts, jnp.int32))
    return jnp.concatenate([parts[:full].reshape(-1), parts[-1, _ROWS - left :]])


def row_sums(x: jax.Array) -> jax.Array:
    """The sum of each row."""
    while x.shape[1] > _COLUMNS:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return jnp.sum(x, axis=1)
