"""`rename` and `reset`: parameters that a user names, by paths or by masks; paths of variables."""

import collections
import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from jgrad._packed import packing
from jgrad._states import parts
from jgrad._states.parts import Keys, Meaning, Part
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

_SHOWN = 3  # paths named in a message
_VALUE = "value"


def renamed(
    function: str, old: Sequence[Part], like: Sequence[Part], rename: Mapping[str, str]
) -> list[Part]:
    """The parts of the old state by their new paths; of prefixes of a path the longest counts."""
    is_mapping = isinstance(rename, Mapping)
    if not (is_mapping and all(isinstance(x, str) for both in rename.items() for x in both)):
        expected = "a mapping of old paths to new ones, keys joined by slashes"
        raise TypeError(f"{function}: `rename`: {rename!r}, expected {expected}.")
    rules = {
        _there(function, "old", was, old): _there(function, "like", now, like)
        for was, now in rename.items()
    }
    olds, likes = _by_meaning(old), _by_meaning(like)
    everything = frozenset(x.keys for x in like)
    of_variables = functools.cache(_of_variables)
    new: list[Part] = []
    seen: dict[Meaning, Keys] = {}
    for part in old:
        keys = _new_keys(part.keys, rules)
        known = likes.get((part.kind, part.field), everything)
        if keys not in known:
            variable = of_variables(olds[part.kind, part.field]).get(part.keys[:-1])
            plain = keys[:-1] if variable == part.keys else keys
            keys = plain if plain in known else of_variables(known).get(plain, keys)
        part_of_like = part._replace(keys=keys)
        new.append(part_of_like)
        was = part.keys if part.leaf is None else seen.setdefault(part_of_like.meaning, part.keys)
        if keys and was != part.keys:
            came = " and ".join(map("/".join, (was, part.keys)))
            raise ValueError(
                f"{function}: `rename`: {came}, expected one leaf for {'/'.join(keys)}."
            )
    return new


def _new_keys(keys: Keys, rules: Mapping[Keys, Keys]) -> Keys:
    for end in range(len(keys), 0, -1):
        if keys[:end] in rules:
            return (*rules[keys[:end]], *keys[end:])
    return keys


def _by_meaning(state: Sequence[Part]) -> dict[tuple[str, str], frozenset[Keys]]:
    paths: dict[tuple[str, str], set[Keys]] = {}
    for x in state:
        paths.setdefault((x.kind, x.field), set()).add(x.keys)
    return {meaning: frozenset(known) for meaning, known in paths.items()}


def _of_variables(paths: Collection[Keys]) -> dict[Keys, Keys]:
    """By the paths of variables of flax those of their arrays.

    In files that were read without a target the array of a variable has the key `value`. Models
    have such keys, too, but not alone in a subtree.
    """
    leaves_below = collections.Counter(keys[:end] for keys in paths for end in range(len(keys)))
    ends = {keys[:-1]: keys for keys in paths if keys[-1:] == (_VALUE,)}
    return {plain: keys for plain, keys in ends.items() if leaves_below[plain] == 1}


def _there(function: str, name: str, text: str, state: Sequence[Part]) -> Keys:
    """The path of one leaf or subtree at least; that of a variable may end in `value`."""
    known = {x.keys for x in state if x.leaf is not None and x.keys}
    path = tuple(text.split("/"))
    if any(keys[: len(path)] == path for keys in known):
        return path
    variable = path[:-1]
    if path[-1] == _VALUE and [x for x in known if x[: len(variable)] == variable] == [variable]:
        return variable
    there = ["/".join(keys) for keys in sorted(known)]
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
      reset: the mask; True for all leaves.
      params: parameters or shapes, packed or not; or None.
      like: the new state, not packed, whose moments stand for parameters that are None.
    """
    if reset is True:
        return {x.keys for x in parts.read(like)}
    tree = parts.moments_tree(like) if params is None else packing.shapes(params)
    tree = trees.map_leaves(checks.shape_and_dtype, tree)
    if trees.is_function(reset, tree):
        reset = reset(tree)
    flags = checks.bools(ArgLeaves.from_prefix(function, "reset", reset, "params", tree))
    return {keys for (keys, _), flag in zip(parts.leaves_of(tree), flags, strict=True) if flag}
