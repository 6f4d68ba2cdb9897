"""States restored from files without a target, where jgrad's nodes have become dictionaries."""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from jgrad._packed.layouts import Layout
from jgrad._packed.packing import Packed
from jgrad._trees import checks, forms, leaf_names, trees
from jgrad._trees.protocols import PyTree


def with_nodes(function: str, tree: PyTree, *likes: PyTree) -> PyTree:
    """The tree with forms, such as `Blocks`, and `Packed` for dictionaries of their fields.

    And with states of numbers alone, if `likes` have one: a layer may have the name of its field.
    Files do not have the layout of packed trees: it is that of one in `likes` with such buffers,
    of several the one whose path ends most alike.
    """
    parts = jax.tree.leaves(likes, is_leaf=_has_numbers_alone)
    states = {type(x) for x in parts if _has_numbers_alone(x)}

    def as_node(path: tuple[object, ...], x: PyTree) -> PyTree:
        kind = _kind(x, states)
        if kind is None:
            return x
        if kind is not Packed:  # in a variable, if its fields are variables
            node = _made_of(kind, x)
            is_of_variables = kind not in states and isinstance(x[kind._fields[0]], dict)
            return {"value": node} if is_of_variables else node
        buffers = {name: _made_of(_kind(b), b) for name, b in x["buffers"].items()}
        layouts, came = _layouts(buffers, path, likes), "the buffers of a packed tree"
        where = f"{function}: `old`{checks.at(jax.tree_util.keystr(path))}: {came}"
        if not layouts:
            remedy = (
                "`like` packed as it was, or `params`; or restore it with a target; matrices of "
                "Muon that jgrad 1.1 packed, `unpack` there"
            )
            raise ValueError(f"{where}, without their layout, expected {remedy}.")
        layout = layouts[0]
        if not all(x.is_part_of(layout) for x in layouts):
            remedy = "expected one; restore it with a target"
            raise ValueError(f"{where}, for which there are several layouts, {remedy}.")
        return Packed({name: buffers.get(name) for name, _ in layout.shapes}, layout)

    is_leaf = lambda x: trees.is_leaf(x) or _kind(x, states) is not None  # noqa: E731
    return jax.tree_util.tree_map_with_path(as_node, _in_order(tree), is_leaf=is_leaf)


def _in_order(tree: PyTree) -> PyTree:
    """A list for what is one in files of flax by "0" to "11", of which JAX has "10" before "2"."""
    if type(tree) is list:
        return list(map(_in_order, tree))
    if type(tree) is not dict:  # others have their own order, and are in no file
        return tree
    parts = {key: _in_order(x) for key, x in tree.items()}
    keys = [str(i) for i in range(len(parts))]
    return [parts[key] for key in keys] if len(keys) > 10 and parts.keys() == {*keys} else parts


def _has_numbers_alone(x: PyTree) -> bool:
    """Whether it is a state of jgrad with nothing inside and nothing of parameters."""
    fields = getattr(type(x), "__jgrad_fields__", None)
    return fields is not None and {"zero", "like", "measured"}.issuperset(fields.roles.values())


def _kind(x: PyTree, states: Collection[type[Any]] = ()) -> type[Any] | None:
    """The type of node whose fields a dictionary has, in arrays as no model has them; or None."""
    if not isinstance(x, dict):
        return None
    if x.keys() == {"buffers"} and isinstance(x["buffers"], dict):
        return Packed
    kinds = [*forms.makers(), *((x, _are_numbers) for x in states)]
    for kind, fits in kinds:
        if x.keys() == {*kind._fields} and fits(*(_array(x[name]) for name in kind._fields)):
            return kind
    return None


def _are_numbers(*fields: PyTree) -> bool:
    return all(getattr(x, "shape", None) == () for x in fields)


def _made_of(kind: type[Any] | None, x: PyTree) -> PyTree:
    return x if kind is None else kind(*(_array(x[name]) for name in kind._fields))


def _array(x: PyTree) -> PyTree:
    """The array of a variable of flax, which is a dictionary in a file; any other as it is."""
    return x["value"] if isinstance(x, dict) and x.keys() == {"value"} else x


def _layouts(
    buffers: dict[str, PyTree], path: tuple[object, ...], likes: Sequence[PyTree]
) -> list[Layout]:
    """The layouts of those that have these buffers; one without an array may be missing.

    In each of `likes`, of those whose paths end most alike.
    """

    def shapes_of(x: dict[str, PyTree]) -> dict[str, tuple[int, ...]]:
        return {name: b.shape for name, b in x.items() if b is not None}

    keys, shapes = leaf_names.keys_of(path), shapes_of(buffers)
    layouts: list[Layout] = []
    for like in likes:
        by_likeness: dict[int, list[Layout]] = {}
        for key_path, x in jax.tree_util.tree_leaves_with_path(like, is_leaf=trees.is_packed):
            is_it = trees.is_packed(x) and shapes_of(x.buffers) == shapes
            if is_it and x.layout.shard is None:
                end = leaf_names.common_end(leaf_names.keys_of(key_path), keys)
                by_likeness.setdefault(end, []).append(x.layout)
        layouts += by_likeness[max(by_likeness)] if by_likeness else []
    return layouts
