"""States from files that were read without a target: dictionaries for the nodes of jgrad."""

from collections.abc import Sequence

import jax
import numpy as np

from jgrad._packed import packing
from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed
from jgrad._quantized.codec import BY_DTYPE
from jgrad._trees import checks, path_rules, trees
from jgrad._trees.forms import Blocks, Factors
from jgrad._trees.trees import PyTree

_BUFFERS = {"buffers"}


def with_nodes(function: str, tree: PyTree, *likes: PyTree) -> PyTree:
    """The tree with `Blocks`, `Factors` and `Packed` for dictionaries of their fields.

    Files do not have the layout of packed trees: it is that of one in `likes` with such buffers,
    of several the one whose path ends most alike.
    """

    def of_node(path: tuple[object, ...], x: PyTree) -> PyTree:
        if _is_blocks(x):
            blocks = _blocks(x)
            return {"value": blocks} if isinstance(x["codes"], dict) else blocks
        if _is_factors(x):
            factors = Factors(*(_array(x[name]) for name in Factors._fields))
            return {"value": factors} if isinstance(x["rows"], dict) else factors
        if not _is_packed(x):
            return x
        buffers = {name: _blocks(b) if _is_blocks(b) else b for name, b in x["buffers"].items()}
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

    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=_is_leaf)


def _is_leaf(x: PyTree) -> bool:
    return trees.is_leaf(x) or _is_blocks(x) or _is_packed(x) or _is_factors(x)


def _is_packed(x: PyTree) -> bool:
    return isinstance(x, dict) and x.keys() == _BUFFERS and isinstance(x["buffers"], dict)


def _is_blocks(x: PyTree) -> bool:
    """Codes and scales, as no model has them: of these dtypes."""
    if not (isinstance(x, dict) and x.keys() == {*Blocks._fields}):
        return False
    dtypes = [getattr(_array(x[name]), "dtype", None) for name in Blocks._fields]
    return dtypes[0] in BY_DTYPE and dtypes[1] == np.float32


def _is_factors(x: PyTree) -> bool:
    """Rows and columns of one array: where one has an axis, the other one has size 1."""
    if not (isinstance(x, dict) and x.keys() == {*Factors._fields}):
        return False
    rows, columns = (getattr(_array(x[name]), "shape", ()) for name in Factors._fields)
    pairs = [*zip(rows, columns, strict=False)]
    alone = [any(pair[k] > 1 == pair[1 - k] for pair in pairs) for k in (0, 1)]
    fits = len(rows) == len(columns) and all(a == b or 1 in (a, b) for a, b in pairs)
    return fits and all(alone)


def _blocks(x: dict[str, PyTree]) -> Blocks:
    return Blocks(*(_array(x[name]) for name in Blocks._fields))


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
