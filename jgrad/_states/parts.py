"""What a state is made of: each array by its meaning and by the path of its parameter.

A state is wrappers around wrappers, chains and partitions, around moments. Types say little: optax
has others, and files that are read without a target have dictionaries of the fields instead. So
this file reads field names, which are the same in both.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jgrad._states import units
from jgrad._states.units import Chain, Unit
from jgrad._trees import path_rules, trees, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.trees import PyTree

Keys = tuple[str, ...]

# Fields that hold the state of what is inside, in jgrad and in optax.
_INSIDE = (
    *("inner", "inner_state", "inner_states", "inner_opt_state", "base_optimizer_state"),
    "opt_state",
)
_LABELED = "inner_states"  # of a partition: a state for each label
MOMENTS, ACCUMULATE, SKIP, SPIKES = "moments", "accumulate", "skip_nonfinite", "skip_spikes"
MASTER, EMA, SCHEDULE_FREE = "master_weights", "ema", "schedule_free"
STOCHASTIC, HYPERBALL = "stochastic_rounding", "hyperball"
COUNTER, PLAIN = "counter", ""
MW, VW, STEP, PER_OUTPUT = "mw", "vw", "step", "vw per output"
REPORT = "report"  # is measured again
# Fields whose keys are not those of parameters.
WITHOUT_PARAMETERS = (REPORT, "hyperparams", "hyperparams_states")

# In accounts.
_NAMED = (ACCUMULATE, SKIP, SPIKES, MASTER, EMA, SCHEDULE_FREE, STOCHASTIC, HYPERBALL)

# By optax's names.
_FIELDS = {
    MOMENTS: {"mu": MW, "trace": MW, "ema": MW, "nu": VW, "count": STEP},
    ACCUMULATE: {"acc_grads": "total", "gradient_step": STEP},
    SKIP: {"total_notfinite": "skipped"},
    COUNTER: {"count": STEP},
    SCHEDULE_FREE: {"step_count": "done", "max_lr": "largest_rate"},
    STOCHASTIC: {"step": "done"},  # as it was up to 0.6
    HYPERBALL: {"done": STEP},  # its schedule counts it
}
_OF_MOMENTS = {MW, VW, "mu", "nu", "trace", "ema"}
_OF_OTHERS = {
    "mini_step",
    "done",
    "master",
    "average",
    "radius",
    "loss_scale",
    "losses",
    "hyperparams",
}
_KNOWN = {*_INSIDE, *_OF_MOMENTS, *_OF_OTHERS, "step", "count", "notfinite_count"}


class Part(NamedTuple):
    """One leaf of a state.

    Attributes:
      kind: what it belongs to: moments, a wrapper by its name, or the fields of one that is not
        known here; "" outside of everything.
      field: its meaning there, by the names of jgrad.
      keys: the path of its parameter; () for a number of all.
      leaf: an array, its shape, `Blocks`, or None.
      path: in the state, for messages.
      name: of the field, as it came.
      owner: the path of the state of which it is a field.
      unit: what a moment holds; None for others.
    """

    kind: str
    field: str
    keys: Keys
    leaf: Any
    path: str
    name: str
    owner: Keys
    unit: Unit | None = None

    @property
    def role(self) -> tuple[str, str]:
        """Its meaning."""
        return self.kind, self.field

    @property
    def is_step(self) -> bool:
        """Whether it counts the updates of an optimizer."""
        return self.field == STEP and not self.keys

    @property
    def is_moment(self) -> bool:
        """Whether it is a moment of a parameter."""
        return self.kind == MOMENTS and self.field in (MW, VW, PER_OUTPUT)

    @property
    def shown(self) -> str:
        """How accounts call what it is a leaf of."""
        field = VW if self.field == PER_OUTPUT else self.field
        if self.is_step or self.kind not in _NAMED:
            return field
        return f"{self.kind}.{field}"


def leaves_of(tree: PyTree) -> list[tuple[tuple[Any, ...], Keys, Any]]:
    """(path, keys, leaf) of each leaf; the keys of the array of a variable are the variable's."""
    found = variables.named_leaves(tree, trees.is_leaf)
    return [(path, keys_of(name), x) for path, name, x in found]


def keys_of(path: tuple[Any, ...]) -> Keys:
    """The keys of a path as text."""
    return tuple(path_rules.keys_of(path))


def read(state: PyTree) -> list[Part]:
    """The parts of a state, in the order of `trees.flatten`."""
    return _with_kinds_of_second_moments(list(_of_state(state, (), ())))


def moments_tree(state: PyTree) -> PyTree:
    """The first tree of moments in a state; None where there is none."""
    pairs = trees.children(state)
    if pairs is None:
        return None
    fields = _fields(state, pairs)
    if fields is None:
        inside = [x for _, x in pairs]
    elif _kind(fields) == MOMENTS:
        found = [x for (_, x), name in zip(pairs, fields, strict=True) if name in _OF_MOMENTS]
        return next((x for x in found if jax.tree.leaves(x)), None)
    else:
        own = zip(pairs, fields, strict=True)
        inside = [x for (_, child), name in own for _, x in _states_in(name, child)]
    return next((x for x in map(moments_tree, inside) if x is not None), None)


