"""Host memory: whether the backend has it, which arrays are there, and moving them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jgrad._trees.protocols import PyTree

KIND = "pinned_host"


@functools.cache
def check(function: str) -> None:
    """Raises an error where the backend has no host memory of its own."""
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if KIND not in kinds:
        came = f"memory of the kinds {', '.join(map(repr, kinds))}"
        backend = f"the backend {device.platform!r}"
        raise RuntimeError(f"{function}: {backend}: {came}, expected {KIND!r} among them.")


def to_host(tree: PyTree) -> PyTree:
    """The tree with its arrays in host memory, sharded as they are."""
    return _moved(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """The tree with its arrays in the memory of their devices."""
    return _moved(tree, jax.memory.Space.Device)


def _moved(tree: PyTree, space: Any) -> PyTree:
    def is_array(x: object) -> bool:
        return isinstance(x, (jax.Array, np.ndarray))

    arrays = list(filter(is_array, jax.tree.leaves(tree)))
    # JAX takes derivatives back to the source, and to the host where none is named.
    sources = [jax.typeof(x).memory_space for x in arrays]
    moved = iter(jax.device_put(arrays, space, src=sources))
    return jax.tree.map(lambda x: next(moved) if is_array(x) else x, tree)


def place_on_host(tree: PyTree) -> str | None:
    """The path of the first array that lies in host memory; None if there is none."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host:
            return jax.tree_util.keystr(path)
    return None


def on_device(x: jax.Array) -> jax.Array:
    """An array where one can compute with it."""
    return x if place_on_host(x) is None else to_device(x)


def where_it_lies(f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """`f(tree)`, computed on the device; in host memory if arrays of the tree lie there."""
    if place_on_host(tree) is None:
        return f(tree)
    return to_host(f(to_device(tree)))
