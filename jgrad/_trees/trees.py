"""Trees of different depth: a leaf of a prefix stands for a whole subtree, and `None` is a leaf.

The arguments of a functional update may differ in depth: one gradient for every leaf, but one
learning rate for all, or one per layer. The finest tree sets the structure of the result, and every
other tree must be a prefix of it. `None` is a leaf here because a missing gradient has a meaning.
So is an 8-bit or factored array, because it corresponds to one gradient.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import optax

from jgrad._trees import forms
from jgrad._trees.protocols import KeyPath, Leaf, PyTree


class Structure(Hashable, Protocol):
    """The structure of a tree: `jax.tree_util.PyTreeDef`, whose methods have no types."""

    num_leaves: int
    num_nodes: int

    def unflatten(self, leaves: Iterable[Leaf], /) -> PyTree:
        """A tree of this structure."""

    def flatten_up_to(self, tree: PyTree, /) -> list[PyTree]:
        """What a tree has in the place of each leaf."""

    def node_data(self) -> tuple[type, Any]:
        """Of the root, its type and what it holds beside its children."""


def is_leaf(x: PyTree) -> bool:
    """What makes `None` and an array in another form leaves, for JAX's tree functions."""
    return x is None or type(x) in forms.BY_KIND  # called for each node


def is_none(x: PyTree) -> bool:
    """What makes `None` a leaf, for JAX's tree functions."""
    return x is None


def may_be_function(x: object) -> bool:
    """Whether `x` can be called; without parameters, it is unknown whether it should be.

    No arrays, as variables of flax are, no rules by path, and no class, which makes an object.
    """
    is_other = hasattr(x, "__jax_array__") or hasattr(x, "__jgrad_rules__") or isinstance(x, type)
    return callable(x) and not is_other


def opened(x: PyTree) -> PyTree:
    """The rules inside an option made by `by_path`, which are a tree; any other option as it is.

    What it returned is a function to optax, which calls no function that is a tree.
    """
    return getattr(x, "__jgrad_rules__", x)


def is_function(x: PyTree, params: PyTree) -> bool:
    """Whether to call `x`, an option beside `params`: it is callable, and no prefix of them.

    Functions may be trees: modules, registered dataclasses, and closures of optimistix. Trees may
    be callable: rates in a model of equinox. Such a tree has the structure of the parameters.
    """
    is_tree = not jax.tree_util.all_leaves([x])
    return may_be_function(x) and not (is_tree and is_prefix(masked_as(params, x), params))


def is_packed(x: PyTree) -> bool:
    """Whether it is a node that holds many leaves in few arrays, such as a `Packed`."""
    return hasattr(type(x), "__jgrad_arrays__")


def any_packed(*arguments: PyTree) -> bool:
    """Whether there is such a node somewhere."""
    return any(map(is_packed, jax.tree.leaves(arguments, is_leaf=is_packed)))


def map_packed(f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """The tree with `f(packed)` for each such node."""
    return jax.tree.map(lambda x: f(x) if is_packed(x) else x, tree, is_leaf=is_packed)


def shapes(tree: PyTree, *, as_stored: bool = False) -> PyTree:
    """The unpacked tree, with shapes and dtypes for what is packed; None where a buffer is None.

    Small leaves of a buffer in 8 bits are float32 as `unpack` makes them, or Blocks `as_stored`.
    """
    return map_packed(lambda x: x.__jgrad_shapes__(as_stored=as_stored), tree)


def flatten(tree: PyTree) -> tuple[list[Leaf], Structure]:
    """Leaves, `None` and arrays in other forms among them, and structure."""
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def is_one_leaf(structure: Structure) -> bool:
    """Whether a tree is a leaf. `treedef_is_leaf` of JAX says so of an empty container, too."""
    return structure.num_nodes == structure.num_leaves == 1


def map_leaves(f: Callable[[Leaf], Leaf], tree: PyTree) -> PyTree:
    """Applies `f` to every leaf except `None`, which stays."""
    leaves, structure = flatten(tree)
    return structure.unflatten([None if x is None else f(x) for x in leaves])


def paths(tree: PyTree) -> list[str]:
    """The path of each leaf as Python indexes it, `['layer_3']['b']`; empty for a bare leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def is_masked(x: PyTree) -> bool:
    """Whether `optax.masked` or `optax.partition` has taken it away."""
    return isinstance(x, optax.MaskedNode)


def masked_as(tree: PyTree, option: PyTree) -> PyTree:
    """An option of the whole model, without what `optax` has taken away from `tree`."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
    masked = {path: x for path, x in nodes if is_masked(x)}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: masked.get(path, x),
        option,
        is_leaf=lambda path, x: path in masked or is_leaf(x),
        is_leaf_takes_path=True,
    )


