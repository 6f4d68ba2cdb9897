"""The leaves of a state, by their meaning and by the path of their parameter.

A state consists of nested wrappers, chains and partitions, with moments inside. jgrad's states
declare what their fields mean. optax's don't, and files restored without a target have dictionaries
of the fields instead; this file knows some of their names. Anything else is left uninterpreted.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jgrad._inputs import options
from jgrad._trees import checks, forms, leaf_names, trees, variables
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.leaf_names import keys_of
from jgrad._trees.protocols import STATES, FieldRole, FieldRoles, KeyPath, Leaf, PyTree

NAME = "carry_over"
Keys = tuple[str, ...]

MOMENTS, ADAFACTOR, ACCUMULATE, MASTER = "moments", "adafactor", "accumulate", "master"
MW, VW, PER_OUTPUT, IN_BASES = "mw", "vw", "vw per output", "vw in bases"
OF_PARAMETERS = ("moment", "weights", "sum")  # roles of trees like the parameters

# What first moments are; only the first two identify the method.
AVERAGES = "averages of gradients, as in `adam`"
OF_STEPS = "averages of steps, as in `adafactor`"
ALONE = "momentum of `gradient_descent`, `lars`, `lion` or `muon`"
BESIDE_OUTPUTS = "momentum beside second moments of outputs"
CERTAIN = (AVERAGES, OF_STEPS)
# What second moments are.
SQUARES = "averages of squares, as in `adam`"
OF_FACTORED = "averages of squares, as in `adafactor`"  # without bias correction

# Fields that hold the state of what is inside, in jgrad and in optax.
_LABELED = "inner_states"  # of a partition: a state for each label
_INSIDE = "inner", "inner_state", _LABELED, "inner_opt_state", "base_optimizer_state", "opt_state"
# States of optax, and the fields by which they are recognized.
_MOMENTS = {"mu": MW, "trace": MW, "ema": MW, "nu": VW}
_OF_MOMENTS = FieldRoles(
    MOMENTS,
    {"step": "step", "count": "step", **dict.fromkeys(_MOMENTS, "moment")},
    _MOMENTS,
    "like",
)
_COUNTER = FieldRoles("counter", {"count": "step"}, others="like")
_TOLD_BY = {
    **dict.fromkeys(_MOMENTS, _OF_MOMENTS),
    "acc_grads": FieldRoles(
        ACCUMULATE, {"acc_grads": "sum", "gradient_step": "step"}, {"acc_grads": "total"}
    ),
    "total_notfinite": FieldRoles("skip_nonfinite", {}, {"total_notfinite": "skipped"}),
    "hyperparams": _COUNTER,
}
_KNOWN = {*_INSIDE, *_TOLD_BY, "mw", "vw", "count", "step", "mini_step", "done"}
# Methods whose second moments are counted averages of squares, beside first moments that are
# averages of gradients.
_AS_ADAM = ({"count", "mu", "nu"}, {"count", "mu", "nu", "nu_max"}, {"count", "nu"})
_NOT_AS_ADAM = ("ScaleByBeliefState", "ScaleByNovogradState")  # with the fields of Adam's

_SHOWN = 3  # paths named in a message
_VALUE = "value"


class StateLeaf(NamedTuple):
    """One leaf of a state, which is not None.

    Attributes:
      kind: of the wrapper or optimizer that it belongs to.
      field: its meaning there, by the names of jgrad.
      role: what it holds.
      keys: the path of its parameter; () for a number of all.
      array: that, its shape, or `Blocks`.
      path: of it in the state.
      name: of the field, as it came.
      owner: the path of the state of which it is a field.
      clock: the number of accumulations around. Inside of one updates are counted, around it
        mini-batches.
      position: among the leaves of the state, of which some are None.
      unit: what a moment holds.
      seen: the paths of the parameters that its owner sees, by `with_seen`.
    """

    kind: str
    field: str
    role: FieldRole
    keys: Keys
    array: Leaf
    path: KeyPath
    name: str
    owner: Keys
    clock: int
    position: int = 0
    unit: str = ""
    seen: frozenset[Keys] = frozenset()

    @property
    def owners_keys(self) -> tuple[Keys, ...]:
        """The paths that its parameter may have: of factors it is before their names."""
        return (self.keys[:-1], self.keys[:-2]) if self.role == "factors" else (self.keys,)

    @property
    def is_basis(self) -> bool:
        """Whether it is a basis of SOAP, which starts as the identity."""
        return self.role == "factors" and self.keys[-1].endswith("basis")

    @property
    def called(self) -> str:
        """The leaf, as accounts call it."""
        return "/".join(filter(None, (self.shown, *self.keys)))

    @property
    def at(self) -> str:
        """The path, for messages."""
        return jax.tree_util.keystr(self.path)

    @property
    def shown(self) -> str:
        """How accounts call what it is a leaf of."""
        if self.role in ("step", "moment", "factors"):
            return self.field.partition(" ")[0]
        is_named = self.kind != MOMENTS and any(x.kind == self.kind for x in STATES)
        return f"{self.kind}.{self.field}" if is_named else self.field


def read(state: PyTree) -> list[StateLeaf]:
    """The leaves of a state, in the order of `trees.flatten`."""
    rows = ((x, y) for x in _fields(state) for y in variables.named_leaves(x.array, trees.is_leaf))
    leaves = [
        x._replace(position=i, path=(*x.path, *path), keys=(*x.keys, *keys_of(name)), array=array)
        for i, (x, (path, name, array)) in enumerate(rows)
        if array is not None
    ]
    moments = {(x.owner, x.keys, x.field): x.array for x in leaves if x.role == "moment"}
    factored = {owner for (owner, _, _), x in moments.items() if forms.is_of_method(x)}
    in_bases = {(x.owner, k) for x in leaves if x.role == "factors" for k in x.owners_keys}

    def with_unit(x: StateLeaf) -> StateLeaf:
        """NorMuon's and SOAP's second moments measure another thing than Adam's."""
        if x.role != "moment":
            return x
        if x.field not in (MW, VW):
            return x._replace(kind=MOMENTS)  # what it measures is declared
        first, second = (moments.get((x.owner, x.keys, field)) for field in (MW, VW))
        field = IN_BASES if (x.owner, x.keys) in in_bases else VW
        if first is not None and second is not None and first.shape != second.shape:
            field = PER_OUTPUT
        is_factored = x.kind == ADAFACTOR or x.owner in factored
        if x.field != MW:
            unit = x.unit or (OF_FACTORED if is_factored else SQUARES)
            return x._replace(field=field, unit=unit, kind=MOMENTS)
        beside = ALONE if second is None else BESIDE_OUTPUTS if field == PER_OUTPUT else AVERAGES
        return x._replace(unit=OF_STEPS if is_factored else x.unit or beside, kind=MOMENTS)

    return list(map(with_unit, leaves))


