"""Rules for paths: which rule applies to which leaf.

A path is a sequence of keys, written as `leaf_names` has them, so that one rule, such as
`layers/0/kernel`, fits models of any library.
"""

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import jax

from jgrad._trees import checks, leaf_names, trees
from jgrad._trees.leaf_names import keys_of, shown
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._trees.told import told

_ANY_KEYS, _WITHIN_KEY = "**", "*"
_SHOWN = 3  # paths named in a message


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    """What matches paths with a slash behind each key."""
    keys = pattern.split("/")
    return re.compile("".join(map(_pattern_of_key, keys)), re.DOTALL)


def _pattern_of_key(key: str) -> str:
    if key == _ANY_KEYS:
        return "(?:[^/]*/)*"
    return "[^/]*".join(map(re.escape, key.split(_WITHIN_KEY))) + "/"


def problem_of(pattern: object) -> str | None:
    """What a pattern should have been; None if it is one."""
    if not isinstance(pattern, str):
        return "a text, keys joined by `/`"
    keys = pattern.split("/")
    if "" in keys:
        return "keys joined by single slashes, such as 'layers/*/bias'"
    if any(_ANY_KEYS in key and key != _ANY_KEYS for key in keys):
        return "`**` as a key of its own, such as '**/bias'"
    return None


def _texts(path: KeyPath) -> list[str]:
    """The ways to write a path, with a slash behind each key.

    A last attribute `value` need not be written: `nnx.Optimizer` gives `init` variables, which hold
    their arrays there, and `update` the arrays.
    """
    is_value = bool(path) and getattr(path[-1], "name", None) == "value"
    ways = (path, path[:-1]) if is_value else (path,)
    return ["".join(f"{key}/" for key in keys_of(way)) for way in ways]


def _matches(pattern: str, texts: Sequence[str]) -> bool:
    """Whether a pattern is that of a path, of which these are the texts."""
    return any(map(_expression(pattern).fullmatch, texts))