def children(node: PyTree) -> list[tuple[Any, PyTree]] | None:
    """The (key, child) pairs one level below `node`; None for a leaf."""
    if is_leaf(node) or jax.tree_util.all_leaves([node]):
        return None
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in below]


def is_prefix(prefix: PyTree, tree: PyTree) -> bool:
    """Whether each leaf of `prefix` stands where `tree` has a leaf or a subtree."""
    try:
        flatten(prefix)[1].flatten_up_to(tree)
    except ValueError:
        return False
    return True


def broadcast(prefix: PyTree, tree: PyTree) -> list[Leaf]:
    """For each leaf of `tree`, the leaf of `prefix` that stands for it."""
    leaves, structure = flatten(prefix)
    return repeat(leaves, _counts(structure, tree))


class Aligned(NamedTuple):
    """Several trees as prefixes of the finest of them.

    Attributes:
      counts: for each tree, how many leaves of the finest each of its leaves stands for.
      structure: of the finest tree.
      finest: its position among the trees.
    """

    counts: list[list[int]]
    structure: Structure
    finest: int


def align(*trees: PyTree) -> Aligned | None:
    """Aligns the trees; None if none of them is as fine as all others."""
    structures = [flatten(tree)[1] for tree in trees]
    for finest in sorted(range(len(trees)), key=lambda i: -structures[i].num_nodes):
        tree, structure = trees[finest], structures[finest]
        counts = []
        for prefix, other in zip(trees, structures, strict=True):
            if other == structure:
                counts.append([1] * other.num_leaves)
            elif is_one_leaf(other):  # for all
                counts.append([structure.num_leaves])
            elif is_prefix(prefix, tree):
                counts.append(_counts(other, tree))
        if len(counts) == len(trees):
            return Aligned(counts, structure, finest)
    return None


def repeat(leaves: Sequence[Leaf], counts: Sequence[int]) -> list[Leaf]:
    """Repeats each leaf once for every leaf of a finer tree below it."""
    return [leaf for leaf, count in zip(leaves, counts, strict=True) for _ in range(count)]


def _counts(prefix: Structure, tree: PyTree) -> list[int]:
    return [flatten(subtree)[1].num_leaves for subtree in prefix.flatten_up_to(tree)]


def differences(
    a: PyTree, b: PyTree, a_name: str, b_name: str, *, a_may_be_prefix: bool = False
) -> Iterator[str]:
    """Where two trees differ in structure: a phrase per place, each naming a path."""

    def compare(a: PyTree, b: PyTree, path: KeyPath) -> Iterator[str]:
        inner_a, inner_b = children(a), children(b)
        if inner_a is None and (inner_b is None or a_may_be_prefix):
            return
        here = f" at {jax.tree_util.keystr(path)}" if path else ""
        if inner_a is None or inner_b is None or type(a) is not type(b):
            yield f"{a_name} has {_kind(a)}{here} where {b_name} has {_kind(b)}"
            return
        static_a, static_b = _static(a), _static(b)
        if hasattr(static_a, "__jgrad_differences__") and static_a != static_b:
            names = f"{a_name}{here}", f"{b_name}{here}"
            yield from static_a.__jgrad_differences__(static_b, *names)
            return
        in_a, in_b = dict(inner_a), dict(inner_b)
        for name, present, other in ((a_name, in_a, in_b), (b_name, in_b, in_a)):
            for key in present:
                if key not in other:
                    yield f"only {name} has {jax.tree_util.keystr((*path, key))}"
        for key in in_a:
            if key in in_b:
                yield from compare(in_a[key], in_b[key], (*path, key))

    return compare(a, b, ())


def _static(node: PyTree) -> PyTree:
    """What a node holds beside its children, as the layout of a `Packed`."""
    structure: Structure = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    return structure.node_data()[1]


def _kind(node: PyTree) -> str:
    if children(node) is None:
        return "a leaf"
    return with_article(type(node).__name__)


def with_article(name: str) -> str:
    """A type, as messages call it."""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
