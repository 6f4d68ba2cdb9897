"""flax's variables: nodes that hold one array as their attribute `value`, with metadata about it.

`nnx.Optimizer` passes `init` a tree of variables and `update` a tree of their arrays, and users of
linen unbox a whole state, so trees are read alike in both forms. flax would misunderstand a
variable that holds an 8-bit array: it writes the parts back as a tree of its own, and shards scales
as if they had the axes of codes. Users therefore see one variable for the codes and one for the
scales, or for rows and for columns. Inside of an update, they are one variable if the parameter is
one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jgrad._trees import forms
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._trees.trees import is_leaf

Names = Sequence[object]
# Attributes in which nnx variables name the mesh axes of each axis: the first two up to flax 0.11.
_SHARDINGS = ("sharding", "sharding_names", "out_sharding", "optimizer_sharding")


def is_variable(x: object) -> bool:
    """Whether `x` is a variable of nnx. One that is no node is an array for this library."""
    kind = type(x)
    says_it = hasattr(kind, "get_metadata") and hasattr(kind, "from_metadata")
    return says_it and _has_value(x)


def is_box(x: object) -> bool:
    """Whether `x` is a box of linen, such as `nn.Partitioned`, or a variable of nnx."""
    kind = type(x)
    says_it = hasattr(kind, "unbox") and hasattr(kind, "replace_boxed")
    return is_variable(x) or (says_it and _has_value(x))


def _has_value(x: PyTree) -> bool:
    children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda y: y is not x)
    return [[getattr(key, "name", None) for key in path] for path, _ in children] == [["value"]]


def leaves_with_paths(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] = lambda x: False, *, boxes: bool = True
) -> list[tuple[KeyPath, Leaf]]:
    """As JAX's function has them, but what a variable holds has the path of the variable.

    Args:
      tree: any tree.
      is_leaf: what are leaves beside those of JAX.
      boxes: whether so has what is in boxes of linen.
    """
    is_node = is_box if boxes else is_variable
    leaves: list[tuple[KeyPath, Leaf]] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, lambda x: is_leaf(x) or is_node(x)):
        if is_leaf(x) or not is_node(x):
            leaves.append((path, x))
        else:
            inside = jax.tree_util.tree_leaves_with_path(x, is_leaf)
            leaves += [((*path, *inner[1:]), leaf) for inner, leaf in inside]
    return leaves


def named_leaves(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] = lambda x: False
) -> list[tuple[KeyPath, KeyPath, Leaf]]:
    """(path, name, leaf) of each leaf: the name of the array of a variable is the variable's path.

    An attribute `value` of any other node is a name of a model. What a tree in a variable holds has
    all of its path, as in files.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    both = zip(leaves, leaves_with_paths(tree, is_leaf), strict=True)
    return [(path, name if name == path[:-1] else path, x) for (path, x), (name, _) in both]


# ---- arrays in another form ----------------------------------------------------------------------


def blocks_of_variables(tree: PyTree) -> PyTree:
    """The tree with `Blocks` of variables for variables of `Blocks`, as of each other form."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    ends = [path[-1] for path, x in leaves if forms.find(x) is not None]
    if not any(getattr(end, "name", None) == "value" for end in ends):
        return tree  # in most calls

    def holds_blocks(x: PyTree) -> bool:
        return is_box(x) and forms.find(_value(x)) is not None

    def turned(x: PyTree) -> PyTree:
        if not holds_blocks(x):
            return x
        parts = _value(x)
        form = forms.known(parts)
        return form.kind(
            *(
                _with_value(x, part) if i == form.named_part else _box_of_part(x, part, parts.shape)
                for i, part in enumerate(parts)
            )
        )

    return jax.tree.map(turned, tree, is_leaf=holds_blocks)


def variables_of_blocks(tree: PyTree) -> PyTree:
    """The tree with variables of forms for forms of variables; the same if there are none."""
    in_form = (x for x in jax.tree.leaves(tree, is_leaf=is_leaf) if forms.find(x) is not None)
    if all(isinstance(x[0], jax.Array) for x in in_form):
        return tree  # in most calls

    def turned(x: PyTree) -> PyTree:
        if not _has_variables(x):
            return x
        form = forms.known(x)
        values = form.kind(*(_value(part) if is_box(part) else part for part in x))
        if form.named_part is None:
            return _with_names(x, values, _names_of_all)
        return _with_value(x[form.named_part], values)

    return jax.tree.map(turned, tree, is_leaf=_has_variables)


def in_form_of(tree: PyTree, turned: PyTree) -> PyTree:
    """What was made of `variables_of_blocks(tree)`, in the form of `tree`; both have one order."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(turned))


def _has_variables(x: PyTree) -> bool:
    return forms.find(x) is not None and is_box(x[0])


def _value(box: PyTree) -> Leaf:
    return jax.tree.leaves(box, is_leaf=lambda x: x is not box)[0]


def _with_value(box: PyTree, x: PyTree) -> PyTree:
    """A box like another, of something else; nothing is done to that, as flax might."""
    return jax.tree.map(lambda _: x, box, is_leaf=lambda y: y is not box)


def _box_of_part(box: PyTree, part: PyTree, shape: Sequence[int]) -> PyTree:
    """The box of scales, rows or columns, from that of the array: sharded along the same axes.

    Args:
      box: of the array.
      part: what the new one holds.
      shape: of the array.
    """
    return _with_names([box], part, lambda names: _names_of_part(names, part.shape, shape))


def _with_names(boxes: Sequence[PyTree], x: PyTree, change: Callable[..., Names]) -> PyTree:
    """A box of something else, like the first, with what is made of the names in all of them."""

    def changed(*names: Any) -> object:
        first = names[0]
        if isinstance(first, NamedSharding):
            spec = PartitionSpec(*change(*(tuple(name.spec) for name in names)))
            return NamedSharding(first.mesh, spec, memory_kind=first.memory_kind)
        if isinstance(first, PartitionSpec):
            return PartitionSpec(*change(*map(tuple, names)))
        return change(*names) if isinstance(first, (tuple, list)) else first

    box = boxes[0]
    if not is_variable(box):
        new = _with_value(box, x)
        has_names = hasattr(box, "names")
        return new.replace(names=changed(*(y.names for y in boxes))) if has_names else new
    first, *_ = metadata = [dict(y.get_metadata()) for y in boxes]
    named = {key: changed(*(y[key] for y in metadata)) for key in _SHARDINGS if key in first}
    return type(box).from_metadata(x, first | named)


def _names_of_part(names: Names, part: Sequence[int], shape: Sequence[int]) -> Names:
    """None for an axis along which blocks lie or means are, and where the array was flattened."""
    known = zip(names, shape, part, strict=False) if len(part) >= len(shape) else ()
    kept = [name if n == count else None for name, n, count in known]
    more = 0 if len(part) == len(shape) else len(part) - len(kept)
    return (*kept, *[None] * more)


def _names_of_all(*parts: Names) -> Names:
    """Those of the array: where a part has means and no name, others have it."""
    return tuple(
        next((x for x in axis if x is not None), None) for axis in zip(*parts, strict=True)
    )
