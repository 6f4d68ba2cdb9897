"""`rename` and `reset`: parameters that a user names, by paths or by masks; paths of variables."""

import collections
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence

from jgrad._packed import packing
from jgrad._states import parts
from jgrad._states.parts import Keys, Part
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
    olds, likes = _known(old), _known(like)
    everything = {x.keys for x in like}
    other = everything, _of_variables(everything)
    new: list[Part] = []
    seen: dict[tuple[str, str, Keys], Keys] = {}
    for part in old:
        meaning = part.kind, part.field
        is_variable = part.keys in olds[meaning][1]
        keys = _aligned(_new_keys(part.keys, rules), is_variable, *likes.get(meaning, other))
        new.append(part._replace(keys=keys))
        was = seen.setdefault((*meaning, keys), part.keys) if part.leaf is not None else part.keys
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


def _aligned(
    keys: Keys, is_variable: bool, known: Collection[Keys], of_variables: Collection[Keys]
) -> Keys:
    """The keys of a part by those of `like`, whichever of both states has variables.

    In files that were read without a target the array of a variable of flax has the key `value`.
    Models have such keys, too, but not alone in a subtree.
    """
    if keys in known:
        return keys
    if is_variable and keys[:-1] in known:
        return keys[:-1]
    return (*keys, _VALUE) if (*keys, _VALUE) in of_variables else keys


def _known(state: Sequence[Part]) -> dict[tuple[str, str], tuple[set[Keys], set[Keys]]]:
    """The paths of the leaves of each meaning, and those that are of variables."""
    known: dict[tuple[str, str], set[Keys]] = {}
    for x in state:
        known.setdefault((x.kind, x.field), set()).add(x.keys)
    return {meaning: (paths, _of_variables(paths)) for meaning, paths in known.items()}


def _of_variables(known: Collection[Keys]) -> set[Keys]:
    """The paths that end in `value`, with no other leaf beside it."""
    leaves_below = collections.Counter(keys[:end] for keys in known for end in range(len(keys)))
    return {x for x in known if x[-1:] == (_VALUE,) and leaves_below[x[:-1]] == 1}


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