def _may_match(pattern: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether a pattern, as keys, matches a path or one that begins with it."""
    if not (pattern and keys):
        return not keys
    first, rest = pattern[0], pattern[1:]
    if first == _ANY_KEYS:
        return _may_match(rest, keys) or _may_match(pattern, keys[1:])
    return bool(_expression(first).fullmatch(f"{keys[0]}/")) and _may_match(rest, keys[1:])


@jax.tree_util.register_pytree_with_keys_class
class PathRules:
    """Values by the path of a leaf. The first rule that matches is that of a leaf.

    A tree of its values, so that numbers are checked and schedules called in it as in other trees.

    Attributes:
      patterns: of the rules, in order.
      values: one for each pattern; and one more for all other leaves, if there is one.
    """

    def __init__(self, patterns: Sequence[str], values: Sequence[PyTree]) -> None:
        self.patterns, self.values = tuple(patterns), tuple(values)

    @property
    def has_rest(self) -> bool:
        """Whether there is a value for leaves that no rule matches."""
        return len(self.values) > len(self.patterns)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, PyTree], ...], tuple[str, ...]]:
        keys: list[object] = [jax.tree_util.DictKey(pattern) for pattern in self.patterns]
        keys += [jax.tree_util.GetAttrKey("rest")] * self.has_rest
        return tuple(zip(keys, self.values, strict=True)), self.patterns

    @classmethod
    def tree_unflatten(cls, patterns: tuple[str, ...], values: Sequence[PyTree]) -> "PathRules":
        return cls(patterns, values)

    def __jgrad_values__(self, function: str, name: str, reference: PyTree) -> list[Leaf]:
        """The value of each leaf of a tree, for an option; any where the tree has None."""
        known = jax.tree_util.tree_leaves_with_path(reference, trees.is_leaf)
        rules = self.rules_of(
            [None if x is None else path for path, x in known],
            f"{function}: `{name}`: ",
            lambda: leaf_names.rule_names(reference),
            lambda: leaf_names.masked_paths(reference),
        )
        for x in self.values:
            if not trees.is_one_leaf(trees.flatten(x)[1]):
                came, expected = f"{checks.describe(x)} in `by_path`", "the value of one leaf"
                raise ValueError(f"{function}: `{name}`: {came}, expected {expected}.")
        return [self.values[-1 if i is None else i] for i in rules]

    def rules_of(
        self,
        paths: Sequence[KeyPath | None],
        begin: str,
        names: Callable[[], Sequence[str]],
        masked: Callable[[], Sequence[KeyPath]],
    ) -> list[int | None]:
        """For each leaf the index of its value; None where None stands for a path.

        Args:
          paths: of the leaves.
          begin: of a message, the function and the argument.
          names: returns the names of all leaves, as rules are written. Called for messages only.
          masked: returns the paths of leaves and nodes that `optax.masked` took away. Called for
            messages only.
        """
        known = {i: path for i, path in enumerate(paths) if path is not None}
        rules = {i: self._rule_of(path) for i, path in known.items()}
        if known and told().share is None:  # a share has some of the leaves
            self._check_each_is_used(set(rules.values()), known, begin, names, masked)
        without = [i for i, rule in rules.items() if rule is None]
        if without:
            more = f" (and {len(without) - _SHOWN} more)" if len(without) > _SHOWN else ""
            leaves = ", ".join(repr(names()[i]) for i in without[:_SHOWN]) + more
            raise ValueError(f"{begin}no rule matches {leaves}, expected one, or `rest=`.")
        return [rules.get(i) for i in range(len(paths))]

    def _rule_of(self, path: KeyPath) -> int | None:
        texts, rest = _texts(path), len(self.patterns) if self.has_rest else None
        rules = (i for i, pattern in enumerate(self.patterns) if _matches(pattern, texts))
        return next(rules, rest)

    def _check_each_is_used(
        self,
        used: set[int | None],
        paths: Mapping[int, KeyPath],
        begin: str,
        names: Callable[[], Sequence[str]],
        masked: Callable[[], Sequence[KeyPath]],
    ) -> None:
        for i, pattern in enumerate(self.patterns):
            if i in used:
                continue
            taken = [i for i, path in paths.items() if _matches(pattern, _texts(path))]
            if taken:
                first = self.patterns[self._rule_of(paths[taken[0]]) or 0]
                came = f"{names()[taken[0]]!r} and all that it matches have an earlier rule"
                expected = f"expected it before {first!r}, since the first match wins"
                raise ValueError(f"{begin}rule {pattern!r}: {came}, {expected}.")
            hidden = [path for path in masked() if _may_match(pattern.split("/"), keys_of(path))]
            exact = [path for path in masked() if _matches(pattern, _texts(path))]
            begin = f"{begin}rule {pattern!r}: no leaf matches it; "
            # With `**`, a misspelt rule may match leaves in anything that is masked.
            if exact or (hidden and _ANY_KEYS not in pattern.split("/")):
                expected = "expected rules for the leaves that are left"
                raise ValueError(f"{begin}{_masked(exact or hidden)}; {expected}.")
            near = ", ".join(map(repr, _nearest(pattern, [names()[i] for i in paths])))
            maybe = f"; what it may match in {_masked(hidden)}" if hidden else ""
            raise ValueError(f"{begin}the nearest paths are {near}{maybe}.")


def _masked(paths: Sequence[KeyPath]) -> str:
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    by = "as by `optax.masked` or `optax.partition`"
    return f"{shown(paths[0])!r}{more} is masked away, {by}"


def _nearest(pattern: str, paths: Sequence[str]) -> list[str]:
    """Paths that are most like a pattern, by their last keys and as a whole."""

    def likeness(path: str) -> float:
        last_keys = pattern.split("/")[-1], path.split("/")[-1]
        both = (pattern, path), last_keys
        return sum(difflib.SequenceMatcher(None, *texts).ratio() for texts in both)

    return sorted(paths, key=likeness, reverse=True)[:_SHOWN]