def with_seen(leaves: Sequence[StateLeaf]) -> list[StateLeaf]:
    """The leaves with what the owner of each sees: the parameters in its state and inside of it.

    Where there are none, as of a counter in a chain, those of what it stands in. Numbers of a
    wrapper have the sizes of all of these as their unit, so that they go together.
    """
    below: dict[Keys, set[Keys]] = {(): set()}  # at and below a path
    sizes: dict[Keys, str] = {}
    for x in leaves:
        if x.role in OF_PARAMETERS:
            for end in range(len(x.owner) + 1):
                below.setdefault(x.owner[:end], set()).add(x.keys)
        elif not x.keys and x.array.shape:
            sizes[x.owner] = f"{sizes.get(x.owner, '')} {x.name} {x.array.shape}"

    @functools.cache
    def seen(owner: Keys) -> frozenset[Keys]:
        return frozenset(below[owner]) if owner in below else seen(owner[:-1])

    return [
        x._replace(seen=seen(x.owner), unit=x.unit if x.keys else x.unit + sizes.get(x.owner, ""))
        for x in leaves
    ]


def leaves_of(tree: PyTree) -> list[tuple[Keys, Leaf]]:
    """(keys, leaf) of each leaf; the keys of the array of a variable are the variable's."""
    return [(keys_of(name), x) for _, name, x in variables.named_leaves(tree, trees.is_leaf)]


