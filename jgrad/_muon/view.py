"""The elements of an array in another shape and order, and the way back, written once."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jgrad._arithmetic.leafwise import Function


class View:
    """Another way to see arrays of one shape: a list of steps, each of which knows its inverse.

    Not by `jax.linear_transpose`, which would trace each view of each leaf a second time. All by
    operations of `lax`, which return the array itself where there is nothing to do, and which are a
    fraction of those of `jnp` to trace.

    Attributes:
      start: the shape of the arrays.
      shape: what they have in this view.
    """

    def __init__(self, start: Sequence[int]) -> None:
        self.start = self.shape = tuple(start)
        self._steps: list[tuple[Function, Function]] = []

    def reshape(self, *shape: int) -> "View":
        """With axes split or merged."""
        there = functools.partial(jax.lax.reshape, new_sizes=shape)
        return self._then(shape, there, functools.partial(jax.lax.reshape, new_sizes=self.shape))

    def transpose(self, order: Sequence[int]) -> "View":
        """With axes in another order."""
        there = functools.partial(jax.lax.transpose, permutation=tuple(order))
        back = functools.partial(jax.lax.transpose, permutation=tuple(np.argsort(order)))
        return self._then([self.shape[axis] for axis in order], there, back)

    def trim(self, size: int) -> "View":
        """Without what is behind so many elements of the last axis; back come zeros."""
        *others, length = self.shape
        if length == size:
            return self
        padding = [*((0, 0, 0) for _ in others), (0, length - size, 0)]
        return self._then(
            [*others, size],
            lambda x: jax.lax.slice(x, [0] * x.ndim, [*others, size]),
            lambda x: jax.lax.pad(x, np.zeros((), x.dtype), padding),
        )

    def of(self, x: jax.Array) -> jax.Array:
        """The array in this view."""
        return functools.reduce(lambda x, step: step[0](x), self._steps, x)

    def back(self, x: jax.Array) -> jax.Array:
        """The array of which `x` is the view."""
        return functools.reduce(lambda x, step: step[1](x), reversed(self._steps), x)

    def _then(self, shape: Sequence[int], there: Function, back: Function) -> "View":
        self.shape = tuple(shape)
        self._steps.append((there, back))
        return self
