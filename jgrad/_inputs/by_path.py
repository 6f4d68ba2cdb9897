"""Options by the path of a leaf: `by_path`."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jgrad._inputs.options import INJECTED
from jgrad._trees import checks, leaf_names, path_rules, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.path_rules import PathRules
from jgrad._trees.protocols import Leaf, PyTree

_NAME = "by_path"


class ByPath:
    """What `by_path` returns: a function of parameters, or of their shapes.

    Example:
      >>> decay: jgrad.ByPath = jgrad.by_path({"w": 0.1}, rest=0.0)
      >>> decay({"w": jnp.ones(3), "b": jnp.ones(2)})
      {'b': 0.0, 'w': 0.1}
    """

    def __init__(self, rules: PathRules) -> None:
        self.__jgrad_rules__ = rules  # for options, which take them as a tree

    def __call__(self, params: PyTree) -> PyTree:
        """A tree like the parameters with the value of each leaf; None for None."""
        structure = trees.flatten(_shapes(params))[1]
        return structure.unflatten([value for *_, value in self._rows(params)])

    def describe(self, params: PyTree) -> str:
        """A line for each array: its path, its shape, the rule that applies, and its value."""
        lines = [
            (path, str(jnp.shape(x)), rule, _in_short(value))
            for path, x, rule, value in self._rows(params)
            if rule is not None
        ]
        return leaf_names.table(lines)

    def __repr__(self) -> str:
        rules_of_user = self.__jgrad_rules__
        rules = dict(zip(rules_of_user.patterns, rules_of_user.values, strict=False))
        rest = f", rest={rules_of_user.values[-1]!r}" if rules_of_user.has_rest else ""
        return f"{_NAME}({rules!r}{rest})"

    def _rows(self, params: PyTree) -> list[tuple[str, Leaf, str | None, PyTree]]:
        """(path, leaf, rule, value) of each leaf; without a rule of no array."""
        tree, rules_of_user = _shapes(params), self.__jgrad_rules__
        check_parameters(_NAME, tree)
        pairs = jax.tree_util.tree_leaves_with_path(tree, trees.is_leaf)
        paths = [None if x is None or checks.is_no_parameter(x) else path for path, x in pairs]
        names = leaf_names.rule_names(tree)
        chosen = rules_of_user.rules_of(
            paths, f"{_NAME}: ", lambda: names, lambda: leaf_names.masked_paths(tree)
        )
        rules = list(zip((*rules_of_user.patterns, "rest"), rules_of_user.values, strict=False))
        return [
            (name, x, *((None, None) if i is None else rules[i]))
            for name, (_, x), i in zip(names, pairs, chosen, strict=True)
        ]


ByPath.__module__ = "jgrad"  # where users import it from


def _shapes(params: PyTree) -> PyTree:
    return trees.shapes(checks.values_of(params))


def _in_short(value: object) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    return checks.describe(value) if checks.is_array(value) else repr(value)


def check_parameters(function: str, tree: PyTree) -> None:
    """Rejects a bare number, such as the count for which a schedule is called."""
    if not jax.tree_util.all_leaves([tree]):
        return
    is_array = hasattr(tree, "dtype") and jnp.issubdtype(tree.dtype, jnp.inexact)
    if not is_array or tree.ndim == 0:
        is_count = checks.is_number(tree) or hasattr(tree, "dtype")
        remedy = f"; {INJECTED}" * is_count
        problem = f"{checks.describe(tree)}, expected a tree of parameters{remedy}"
        ArgLeaves.from_tree(function, "params", tree).fail(0, TypeError, problem)


@explained
def by_path(rules: Mapping[str, object], *, rest: object = ...) -> ByPath:
    """Gives each leaf its own value of an option, chosen by patterns of paths.

        value of a leaf = that of the first rule whose pattern matches its path, else `rest`

    The path of a leaf is its keys joined by `/`. Dictionary keys, attributes and indices are all
    written alike, so `layers/0/kernel` works for dicts and lists, and for models of flax, equinox
    and haiku. In a pattern, `*` matches any text within one key, and `**` any number of keys,
    including none. A pattern has to match the whole path: "bias" matches a leaf at the top level,
    "**/bias" one anywhere. Leave out the attribute `value` with which flax's variables end a path.

    A rule that matches no leaf raises an error, and so does a leaf that matches no rule, so you
    notice if a name in the model changes. All leaves of a rule share one number in the compiled
    program.

    Args:
      rules: a mapping from patterns to values; the first match counts. A value is whatever the
        option accepts for a leaf: a number, a schedule, a bool, axes, a PartitionSpec, or a label
        for `optax.partition`.
      rest: the value for leaves that no rule matches. Without it, every leaf needs a rule.

    Returns:
      An object to pass as an option. Called with parameters, or their shapes, it returns the tree
      of values, so `optax.masked` and `optax.partition` accept it, too. Its method
      `describe(params)` returns a table of the path, shape, rule and value of each leaf.

    Raises:
      TypeError: `rules` is not a mapping, or a pattern is not a string.
      ValueError: there are no values, or a pattern is malformed; where it is used, a rule matches
        no leaf, or a leaf has no rule.

    Example:
      >>> params = {"embed": jnp.ones((9, 3)), "mlp": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}}
      >>> decay = jgrad.by_path({"embed": 0.01, "**/b": 0.0}, rest=0.1)
      >>> print(decay.describe(params))
      embed  (9, 3)  embed  0.01
      mlp/b  (2,)    **/b   0.0
      mlp/w  (3, 2)  rest   0.1
      >>> tx = jgrad.adam(1e-3, weight_decay=decay, beta2=jgrad.by_path({"embed": 0.99}, rest=0.95))
      >>> state = tx.init(params)
    """
    if not isinstance(rules, Mapping):
        expected = "a mapping of patterns to values"
        raise TypeError(f"{_NAME}: `rules`: {checks.describe(rules)}, expected {expected}.")
    for pattern in rules:
        if (expected_one := path_rules.problem_of(pattern)) is not None:
            error = ValueError if isinstance(pattern, str) else TypeError
            raise error(f"{_NAME}: `rules`: {pattern!r}, expected {expected_one}.")
    values = [*rules.values(), *([] if rest is ... else [rest])]
    if not values:
        raise ValueError(f"{_NAME}: `rules`: empty, expected a rule, or `rest=`.")
    return ByPath(PathRules(tuple(rules), values))
