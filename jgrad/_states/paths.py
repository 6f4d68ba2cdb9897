"""`rename` and `reset`: parameters that a user names, by paths or by masks."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from jgrad._packed import packing
from jgrad._states import parts
from jgrad._states.parts import Keys, Part
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

_SHOWN = 3  # paths named in a message


def renamed(
    function: str, old: Sequence[Part], like: Sequence[Part], rename: Mapping[str, str]
) -> list[Part]:
    """The parts of the old state by their new paths; of prefixes of a path the longest counts."""
    is_mapping = isinstance(rename, Mapping)
    both = [*rename.items()] if is_mapping else []
    if not (is_mapping and all(isinstance(x, str) for pair in both for x in pair)):
        expected = "a mapping of old paths to new ones, keys joined by slashes"
        raise TypeError(f"{function}: `rename`: {rename!r}, expected {expected}.")
    rules = {tuple(a.split("/")): tuple(b.split("/")) for a, b in both}
    for name, parts_of, paths in ("old", old, rules), ("like", like, rules.values()):
        known = {x.keys for x in parts_of if x.leaf is not None and x.keys}
        for path in paths:
            _check_there(function, name, path, known)
    new = [x._replace(keys=_new_keys(x.keys, rules)) for x in old]
    seen: dict[tuple[tuple[str, str], Keys], Part] = {}
    for was, now in zip(old, new, strict=True):
        if now.leaf is None or not now.keys:
            continue
        other = seen.setdefault((now.role, now.keys), was)
        if other.keys != was.keys:
            came = " and ".join("/".join(x.keys) for x in (other, was))
            expected = f"one leaf for {'/'.join(now.keys)}"
            raise ValueError(f"{function}: `rename`: {came}, expected {expected}.")
    return new


def _new_keys(keys: Keys, rules: Mapping[Keys, Keys]) -> Keys:
    for end in range(len(keys), 0, -1):
        if keys[:end] in rules:
            return (*rules[keys[:end]], *keys[end:])
    return keys


def _check_there(function: str, name: str, path: Keys, known: Collection[Keys]) -> None:
    if any(keys[: len(path)] == path for keys in known):
        return
    text, there = "/".join(path), ["/".join(keys) for keys in sorted(known)]
    near = difflib.get_close_matches(text, there, _SHOWN, 0) or there[:_SHOWN]
    what = f"no such path in `{name}`, expected one such as {', '.join(near)}"
    raise ValueError(f"{function}: `rename`: {text}: {what}.")


def chosen(
    function: str,
    reset: PyTree | Callable[[PyTree], PyTree],
    params: PyTree,
    like: PyTree,
) -> set[Keys]:
    """The paths of the leaves that a mask chooses.

    Args:
      function: whose errors they are.
      reset: the mask.
      params: parameters or shapes, packed or not; or None.
      like: the new state, not packed, whose moments stand for parameters that are None.
    """
    tree = parts.moments_tree(like) if params is None else packing.shapes(params)
    tree = trees.map_leaves(checks.shape_and_dtype, tree)
    if trees.is_function(reset, tree):
        reset = reset(tree)
    flags = checks.bools(ArgLeaves.from_prefix(function, "reset", reset, "params", tree))
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=trees.is_leaf)
    return {parts.keys_of(path) for (path, _), flag in zip(leaves, flags, strict=True) if flag}
