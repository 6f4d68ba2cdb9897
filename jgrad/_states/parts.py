"""What a state is made of: each array by its meaning, and by the path of its parameter.

A state is wrappers around wrappers, chains and partitions, around moments. States of jgrad say what
their fields are. Those of optax do not, and files that are read without a target have dictionaries
of the fields instead: of these this file reads the names. `rename` and `reset` name parameters.
"""

import collections
import difflib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jgrad._packed import packing
from jgrad._states import units
from jgrad._states.units import Chain, Unit
from jgrad._trees import checks, path_rules, trees, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import STATES, KeyPath, Leaf, Parts, Role
from jgrad._trees.trees import PyTree

Keys = tuple[str, ...]
Meaning = tuple[str, str, Keys]  # kind, field and parameter

# Kinds of wrappers and optimizers, as states of jgrad say them.
MOMENTS, ACCUMULATE, SPIKES, EMA = "moments", "accumulate", "skip_spikes", "ema"
SCHEDULE_FREE, PLAIN = "schedule_free", ""
MW, VW, STEP, PER_OUTPUT, IN_BASES = "mw", "vw", "step", "vw per output", "vw in bases"

_LABELED = "inner_states"  # of a partition: a state for each label
# Fields that hold the state of what is inside, in jgrad and in optax.
_INSIDE = (
    *("inner", "inner_state", _LABELED, "inner_opt_state", "base_optimizer_state", "opt_state"),
)
_BY_NAME = ("report", "hyperparams", "hyperparams_states")  # fields whose keys are no parameters
# In accounts.
_NAMED = (
    *(ACCUMULATE, "skip_nonfinite", SPIKES, "master_weights", EMA, SCHEDULE_FREE),
    *("stochastic_rounding", "hyperball"),
)

# States of optax, and the fields that tell them.
_MOMENTS = ("mw", "vw", "mu", "nu", "trace", "ema")
_OF_MOMENTS = Parts(
    MOMENTS,
    {"step": "step", "count": "step", **dict.fromkeys(_MOMENTS, "moment")},
    {"mu": MW, "trace": MW, "ema": MW, "nu": VW},
)
_COUNTER = Parts("counter", {"count": "step", "hyperparams": "like"})
_TOLD_BY = {
    **dict.fromkeys(_MOMENTS, _OF_MOMENTS),
    "acc_grads": Parts(
        ACCUMULATE, {"acc_grads": "sum", "gradient_step": "step"}, {"acc_grads": "total"}
    ),
    "total_notfinite": Parts("skip_nonfinite", {}, {"total_notfinite": "skipped"}),
    "max_lr": Parts(
        SCHEDULE_FREE,
        {"z": "weights", "b1": "like"},
        {"step_count": "done", "max_lr": "largest_rate"},
    ),
    "hyperparams": _COUNTER,
}
_OF_0_6 = Parts("stochastic_rounding", {}, {"step": "done"})  # its counter, up to that version
_KNOWN = {*_INSIDE, *_TOLD_BY, "count", "step", "mini_step", "done", "notfinite_count"}


_SHOWN = 3  # paths named in a message
_VALUE = "value"


class Part(NamedTuple):
    """One leaf of a state.

    Attributes:
      kind: of the wrapper or optimizer that it belongs to.
      field: its meaning there, by the names of jgrad.
      role: what it holds.
      keys: the path of its parameter; () for a number of all.
      leaf: an array, its shape, `Blocks`, or None.
      path: of it in the state.
      name: of the field, as it came.
      owner: the path of the state of which it is a field.
      unit: what a moment holds; None for others.
    """

    kind: str
    field: str
    role: Role
    keys: Keys
    leaf: Leaf
    path: KeyPath
    name: str
    owner: Keys
    unit: Unit | None = None

    @property
    def meaning(self) -> Meaning:
        """By which leaves of two states are the same thing."""
        return self.kind, self.field, self.keys

    @property
    def owners_keys(self) -> tuple[Keys, ...]:
        """The paths that its parameter may have: of factors it is before their names."""
        return (self.keys[:-1], self.keys[:-2]) if self.role == "factors" else (self.keys,)

    @property
    def at(self) -> str:
        """The path, for messages."""
        return jax.tree_util.keystr(self.path)

    @property
    def shown(self) -> str:
        """How accounts call what it is a leaf of."""
        field = VW if self.field in (PER_OUTPUT, IN_BASES) else self.field
        is_named = self.role != "step" and self.kind in _NAMED
        return f"{self.kind}.{field}" if is_named else field


def read(state: PyTree) -> list[Part]:
    """The parts of a state, in the order of `trees.flatten`."""
    parts = [
        x._replace(path=(*x.path, *path), keys=(*x.keys, *keys_of(name)), leaf=leaf)
        for x in _fields(state)
        for path, name, leaf in variables.named_leaves(x.leaf, trees.is_leaf)
    ]
    shapes: collections.defaultdict[Keys, set[tuple[int, ...]]] = collections.defaultdict(set)
    for x in parts:
        if x.field == MW and x.leaf is not None:
            shapes[x.keys].add(x.leaf.shape)
    in_bases = {
        keys for x in parts if x.leaf is not None and x.role == "factors" for keys in x.owners_keys
    }

    def measured(x: Part) -> Part:
        """With a field of its own for a second moment that measures another thing than Adam's."""
        if x.field == VW and x.leaf is not None and x.keys in in_bases:
            return x._replace(field=IN_BASES)
        return x._replace(field=PER_OUTPUT) if _is_per_output(x, shapes[x.keys]) else x

    return list(map(measured, parts))


