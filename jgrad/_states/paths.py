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
    both = [*rename.items()] if is_mapping else []
    if not (is_mapping and all(isinstance(x, str) for pair in both for x in pair)):
        expected = "a mapping of old paths to new ones, keys joined by slashes"
        raise TypeError(f"{function}: `rename`: {rename!r}, expected {expected}.")
    known = [{x.keys for x in state if x.leaf is not None and x.keys} for state in (old, like)]
    rules = {
        _there(function, "old", a, known[0]): _there(function, "like", b, known[1]) for a, b in both
    }
    new = [x._replace(keys=_new_keys(x.keys, rules)) for x in old]
    new = _aligned(old, new, like)
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


def _aligned(old: Sequence[Part], new: Sequence[Part], like: Sequence[Part]) -> list[Part]:
    """The renamed parts by the paths of `like`, whichever of both states has variables.

    In files that were read without a target the array of a variable of flax has the key `value`.
    Models have such keys, too, but not alone in a subtree.
    """
    variables = {role: _of_variables(known) for role, known in _by_role(old).items()}
    everything = {x.keys for x in like}
    likes = {role: (known, _of_variables(known)) for role, known in _by_role(like).items()}
    other = everything, _of_variables(everything)

    def aligned(was: Part, keys: Keys) -> Keys:
        known, of_variables = likes.get(was.role, other)
        if keys in known:
            return keys
        if was.keys in variables[was.role] and keys[:-1] in known:
            return keys[:-1]
        return (*keys, _VALUE) if (*keys, _VALUE) in of_variables else keys

    pairs = zip(old, new, strict=True)
    return [x._replace(keys=aligned(was, x.keys)) for was, x in pairs]


def _by_role(state: Sequence[Part]) -> dict[tuple[str, str], set[Keys]]:
    found: dict[tuple[str, str], set[Keys]] = {}
    for x in state:
        found.setdefault(x.role, set()).add(x.keys)
    return found


def _of_variables(known: Collection[Keys]) -> set[Keys]:
    """The paths that end in `value`, with no other leaf beside it."""
    leaves_below = collections.Counter(keys[:end] for keys in known for end in range(len(keys)))
    return {x for x in known if x[-1:] == (_VALUE,) and leaves_below[x[:-1]] == 1}


def _there(function: str, name: str, text: str, known: Collection[Keys]) -> Keys:
    """The path of one leaf or subtree at least; that of a variable may end in `value`."""
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
    leaves = parts.leaves_of(tree)
    return {keys for (_, keys, _), flag in zip(leaves, flags, strict=True) if flag}
