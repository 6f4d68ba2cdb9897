"""The node of an array of squares by rows and columns, which is a leaf for this library."""

from typing import Any, NamedTuple

import numpy as np


class Factors(NamedTuple):
    """Averages of the squares of a matrix over its rows and over its columns.

        element = rows columns / (mean of the rows of its matrix)

    A second moment of `adafactor` in an `OptState`. The field names are a file format: checkpoints
    hold them. Of a matrix with n outputs and m inputs these are n + m numbers.

    Attributes:
      rows: a number for each output, the mean over its inputs; of the array's shape, with inputs of
        size 1.
      columns: a number for each input, the mean over its outputs; with outputs of size 1.

    Example:
      >>> state = jgrad.adafactor(1e-2).init({"w": jnp.ones((512, 256)), "b": jnp.zeros(256)})
      >>> rows, columns = state.vw["w"]
      >>> rows.shape, columns.shape, state.vw["w"].shape, state.vw["b"].shape
      ((1, 256), (512, 1), (512, 256), (256,))
    """

    rows: Any  # arrays, or what JAX and its users put in their place
    columns: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return np.broadcast_shapes(self.rows.shape, self.columns.shape)

    @property
    def ndim(self) -> int:
        """Likewise."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Likewise."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> Any:
        """That of the averages."""
        return self.rows.dtype


Factors.__module__ = "jgrad"  # where users import it from, and what a pickle names
