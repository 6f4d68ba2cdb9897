"""Names of leaves: the keys that lead to them, written alike whatever the tree is made of.

Dictionary keys, attributes and indices are all texts. A key with slashes, as in haiku, counts as
several keys, and so does a tuple, as from `flax.traverse_util.flatten_dict`.
"""

from collections.abc import Sequence

from jgrad._trees.protocols import KeyPath, PyTree
from jgrad._trees.trees import is_leaf, is_masked
from jgrad._trees.variables import leaves_with_paths, named_leaves


def keys_of(path: Sequence[object]) -> tuple[str, ...]:
    """The keys of a path, as text."""
    keys: list[str] = []
    for entry in path:
        values = (getattr(entry, attribute, None) for attribute in ("key", "name", "idx"))
        name = next((x for x in values if x is not None), entry)
        for key in name if isinstance(name, tuple) else (name,):
            keys += str(key).split("/")
    return tuple(keys)


def common_end(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of last keys that are the same."""
    ends = list(zip(reversed(a), reversed(b), strict=False))
    return next((n for n, (x, y) in enumerate(ends) if x != y), len(ends))


def shown(path: Sequence[object]) -> str:
    """A path as rules are written."""
    return "/".join(keys_of(path))


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of a text, with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def masked_paths(tree: PyTree) -> list[KeyPath]:
    """The paths of leaves and nodes that `optax.masked` or `optax.partition` has taken away."""
    return [name for _, name, x in named_leaves(tree, is_masked) if is_masked(x)]


def rule_names(tree: PyTree) -> list[str]:
    """The path of each leaf as rules are written, which need not name the `value` of a variable."""
    return [shown(name) for _, name, _ in named_leaves(tree, is_leaf)]


def names(tree: PyTree) -> list[str]:
    """The keys, attributes and indices that lead to each leaf, `layer_3/b`; no two are the same.

    A number is put behind a path that another leaf has already: a key may have a `/`, too. A bare
    leaf is called `params`. Leaves in boxes of linen are called `value` as in files of 1.0, which
    states of `watch` hold.
    """
    others: dict[str, int] = {}  # how many have taken a name since the first one
    for path, _ in leaves_with_paths(tree, is_leaf, boxes=False):
        name = unique = shown(path) or "params"
        while unique in others:
            others[name] += 1
            unique = f"{name}#{others[name]}"
        others[unique] = 0
    return list(others)