def _states_in(field: str, child: PyTree) -> list[tuple[tuple[Any, ...], PyTree]]:
    """The states in a field and their paths there; names of labels may be those of fields."""
    pairs = trees.children(child) if field == _LABELED else None
    if pairs is not None:
        return [((key,), x) for key, x in pairs]
    return [((), child)] if field in _INSIDE else []


def _of_state(
    node: PyTree, path: tuple[Any, ...], plain: tuple[Any, ...], chains: tuple[Chain, ...] = ()
) -> Iterator[Part]:
    """The parts of a wrapper, a chain or a partition.

    Args:
      node: its state.
      path: of the state.
      plain: the end of the path that leads through no field.
      chains: that the state is in.
    """
    owner = keys_of(path)
    pairs = trees.children(node)
    if pairs is None:
        yield Part(PLAIN, "", keys_of(plain), node, jax.tree_util.keystr(path), "", owner)
        return
    fields = _fields(node, pairs)
    if fields is None:
        for (key, child), own in zip(pairs, units.places(node, pairs), strict=True):
            is_array = variables.is_box(node) and trees.children(child) is None
            below = plain if is_array else (*plain, key)
            yield from _of_state(child, (*path, key), below, (*chains, *own))
        return
    kind = _kind(fields)
    of_moments = {}
    if kind == MOMENTS:
        children = dict(zip(fields, (x for _, x in pairs), strict=True))
        of_moments = units.of_fields(node, children, chains)
    for (key, child), name in zip(pairs, fields, strict=True):
        if name in _INSIDE:
            for inner, state in _states_in(name, child):
                yield from _of_state(state, (*path, key, *inner), (*plain, *inner), chains)
            continue
        field = _FIELDS.get(kind, {}).get(name, name)
        for inner, keys, leaf in leaves_of(child):
            here = jax.tree_util.keystr((*path, key, *inner))
            unit = of_moments.get(name)
            yield Part(kind, field, keys, leaf, here, name, owner, unit)


def _fields(node: PyTree, pairs: list[tuple[Any, PyTree]]) -> list[str] | None:
    """The names of the fields, if the node is the state of something and no container of states."""
    names = [path_rules.shown((key,)) for key, _ in pairs]
    if isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, Blocks):
        return names
    is_record = isinstance(node, Mapping) and not _KNOWN.isdisjoint(names)
    return names if is_record and not _is_container(node) else None


def _is_container(node: PyTree) -> bool:
    """Whether it holds states and nothing else, by names that may be those of fields."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return not isinstance(node, Blocks)
    children = node.values() if isinstance(node, Mapping) else node
    return isinstance(node, tuple | list | Mapping) and all(map(_is_container, children))


def _kind(fields: list[str]) -> str:
    """What has such fields; those that are None are missing in files."""
    names = set(fields)
    if not names.isdisjoint(_OF_MOMENTS) or names == {"step"}:
        return MOMENTS
    if "mini_step" in names and not names.isdisjoint({"total", "acc_grads"}):
        return ACCUMULATE
    if names >= {"skipped", "streak", "loss_scale"} or "total_notfinite" in names:
        return SKIP
    if names >= {"skipped", "losses", "accepted"}:
        return SPIKES
    if "radius" in names:
        return HYPERBALL
    if names >= {"z", "weight_sum"} and names & {"average", "max_lr"}:
        return SCHEDULE_FREE
    if names <= {"master", "inner"} and "master" in names:
        return MASTER
    if names == {"done", "average"}:
        return EMA
    if names in ({"done", "inner"}, {"step", "inner"}):
        return STOCHASTIC
    if names == {"count"} or "hyperparams" in names:
        return COUNTER
    return ",".join(sorted(names - {*_INSIDE}))


def _with_kinds_of_second_moments(parts: list[Part]) -> list[Part]:
    """NorMuon's numbers per output, which measure another thing than squares of gradients.

    They have size 1 along the axes of inputs, where first moments have all elements.
    """
    shapes = {(x.keys, x.leaf.shape) for x in parts if x.field == MW and x.leaf is not None}
    of_leaf: dict[Keys, list[tuple[int, ...]]] = {}
    for keys, shape in shapes:
        of_leaf.setdefault(keys, []).append(shape)

    def is_per_output(part: Part) -> bool:
        if part.role != (MOMENTS, VW) or part.leaf is None:
            return False
        own, whole = part.leaf.shape, of_leaf.get(part.keys, [])
        return own not in whole and any(_is_per_output(own, shape) for shape in whole)

    return [x._replace(field=PER_OUTPUT) if is_per_output(x) else x for x in parts]


def _is_per_output(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and all(a in (b, 1) for a, b in zip(shape, whole, strict=True))