def _fields(
    node: PyTree, path: KeyPath = (), plain: KeyPath = (), chain: str = "", clock: int = 0
) -> Iterator[StateLeaf]:
    """The fields of a wrapper, of a chain or a partition, and of all that is inside.

    Each as a `StateLeaf`, whose array is the tree in it.

    Args:
      node: its state.
      path: of the state.
      plain: the end of the path that leads through no field.
      chain: the innermost one that the state is in, and where.
      clock: the number of accumulations around.
    """
    children = trees.children(node)
    if children is None:
        yield StateLeaf("", "", "like", keys_of(plain), node, path, "", keys_of(path), clock)
        return
    names = [leaf_names.shown((key,)) for key, _ in children]
    fields = _fields_of(node, set(names))
    if fields is None:
        # Of a chain all, those that are empty, too, which JAX does not show.
        members = node if isinstance(node, tuple | list) else [child for _, child in children]
        links = ", ".join(type(x).__name__ for x in members)
        for (key, child), name in zip(children, names, strict=True):
            is_array = variables.is_box(node) and trees.children(child) is None
            below = plain if is_array else (*plain, key)
            yield from _fields(child, (*path, key), below, f"{name} of ({links})", clock)
        return
    inside = clock + (fields.kind == ACCUMULATE)
    unit = _unit(node, set(names), chain) if fields is _OF_MOMENTS else ""
    if fields.kind == ACCUMULATE and "weight" in names:
        unit = "weighted"
    for (key, child), name in zip(children, names, strict=True):
        here = (*path, key)
        role = fields.roles.get(name, "inside" if name in _INSIDE else fields.others)
        if role == "inside":
            # Labels may have the names of fields.
            labeled = trees.children(child) if name == _LABELED else None
            for inner, state in labeled or [(None, child)]:
                label = () if inner is None else (inner,)
                yield from _fields(state, (*here, *label), (*plain, *label), chain, inside)
            continue
        field = "step" if role == "step" else fields.names.get(name, name)
        time = inside if role == "step" else clock
        measures = fields.moments[name].measures if name in fields.moments else unit
        yield StateLeaf(
            fields.kind, field, role, (), child, here, name, keys_of(path), time, 0, measures
        )


def _unit(node: PyTree, names: set[str], chain: str) -> str:
    """Of moments of optax; "" for those of Adam.

    `trace` and `ema` are of whatever comes along their chain, so the chain is a part of it.
    """
    kind = type(node).__name__
    if names in _AS_ADAM and kind not in _NOT_AS_ADAM:
        return ""
    if not names.isdisjoint(("trace", "ema")):
        return f"{', '.join(sorted(names))} at {chain or 'the top'}"
    return f"moments of {kind if kind in _NOT_AS_ADAM else ', '.join(sorted(names))}"


def _fields_of(node: PyTree, names: set[str]) -> FieldRoles | None:
    """What its fields are, if the node is the state of something and no container of states."""
    declared: FieldRoles | None = getattr(type(node), "__jgrad_fields__", None)
    if declared is not None:
        return declared
    is_tuple = isinstance(node, tuple) and hasattr(node, "_fields") and not forms.is_one(node)
    if not is_tuple and not (isinstance(node, Mapping) and not _KNOWN.isdisjoint(names)):
        return None
    # Fields that are None are missing in files.
    for fields in sorted(STATES, key=lambda x: x.roles.keys() != names):
        there = {x for x, role in fields.roles.items() if role not in ("inside", "moment", "sum")}
        if there <= names <= fields.roles.keys():
            return fields
    if names == {"count"}:
        return _COUNTER
    unknown = FieldRoles(",".join(sorted(names - {*_INSIDE})), {"step": "step"}, others="like")
    return next((fields for name, fields in _TOLD_BY.items() if name in names), unknown)


# ---- parameters that a user names --------------------------------------------------------------


