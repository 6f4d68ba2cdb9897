"""Where layers live in a packed buffer: runs of rows, of which a device may have a share."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._layers.layer_axes import Place


class Share(NamedTuple):
    """A device's rows of each buffer, where buffers are cut over the axes of a mesh.

    Attributes:
      axes: their names.
      devices: the number of devices along them.
    """

    axes: tuple[str, ...]
    devices: int

    def rows(self, whole: int) -> int:
        """How many of the rows of a buffer."""
        return whole // self.devices

    def first(self, whole: int) -> jax.Array:
        """The first of them."""
        return jax.lax.axis_index(self.axes) * self.rows(whole)

    def of(self, x: ArrayLike) -> jax.Array:
        """This device's rows of an array that is whole on each."""
        x = jnp.asarray(x)
        return jax.lax.dynamic_slice_in_dim(x, self.first(len(x)), self.rows(len(x)))


@dataclasses.dataclass(frozen=True)
class Rows(Place):
    """Where the layers of a packed buffer live.

    Attributes:
      blocks: rows of each layer, in the whole buffer. Rows behind the last layer are zeros.
      share: what of the buffer is here, and has the shape; None for all.
    """

    blocks: tuple[int, ...] = ()
    share: Share | None = None

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def owners(self) -> np.ndarray | jax.Array:
        """The layer of each row; the last one of rows behind it."""
        own = np.repeat(np.arange(len(self.blocks), dtype=np.int32), self.blocks)
        every = np.pad(own, (0, self._whole - len(own)), constant_values=len(self.blocks) - 1)
        return every if self.share is None else self.share.of(every)

    @property
    def filled(self) -> np.ndarray | jax.Array:
        if self.share is None:
            return np.array(self.blocks) > 0
        low = self.share.first(self._whole)
        starts, ends = self._bounds
        return jnp.minimum(ends, low + self.shape[0]) > jnp.maximum(starts, low)

    def spread(self, numbers: jax.Array) -> jax.Array:
        return jnp.asarray(numbers)[self.owners][:, None]

    def collect(self, number: ArrayLike) -> jax.Array:
        """A number per layer as a vector, from one for all, or from a column with one per row.

        Of layers without rows here, any number: nothing here is scaled by theirs.
        """
        x = jnp.asarray(number, dtype=float)
        if x.ndim < 2:
            return super().collect(x)
        if self.shape[0] == 0:
            return jnp.zeros((self.layers,))
        first: np.ndarray | jax.Array = self._bounds[0]
        if self.share is not None:
            first = jnp.maximum(first - self.share.first(self._whole), 0)
        return x[jnp.minimum(first, self.shape[0] - 1), 0]

    @property
    def _whole(self) -> int:
        """Rows of the whole buffer."""
        return self.shape[0] * (1 if self.share is None else self.share.devices)

    @property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each layer, and that behind its last."""
        ends = np.cumsum(self.blocks, dtype=np.int32)
        return ends - np.array(self.blocks, np.int32), ends
