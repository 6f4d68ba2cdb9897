"""What of parameters and of a state belongs to one layer of a stack.

A transformation sees a layer as a stack of one: its leaves keep a first axis, of length 1, and all
other leaves are None. So `layer_axes=0` says of a layer what it says of the stack. Which arrays of
a state are those of a stack, and along which axis they are cut, is asked of `tx.init`: it is traced
for the leaves of the stack alone, and for a stack of many times as many layers.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jgrad._packed import packing
from jgrad._trees import checks, shares
from jgrad._trees.shares import Share
from jgrad._trees.trees import PyTree

_NAME = "step_in_backward"

# An array with so many times as many layers tells blocks of 256 that cross layers from others.
_MANY = 256

_BLOCKS = (
    "expected the arrays of one layer beside those of the next; moments in 8 bits need "
    "`layer_axes=0`, so that no block is of two layers"
)


class Cut(NamedTuple):
    """Where an array is cut into layers.

    Attributes:
      axis: along which the layers follow each other.
      length: of each along it.
    """

    axis: int
    length: int

    def out_of(self, x: jax.Array, i: Any) -> jax.Array:
        """Layer `i`."""
        start = i * self.length
        layer: jax.Array = jax.lax.dynamic_slice_in_dim(x, start, self.length, self.axis)
        return layer

    def put(self, x: jax.Array, layer: jax.Array, i: Any) -> jax.Array:
        """The array with layer `i`."""
        start = i * self.length
        new: jax.Array = jax.lax.dynamic_update_slice_in_dim(x, layer, start, self.axis)
        return new


FIRST = Cut(0, 1)


class Portion(NamedTuple):
    """What a share has.

    Attributes:
      positions: of its leaves among those of the parameters.
      count: the number of layers; None where it is all that no stack has.
      structure: of its state, when it is alone.
      places: for each array of that the position in the whole state, and where it is cut; None for
        an array that has no layers.
    """

    positions: tuple[int, ...]
    count: int | None
    structure: Any
    places: list[tuple[int, Cut | None]]

    @property
    def cuts(self) -> list[tuple[int, Cut]]:
        """Those of arrays that have layers."""
        return [(i, cut) for i, cut in self.places if cut is not None]


def of_stack(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    positions: Sequence[int],
    count: int,
) -> Portion:
    """That of a stack."""
    some, structure = _begun(tx, params, positions, 0)
    many, _ = _begun(tx, params, positions, 0, _MANY)
    known, paths = _by_path(state)
    places: list[tuple[int, Cut | None]] = []
    for path, x in some.items():
        i, whole = _whole(known, paths, path, x.shape)
        repeated = many[path].shape if path in many else ()
        differing = [k for k, (a, b) in enumerate(zip(x.shape, repeated)) if a != b]
        if not differing and x.shape == repeated:
            places.append((i, None))
            continue
        axis = differing[0] if differing else 0
        expected = [n * _MANY if k == axis else n for k, n in enumerate(x.shape)]
        if list(repeated) != expected or x.shape[axis] % count:
            came = f"shape {whole} of {count} layers"
            raise ValueError(f"{_NAME}: `state`{checks.at(paths[i])}: {came}, {_BLOCKS}.")
        places.append((i, Cut(axis, x.shape[axis] // count)))
    return Portion(tuple(positions), count, structure, places)


def of_rest(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    stacks: Sequence[Portion],
) -> Portion:
    """That of all leaves in no stack. It has all numbers that are of no layer, too."""
    taken = {i for stack in stacks for i in stack.positions}
    positions = [i for i in range(len(jax.tree.leaves(params))) if i not in taken]
    some, structure = _begun(tx, params, positions, None)
    known, paths = _by_path(state)
    places = [(_whole(known, paths, path, x.shape)[0], None) for path, x in some.items()]
    here = {i for i, _ in places} | {i for stack in stacks for i, _ in stack.cuts}
    for i, path in enumerate(paths):
        if i not in here:
            expected = "expected an entry for each of its layers: `layer_axes=0` in the wrapper"
            begin = f"{_NAME}: `state`{checks.at(path)}"
            raise ValueError(f"{begin}: a number of a whole stack, {expected}.")
    return Portion(tuple(positions), None, structure, list(places))


def check_trees(params: PyTree, state: PyTree) -> None:
    """No packed trees: a buffer has rows of all layers."""
    for name, tree in (("params", params), ("state", state)):
        if packing.any_packed(tree):
            remedy = "expected the tree itself, since a buffer holds leaves of all layers: `unpack`"
            raise ValueError(f"{_NAME}: `{name}`: a packed tree, {remedy}.")


def alone(structure: Any, positions: Iterable[int], leaves: Iterable[Any]) -> PyTree:
    """A tree of parameters with these leaves, and None for all others."""
    entries: list[Any] = [None] * structure.num_leaves
    for i, x in zip(positions, leaves, strict=True):
        entries[i] = x
    return structure.unflatten(entries)


def _begun(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    positions: Sequence[int],
    layer: int | None,
    times: int = 1,
) -> tuple[dict[Any, jax.ShapeDtypeStruct], Any]:
    """The arrays of a state of some leaves, by path, and its structure."""
    leaves, structure = jax.tree.flatten(params)
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0] * times, *x.shape[1:]) if times > 1 else x.shape, x.dtype)
        for x in (leaves[i] for i in positions)
    ]
    with shares.within(Share(layer, begins=True)):
        state = jax.eval_shape(tx.init, alone(structure, positions, shapes))
    arrays, of_state = jax.tree_util.tree_flatten_with_path(state)
    return dict(arrays), of_state


def _by_path(state: PyTree) -> tuple[dict[Any, tuple[int, Any]], list[str]]:
    """The position and the array of each path, and all paths as text."""
    arrays = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(path) for path, _ in arrays]
    return {path: (i, x) for i, (path, x) in enumerate(arrays)}, paths


def _whole(
    known: dict[Any, tuple[int, Any]], paths: Sequence[str], path: Any, shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """The position and the shape of an array in the whole state, which has to fit."""
    i, x = known.get(path, (None, None))
    if i is None or np.shape(x) != shape:
        came = "nothing" if i is None else f"shape {np.shape(x)}"
        where = checks.at(jax.tree_util.keystr(path))
        expected = f"shape {shape}, as `tx.init(params)` has it"
        raise ValueError(f"{_NAME}: `state`{where}: {came}, expected {expected}.")
    return i, np.shape(x)