def renamed(
    old: Sequence[StateLeaf], like: Sequence[StateLeaf], rename: Mapping[str, str]
) -> list[StateLeaf]:
    """The leaves of the old state by their new paths; of prefixes of a path the longest counts.

    In files that were read without a target the array of a variable of flax has the key `value`,
    which is left out or added where the new state has the path so.
    """
    is_mapping = isinstance(rename, Mapping)
    if not (is_mapping and all(isinstance(x, str) for both in rename.items() for x in both)):
        expected = "a mapping of old paths to new ones, keys joined by slashes"
        raise TypeError(f"{NAME}: `rename`: {rename!r}, expected {expected}.")
    rules = {_there("old", was, old): _there("like", now, like) for was, now in rename.items()}
    known = {(x.shown, x.keys) for x in like}
    if not rules and all((x.shown, x.keys) in known for x in old):
        return list(old)
    olds, likes = map(_variables, (old, like))
    new: list[StateLeaf] = []
    seen: dict[tuple[object, ...], Keys] = {}
    for leaf in old:
        ends = (end for end in range(len(leaf.keys), 0, -1) if leaf.keys[:end] in rules)
        end = next(ends, 0)
        keys = (*rules[leaf.keys[:end]], *leaf.keys[end:]) if end else leaf.keys
        if (leaf.shown, keys) not in known:
            is_variable = olds.get((leaf.shown, leaf.keys[:-1])) == leaf.keys
            plain = keys[:-1] if is_variable else keys
            is_there = (leaf.shown, plain) in known
            keys = plain if is_there else likes.get((leaf.shown, plain), keys)
        new.append(leaf._replace(keys=keys))
        meaning = (leaf.owner, leaf.name, keys)
        if keys and (was := seen.setdefault(meaning, leaf.keys)) != leaf.keys:
            came = " and ".join(map("/".join, (was, leaf.keys)))
            expected = f"one leaf for {'/'.join(keys)}"
            raise ValueError(f"{NAME}: `rename`: {came}, expected {expected}.")
    return new


def _variables(state: Sequence[StateLeaf]) -> dict[tuple[str, Keys], Keys]:
    """By fields and paths of variables of flax the paths of their arrays.

    These have the key `value`, alone in a subtree. Models have such keys, too.
    """
    paths = {(x.shown, x.keys) for x in state}
    below = collections.Counter((field, x[:end]) for field, x in paths for end in range(len(x)))
    ends = {(field, x[:-1]): x for field, x in paths if x[-1:] == (_VALUE,)}
    return {path: x for path, x in ends.items() if below[path] == 1}


def _there(name: str, text: str, state: Sequence[StateLeaf]) -> Keys:
    """The path of one leaf or subtree at least; that of a variable may end in `value`."""
    known = {x.keys for x in state if x.keys}
    path = tuple(text.split("/"))
    if any(keys[: len(path)] == path for keys in known):
        return path
    variable = path[:-1]
    if path[-1] == _VALUE and [x for x in known if x[: len(variable)] == variable] == [variable]:
        return variable
    shown = ", ".join(sorted("/".join(keys) for keys in known)[:_SHOWN])
    what = f"no such path in `{name}`, expected one such as {shown}"
    raise ValueError(f"{NAME}: `rename`: {text}: {what}.")


def chosen(reset: PyTree | Callable[[PyTree], PyTree], params: PyTree, like: PyTree) -> set[Keys]:
    """The paths of the leaves that a mask chooses.

    Args:
      reset: the mask; True for all leaves.
      params: parameters or shapes, packed or not; or None.
      like: the new state, not packed, whose moments stand for parameters that are None.
    """
    if reset is True:
        return {x.keys for x in read(like)}
    moments = (x.array for x in _fields(like) if x.role == "moment" and jax.tree.leaves(x.array))
    tree = next(moments, None) if params is None else trees.shapes(params)
    tree = trees.map_leaves(checks.shape_and_dtype, tree)
    if trees.is_function(reset, tree):
        reset = options.result_of(NAME, "reset", options.SHAPES, reset, tree)
    flags = checks.bools(ArgLeaves.from_prefix(NAME, "reset", reset, "params", tree))
    return {keys for (keys, _), flag in zip(leaves_of(tree), flags, strict=True) if flag}
