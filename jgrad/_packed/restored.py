"""States restored from files without a target, where jgrad's nodes have become dictionaries."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jgrad._packed import packing
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed
from jgrad._quantized.codec import BY_DTYPE
from jgrad._trees import checks, path_rules, trees
from jgrad._trees.forms import Blocks, Factors
from jgrad._trees.protocols import PyTree


def with_nodes(function: str, tree: PyTree, *likes: PyTree) -> PyTree:
    """The tree with `Blocks`, `Factors` and `Packed` for dictionaries of their fields.

    Files do not have the layout of packed trees: it is that of one in `likes` with such buffers,
    of several the one whose path ends most alike.
    """

    def of_node(path: tuple[object, ...], x: PyTree) -> PyTree:
        kind = _kind(x)
        if kind is None:
            return x
        if kind is not Packed:  # in a variable, if its fields are variables
            node = _of_arrays(kind, x)
            return {"value": node} if isinstance(x[kind._fields[0]], dict) else node
        pairs = ((name, b, _kind(b)) for name, b in x["buffers"].items())
        buffers = {name: b if own is None else _of_arrays(own, b) for name, b, own in pairs}
        layout = _layout(buffers, path, likes)
        if layout is None:
            remedy = (
                "`like` packed as it was, or `params`; or restore it with a target; matrices of "
                "Muon that jgrad 1.1 packed, `unpack` there"
            )
            came = "the buffers of a packed tree, without their layout"
            where = checks.at(jax.tree_util.keystr(path))
            raise ValueError(f"{function}: `old`{where}: {came}, expected {remedy}.")
        return Packed({name: buffers.get(name) for name, _ in layout.shapes}, layout)

    is_leaf = lambda x: trees.is_leaf(x) or _kind(x) is not None  # noqa: E731
    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=is_leaf)


def _kind(x: PyTree) -> Any:
    """The type of node whose fields a dictionary has, in arrays as no model has them; or None."""
    if not isinstance(x, dict):
        return None
    if x.keys() == {"buffers"} and isinstance(x["buffers"], dict):
        return Packed
    for kind, fits in (Blocks, _are_blocks), (Factors, _are_factors):
        if x.keys() == {*kind._fields} and fits(*(_array(x[name]) for name in kind._fields)):
            return kind
    return None


def _are_blocks(codes: PyTree, scale: PyTree) -> bool:
    return getattr(codes, "dtype", None) in BY_DTYPE and getattr(scale, "dtype", 0) == np.float32


def _are_factors(rows: PyTree, columns: PyTree) -> bool:
    """Of one array: where one has an axis, the other one has size 1."""
    shapes = [getattr(x, "shape", ()) for x in (rows, columns)]
    pairs = [*zip(*shapes, strict=False)]
    alone = [any(pair[k] > 1 == pair[1 - k] for pair in pairs) for k in (0, 1)]
    fits = all(a == b or 1 in (a, b) for a, b in pairs)
    return len(shapes[0]) == len(shapes[1]) and fits and all(alone)


def _of_arrays(kind: Any, x: dict[str, PyTree]) -> PyTree:
    return kind(*(_array(x[name]) for name in kind._fields))


def _array(x: PyTree) -> PyTree:
    """The array of a variable of flax, which is a dictionary in a file; any other as it is."""
    return x["value"] if isinstance(x, dict) and x.keys() == {"value"} else x


def _layout(
    buffers: dict[str, PyTree], path: tuple[object, ...], likes: Sequence[PyTree]
) -> Layout | None:
    """The layout of one that has these buffers; one without an array may be missing."""

    def of_arrays(x: dict[str, PyTree]) -> dict[str, tuple[int, ...]]:
        return {name: b.shape for name, b in x.items() if b is not None}

    keys, shapes = path_rules.keys_of(path), of_arrays(buffers)

    def likeness(node: tuple[tuple[object, ...], PyTree]) -> int:
        return path_rules.common_end(path_rules.keys_of(node[0]), keys)

    for like in likes:
        nodes = jax.tree_util.tree_leaves_with_path(like, is_leaf=packing.is_packed)
        packed = filter(lambda node: packing.is_packed(node[1]), nodes)
        for _, x in sorted(packed, key=likeness, reverse=True):
            if of_arrays(x.buffers) == shapes and x.layout.shard is None:
                layout: Layout = x.layout
                return layout
    return None