def _is_per_output(part: Part, of_first: set[tuple[int, ...]]) -> bool:
    """Whether it is a second moment of NorMuon, which measures another thing than Adam's.

    It has size 1 along the axes of inputs, where first moments have all elements.
    """
    if part.field != VW or part.leaf is None or part.leaf.shape in of_first:
        return False
    shape = part.leaf.shape
    return any(
        len(shape) == len(whole) and all(a in (b, 1) for a, b in zip(shape, whole, strict=True))
        for whole in of_first
    )


def by_meaning(parts: Sequence[Part]) -> dict[Meaning, list[int]]:
    """The positions of leaves of one meaning, without those that are None."""
    positions: dict[Meaning, list[int]] = {}
    for i, x in enumerate(parts):
        if x.leaf is not None:
            positions.setdefault(x.meaning, []).append(i)
    return positions


def moments_tree(state: PyTree) -> PyTree:
    """The first tree of moments in a state; None where there is none."""
    moments = (x.leaf for x in _fields(state) if x.role == "moment" and jax.tree.leaves(x.leaf))
    return next(moments, None)


def leaves_of(tree: PyTree) -> list[tuple[Keys, Leaf]]:
    """(keys, leaf) of each leaf; the keys of the array of a variable are the variable's."""
    return [(keys_of(name), x) for _, name, x in variables.named_leaves(tree, trees.is_leaf)]


def keys_of(path: KeyPath) -> Keys:
    """The keys of a path as text."""
    return tuple(path_rules.keys_of(path))


def _fields(
    node: PyTree, path: KeyPath = (), plain: KeyPath = (), chains: tuple[Chain, ...] = ()
) -> Iterator[Part]:
    """The fields of a wrapper, of a chain or a partition, and of all that is inside.

    Parts, whose leaves are trees.

    Args:
      node: its state.
      path: of the state.
      plain: the end of the path that leads through no field.
      chains: that the state is in.
    """
    children = trees.children(node)
    if children is None:
        yield Part(PLAIN, "", "like", keys_of(plain), node, path, "", keys_of(path))
        return
    names = [path_rules.shown((key,)) for key, _ in children]
    parts = _parts_of(node, names)
    if parts is None:
        for (key, child), chain in zip(children, units.chains_of(node, children), strict=True):
            is_array = variables.is_box(node) and trees.children(child) is None
            below = plain if is_array else (*plain, key)
            yield from _fields(child, (*path, key), below, (*chains, *chain))
        return
    of_moments: dict[str, Unit] = {}
    if parts.kind == MOMENTS:
        trees_of = dict(zip(names, (child for _, child in children), strict=True))
        of_moments = units.of_fields(node, trees_of, chains)
    for (key, child), name in zip(children, names, strict=True):
        here, role = (
            (*path, key),
            "inside" if name in _INSIDE else parts.roles.get(name, parts.others),
        )
        if role == "inside":
            for inner, state in _states_in(name, child):
                yield from _fields(state, (*here, *inner), (*plain, *inner), chains)
            continue
        field = STEP if role == "step" else parts.names.get(name, name)
        part = Part(parts.kind, field, role, (), child, here, name, keys_of(path))
        if name not in _BY_NAME:
            yield part._replace(unit=of_moments.get(name))
            continue
        for inner, keys, leaf in variables.named_leaves(child, trees.is_leaf):
            field = "/".join((name, *keys_of(keys)))
            yield part._replace(field=field, leaf=leaf, path=(*here, *inner))


def _states_in(field: str, child: PyTree) -> list[tuple[KeyPath, PyTree]]:
    """The states in a field and their paths there; names of labels may be those of fields."""
    labeled = trees.children(child) if field == _LABELED else None
    return [((), child)] if labeled is None else [((key,), state) for key, state in labeled]


def _parts_of(node: PyTree, names: list[str]) -> Parts | None:
    """What its fields are, if the node is the state of something and no container of states."""
    declared: Parts | None = getattr(type(node), "__jgrad_parts__", None)
    if declared is not None:
        return declared
    is_tuple = isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, Blocks)
    if not is_tuple and not (isinstance(node, Mapping) and not _KNOWN.isdisjoint(names)):
        return None
    if not is_tuple and _is_container(node):
        return None
    return _told_by(set(names))


def _is_container(node: PyTree) -> bool:
    """Whether it holds states and nothing else, by names that may be those of fields."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return not isinstance(node, Blocks)
    children = node.values() if isinstance(node, Mapping) else node
    return isinstance(node, tuple | list | Mapping) and all(map(_is_container, children))


def _told_by(names: set[str]) -> Parts:
    """What fields of these names are; those that are None are missing in files."""
    for parts in STATES:
        there = {x for x, role in parts.roles.items() if role not in ("inside", "moment", "sum")}
        if there <= names <= parts.roles.keys():
            return parts
    if names == {"count"}:
        return _COUNTER
    if names == {"step", "inner"}:
        return _OF_0_6
    told_by = next((name for name in _TOLD_BY if name in names), None)
    if told_by is not None:
        return _TOLD_BY[told_by]
    return Parts(",".join(sorted(names - {*_INSIDE})), {"step": "step"}, others="like")


# ---- parameters that a user names --------------------------------------------------------------


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
    olds, likes = _paths_by_meaning(old), _paths_by_meaning(like)
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


def _paths_by_meaning(state: Sequence[Part]) -> dict[tuple[str, str], frozenset[Keys]]:
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
        return {x.keys for x in read(like)}
    tree = moments_tree(like) if params is None else packing.shapes(params)
    tree = trees.map_leaves(checks.shape_and_dtype, tree)
    if trees.is_function(reset, tree):
        reset = reset(tree)
    flags = checks.bools(ArgLeaves.from_prefix(function, "reset", reset, "params", tree))
    return {keys for (keys, _), flag in zip(leaves_of(tree), flags, strict=True) if flag}
