"""Host memory: which arrays lie there, which belong there, and moving them.

Where an array lies is in its type, also under `jit`, so no flag says it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jgrad._trees.checks import is_on_host as is_on_host, place_on_host as place_on_host
from jgrad._trees.protocols import Leaf, PyTree

KIND = "pinned_host"

T = TypeVar("T")

# Below that, starting a copy takes as long as the copy: 256 KB in 10 us.
_SMALLEST = 2**16
# XLA for TPUs cannot slice one row of an array in half precision from the host, and scalars may be
# donated to results on the device. Stacked vectors have as many rows as a model has layers.
ROWS = 256
# What is large is made and updated in slices: of at most so many elements, since a copy of 32 MB
# takes a hundred times as long as starting it; and of a multiple of the rows of a TPU's tile.
SLICE, TILE = 2**23, 32


@functools.cache
def check(function: str) -> None:
    """Raises an error where the backend has no host memory of its own."""
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if KIND not in kinds:
        came = f"memory of the kinds {', '.join(map(repr, kinds))}"
        backend = f"the backend {device.platform!r}"
        raise RuntimeError(f"{function}: {backend}: {came}, expected {KIND!r} among them.")


def is_array(x: object) -> bool:
    """Whether it has elements, of JAX or of NumPy."""
    return isinstance(x, (jax.Array, np.ndarray))


def is_large(x: Leaf) -> bool:
    """Whether it is an array that is worth a copy, and can be sliced in host memory: not bytes."""
    return is_array(x) and x.dtype.itemsize > 1 and is_large_shape(x.shape)


def is_large_shape(shape: Sequence[int]) -> bool:
    """Whether an array of that shape is: see above."""
    size, sides = math.prod(shape), [n for n in shape if n > 1]
    return size >= _SMALLEST and (len(sides) == 1 or size // sides[-1] >= ROWS)


def slices(shape: Sequence[int]) -> int | None:
    """Into how many slices along its first axis a large array is cut; None if it stays whole."""
    size = math.prod(shape)
    if size <= SLICE or len(shape) < 2 or not is_large_shape(shape):
        return None
    is_stack = len(shape) > 2 and shape[-2] >= TILE
    tile = 1 if is_stack else TILE
    fewest = -(-size // SLICE)
    counts = (n for n in range(fewest, 16 * fewest) if shape[0] % (n * tile) == 0)
    return next(counts, shape[0] if is_stack else None)


def to_host(tree: T, which: Iterable[bool] | None = None) -> T:
    """The tree with its arrays, or some of them, in host memory, sharded as they are."""
    moves = map(is_array, jax.tree.leaves(tree)) if which is None else which
    return _moved(tree, jax.memory.Space.Host, moves)


def to_device(tree: T) -> T:
    """The tree with its arrays in the memory of their devices."""
    return _moved(tree, jax.memory.Space.Device, map(is_on_host, jax.tree.leaves(tree)))


def large_to_host(tree: T) -> T:
    """The tree with its large arrays in host memory."""
    return _moved(tree, jax.memory.Space.Host, map(is_large, jax.tree.leaves(tree)))


def where_they_lay(new: T, old: PyTree) -> T:
    """New arrays, each in host memory if the old one lies there."""
    return _moved(new, jax.memory.Space.Host, map(is_on_host, jax.tree.leaves(old)))


def _moved(tree: T, space: Any, moves: Iterable[bool]) -> T:
    """The tree with some of its leaves there."""
    leaves, chosen = jax.tree.leaves(tree), list(moves)
    arrays = [x for x, use in zip(leaves, chosen, strict=True) if use]
    if not arrays:
        return tree
    # JAX takes derivatives back to the source, and to the host where none is named.
    sources = [jax.typeof(x).memory_space for x in arrays]
    moved = iter(jax.device_put(arrays, space, src=sources))
    pairs = zip(leaves, chosen, strict=True)
    placed = [next(moved) if use else x for x, use in pairs]
    result: T = jax.tree.unflatten(jax.tree.structure(tree), placed)
    return result


def sharded_where(sharding: Any, array_type: Leaf) -> Any:
    """A sharding in the memory that a type names."""
    on_host = bool(array_type.memory_space == jax.memory.Space.Host)
    if on_host == (sharding.memory_kind == KIND):
        return sharding
    return sharding.with_memory_kind(KIND if on_host else None)


def as_on_device(x: Leaf) -> Leaf:
    """The type of an array as it would be on the device, for a trace; the array if it is there."""
    if not is_on_host(x):
        return x
    return jax.typeof(x).update(memory_space=jax.memory.Space.Device)


def add_note(error: ValueError, function: str, remedy: str, **arguments: PyTree) -> None:
    """Says beside an error of JAX which arguments lie in host memory, if it is about that."""
    if "memory_space" not in str(error):
        return
    places = {name: place_on_host(tree) for name, tree in arguments.items()}
    on_host = [f"`{name}` at {where}" for name, where in places.items() if where is not None]
    came = f"{' and '.join(on_host)} in host memory" if on_host else "an array in host memory"
    error.add_note(f"{function}: {came}; {remedy}.")


def where_it_lies(f: Callable[[PyTree], T], tree: PyTree) -> T:
    """`f(tree)`, computed on the device; in host memory if arrays of the tree lie there."""
    if any(map(is_on_host, jax.tree.leaves(tree))):
        return to_host(f(to_device(tree)))
    return f(tree)
