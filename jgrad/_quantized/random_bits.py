"""Random bits without a key: a hash of (seed, step, leaf, element).

A step therefore rounds in the same way whether parameters are packed or not, on any number of
devices, and after a restart. The state holds no key, and the program needs no random number
generator: the hash is ten integer operations per element, which XLA fuses into the rounding. Inside
`shard_map`, an array may be part of a leaf, and `Part` says where its elements are.

In each step, each leaf has two keys, which differ between leaves and between steps. They repeat
once the counter of steps is saturated.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._trees.annotations import Count

# The finaliser of MurmurHash3, 32 bits: a bijection in which each bit of the input changes each bit
# of the output with a probability near one half.
_FIRST_FACTOR, _SECOND_FACTOR = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
A = TypeVar("A", jax.Array, np.ndarray)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("index",), meta_fields=("counts",)
)
@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a leaf an array is.

    Attributes:
      counts: into how many parts each axis of the leaf is cut; static.
      index: which of these the array has; None along an axis that is whole.
    """

    counts: tuple[int, ...]
    index: tuple[jax.Array | None, ...]

    def strides(self, shape: Sequence[int], first_axes: Sequence[int] = ()) -> list[int]:
        """The distance of two neighbours in the leaf, along each axis of a part of this shape."""
        whole = tuple(map(operator.mul, shape, self.counts))
        return _strides(whole, first_axes)

    def first(self, shape: Sequence[int], first_axes: Sequence[int] = ()) -> jax.Array:
        """The number of the first element of a part of this shape."""
        number = jnp.zeros((), jnp.uint32)
        for i, n, stride in zip(self.index, shape, self.strides(shape, first_axes), strict=True):
            if i is not None:
                number = number + i.astype(jnp.uint32) * jnp.uint32(n * stride % 2**32)
        return number


class ElementKeys(NamedTuple):
    """What the hash knows of an array beside the step.

    Attributes:
      leaf: two uint32 for each leaf, of shape (2,), or for the rows of a buffer (rows, 2). Arrays,
        since XLA compiles a scalar into the kernel of a leaf, and equal kernels only once.
      first: the number of the first element, a scalar 0; or that of each row, of shape (rows,).
      part: which part of the leaf the array is; None for all of it, or for a buffer.
    """

    leaf: np.ndarray | jax.Array
    first: np.ndarray | jax.Array
    part: Part | None = None

    def element_numbers(self, shape: tuple[int, ...], first_axes: Sequence[int] = ()) -> jax.Array:
        """The number of each element, layer after layer; of a buffer, in its row."""
        if np.ndim(self.first):
            return _iota(shape, len(shape) - 1)
        return element_numbers(shape, first_axes, self.part)


def leaf_keys(seed: Count, purpose: int, positions: Sequence[int]) -> np.ndarray:
    """Two numbers for each leaf, by its position in a tree; of shape (leaves, 2)."""
    start = mixed(mixed(np.array([seed], np.uint32)) + np.uint32(purpose))
    first = mixed(np.array(positions, np.uint32) + start)
    return np.stack([first, mixed(first)], axis=1)


def step_keys(step: jax.Array) -> jax.Array:
    """Two numbers for each step, of shape (2,); computed once for all leaves."""
    first = mixed(step.astype(jnp.uint32))
    return jnp.stack([first, mixed(first)])


def random_bits(keys_of_step: jax.Array, keys: ElementKeys, elements: jax.Array) -> jax.Array:
    """32 random bits for each element, as uint32.

    Args:
      keys_of_step: `step_keys`.
      keys: of the array.
      elements: the number of each element in its leaf, or in its row, uint32.
    """
    column = (*np.shape(keys.first), *[1] * (elements.ndim - 1)) if np.ndim(keys.first) else ()
    leaf = jnp.asarray(keys.leaf)
    sums = jnp.broadcast_to(keys_of_step, leaf.shape) + leaf
    first, second = sums[..., 0].reshape(column), sums[..., 1].reshape(column)
    if np.ndim(keys.first):
        first = first + jnp.asarray(keys.first).reshape(column)
    # The second key enters between the rounds, so that streams are not shifts of each other.
    return mixed(elements + first, second)


def mixed(x: A, key: jax.Array | None = None) -> A:
    """The finaliser, of an array of JAX or NumPy."""
    x = (x ^ (x >> 16)) * _FIRST_FACTOR
    x = x if key is None else x ^ key
    x = (x ^ (x >> 13)) * _SECOND_FACTOR
    return x ^ (x >> 16)


def element_numbers(
    shape: tuple[int, ...], first_axes: Sequence[int] = (), part: Part | None = None
) -> jax.Array:
    """The number of each element in an array of this shape, or in the leaf of which it is a part.

    A sum over axes, without a reshape: XLA would move that through the hash, one operation in each
    round of its simplifications.

    Args:
      shape: of the array.
      first_axes: axes that are counted as if they came before all others.
      part: see `ElementKeys`.
    """
    strides = _strides(shape, first_axes) if part is None else part.strides(shape, first_axes)
    numbers = None
    for axis in reversed(_order(len(shape), first_axes)):
        if shape[axis] == 1:
            continue
        term = _iota(shape, axis)
        term = term if strides[axis] == 1 else term * jnp.uint32(strides[axis] % 2**32)
        numbers = term if numbers is None else numbers + term
    numbers = jnp.zeros(shape, jnp.uint32) if numbers is None else numbers
    return numbers if part is None else numbers + part.first(shape, first_axes)


def _order(ndim: int, first_axes: Sequence[int]) -> list[int]:
    return [*first_axes, *(axis for axis in range(ndim) if axis not in first_axes)]


def _strides(shape: Sequence[int], first_axes: Sequence[int]) -> list[int]:
    """The distance of two neighbours along each axis of an array."""
    strides, stride = [1] * len(shape), 1
    for axis in reversed(_order(len(shape), first_axes)):
        strides[axis], stride = stride, stride * shape[axis]
    return strides


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
