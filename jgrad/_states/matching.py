"""Which leaves of an old state each leaf of a new one is made from, and the account of it.

The k-th leaf with a meaning corresponds to the k-th one in the old state. Numbers of a wrapper mean
the same if it sees the same parameters. If a first moment may mean something else than that of the
old state, the user has to decide.
"""

import collections
import dataclasses
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._states import forms
from jgrad._states.state_leaves import (
    ACCUMULATE,
    CERTAIN,
    IN_BASES,
    MASTER,
    MW,
    NAME,
    OF_FACTORED,
    OF_PARAMETERS,
    SQUARES,
    VW,
    Keys,
    StateLeaf,
)
from jgrad._trees import checks

_ORDER = ("kept", "converted", "of weights", "from like", "zero", "reset", "dropped")
KEPT, CONVERTED, OF_WEIGHTS, FROM_LIKE, ZERO, RESET, DROPPED = _ORDER
_LOST_OR_NEW = (OF_WEIGHTS, FROM_LIKE, ZERO, DROPPED)


class Entry(NamedTuple):
    """One leaf.

    Attributes:
      what: happened to it.
      part: of the state that it belongs to.
      name: as accounts call it, `mw/embed/table`.
      detail: more of it, or "".
    """

    what: str
    part: str
    name: str
    detail: str = ""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Account:
    """A record of what `carry_over` did with each part of a state; `str(account)` lists it.

    Each attribute is a tuple of names such as `mw/embed/table`. An account is static, so functions
    under `jax.jit` can return it.

    Attributes:
      kept: arrays that were taken over bit for bit.
      converted: arrays that were converted to another dtype, to 8 bits or back, or from a mean to a
        sum or back.
      of_weights: arrays made from the parameters, or from float32 copies in `old`.
      from_like: arrays that `old` does not have, and that start as in `like`.
      zero: arrays that start at zero because `old` does not have them.
      reset: arrays that start at zero because `reset` or `momentum` says so.
      dropped: arrays that have no counterpart in `like`.
      notes: remarks on what this means for the new optimizer.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> old = jgrad.adam(1e-3).init(params)
      >>> tx = jgrad.accumulate(jgrad.adam(1e-3), every=4)
      >>> state, account = jgrad.carry_over(old, like=jax.eval_shape(tx.init, params))
      >>> account.kept
      ('step', 'mw/b', 'mw/w', 'vw/b', 'vw/w')
    """

    kept: tuple[str, ...]
    converted: tuple[str, ...]
    of_weights: tuple[str, ...]
    from_like: tuple[str, ...]
    zero: tuple[str, ...]
    reset: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    _entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return "\n".join((*_lines(self._entries), *(f"{'note':<11}{x}" for x in self.notes)))

    def __repr__(self) -> str:
        return str(self)


Account.__module__ = "jgrad"


def lost_or_new(account: Account) -> str:
    """The lines of what was dropped or is new; what was asked for by `reset` is neither."""
    lines = _lines(account._entries)
    return "\n".join(line for line in lines if line.startswith(_LOST_OR_NEW))


def _lines(entries: Sequence[Entry]) -> list[str]:
    """A line for all leaves of a part that went one way, in the order of the ways."""
    alike: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        alike.setdefault((entry.what, entry.part, entry.detail), []).append(entry)
    count_of_part = collections.Counter(x.part for x in entries)
    lines = []
    for (what, part, detail), leaves in sorted(alike.items(), key=lambda x: _ORDER.index(x[0][0])):
        count, name = len(leaves), leaves[0].name or "the tree"
        if 1 < count == count_of_part[part]:
            name = f"{part or name}, {count} leaves"
        elif count > 1:
            name = f"{name} and {count - 1} more"
        lines.append(f"{what:<11}{name}{f': {detail}' if detail else ''}")
    return lines


Momentum = Literal["keep", "reset"]
_Meaning = Callable[[StateLeaf], Hashable]  # by which leaves are paired; None if it isn't
KEEP = "keep"

# What an array is made from if it is not carried over as it is, in the words of accounts.
IDENTITY = "the identity, in which moments are Adam's"
MEAN, SUM, ONE = "the mean of a sum", "the sum of a mean", "1; `like=tx.init(params)` has others"

_BIAS = (
    "{name}: zero beside a step that is kept, which schedules and bias correction count: Adam's "
    "first 100 steps there are up to 6.6 times too long (betas 0.9, 0.999). Warm up their rate, or "
    "set `step` to 0."
)
_ALIKE = (
    "{name}: {now}, which look alike, so kept: right for the same method alone. "
    '`momentum="reset"` begins with zeros.'
)
_KEPT = '{name}: {was}, kept as {now} by `momentum="keep"`.'


class Source(NamedTuple):
    """What a leaf of the new state is made of.

    Attributes:
      what: happens to it, as the account says it.
      old: leaves of the old state.
      detail: how it is made of them, or "".
    """

    what: str
    old: tuple[StateLeaf, ...] = ()
    detail: str = ""


Made = Sequence[tuple[StateLeaf, Source]]


class Matcher:
    """Finds a source for each leaf of the new state.

    Args:
      old: the leaves of the old state, by their paths in the new one.
      like: the leaves of the new state.
      reset: paths of parameters whose moments start at zero.
      momentum: what becomes of first moments that may be another thing.
      has_params: whether weights can be made of parameters.
    """

    def __init__(
        self,
        old: Sequence[StateLeaf],
        like: Sequence[StateLeaf],
        reset: Collection[Keys],
        momentum: Momentum | None,
        *,
        has_params: bool,
    ) -> None:
        self._reset, self._momentum = reset, momentum
        self._old, self._like, self._has_params = old, like, has_params
        # From the outside in, since files sort the fields of a state.
        self._from_outside = [sorted(state, key=lambda x: len(x.owner)) for state in (like, old)]
        self._assigned: dict[int, StateLeaf] = {}  # by the positions of new ones
        self._brought: dict[Keys, StateLeaf] = {}  # by the owners of new moments the first old one
        self._masters = {x.keys: x for x in old if x.field == MASTER}
        self._numbers = {(x.owner, x.field): x for x in old if not x.keys}
        self._in_bases = {k for x in old if x.role == "factors" for k in x.owners_keys}
        self._pair(_meaning)
        self._pair(_without_seen, as_many=True)
        self._pair(self._beside_bases)
        crossing = self._pair(self._by_word)
        self._crossing = {new.position for new, _ in crossing}
        self._check_moments(crossing)
        self._assign_steps()

    def match(self) -> tuple[Made, Account]:
        """Each leaf of the new state with its source, and the account of all."""
        pairs = [(x, self._source(x)) for x in self._like]
        self._check_something_fits(pairs)
        entries = [
            Entry(source.what, leaf.shown, leaf.called, source.detail)
            for leaf, source in pairs
            if leaf.role != "measured"
        ]
        entries += [Entry(DROPPED, x.shown, x.called) for x in self._unused(pairs)]
        ways = {
            what.replace(" ", "_"): tuple(x.name for x in entries if x.what == what)
            for what in _ORDER
        }
        return pairs, Account(**ways, notes=tuple(self._notes(pairs)), _entries=tuple(entries))

    # ---- what goes to what ---------------------------------------------------------------------

    def _pair(self, by: _Meaning, *, as_many: bool = False) -> list[tuple[StateLeaf, StateLeaf]]:
        """Pairs leaves without a partner, in order; `as_many`, where there are as many of both."""
        groups: dict[Hashable, tuple[list[StateLeaf], list[StateLeaf]]] = {}
        taken = self._assigned.keys(), {x.position for x in self._assigned.values()}
        for k, state in enumerate(self._from_outside):
            for x in state:
                if x.position not in taken[k] and (key := by(x)) is not None:
                    groups.setdefault(key, ([], []))[k].append(x)
        pairs: list[tuple[StateLeaf, StateLeaf]] = []
        for news, olds in groups.values():
            if not as_many or len(news) == len(olds):
                pairs += zip(news, olds, strict=False)
        for new, old in pairs:
            self._assigned[new.position] = old
            if new.role == "moment":
                self._brought.setdefault(new.owner, old)
        return pairs

    def _beside_bases(self, leaf: StateLeaf) -> Hashable:
        """A second moment of Adam in the bases with which SOAP begins; None for others."""
        is_second = leaf.field in (VW, IN_BASES) and leaf.keys not in self._in_bases
        return (leaf.keys, leaf.unit) if is_second else None

    def _by_word(self, leaf: StateLeaf) -> Hashable:
        """What the user may say to be the same: first moments, and second ones of Adafactor's."""
        is_second = leaf.field == VW and leaf.unit in (SQUARES, OF_FACTORED)
        is_said = leaf.field == MW or (is_second and self._momentum != RESET)
        return (leaf.keys, leaf.field) if is_said and not self._is_reset(leaf) else None

    def _is_reset(self, leaf: StateLeaf) -> bool:
        is_moment = leaf.role in ("moment", "factors")
        return is_moment and any(keys in self._reset for keys in leaf.owners_keys)

    def _check_moments(self, crossing: Sequence[tuple[StateLeaf, StateLeaf]]) -> None:
        """No second one is made up; what may be another thing crosses by the user's word alone."""
        had = {x.keys for x in self._old if x.role == "moment"}
        for x in self._like:
            is_second = x.role == "moment" and x.field != MW and x.keys in had
            if is_second and not (x.position in self._assigned or self._is_reset(x)):
                what = "a moment" if x.name == x.field != VW else "a second moment"
                came = f"{x.called}, {what} that `old` lacks"
                remedy = "start afresh by `tx.init(params)`, or keep only the step by `reset=`"
                also = "`momentum=` concerns first moments alone"
                raise ValueError(f"{NAME}: `like`{checks.at(x.at)}: {came}; {remedy}; {also}.")
        if crossing and self._momentum is None:
            new, old = crossing[0]
            remedy = '"keep" if both hold the same, or ' + (
                '"reset" to begin with zeros' if new.field == MW else "`reset=` for the leaf"
            )
            came = f"{old.called} of `old` holds {old.unit}; that of `like` holds {new.unit}"
            raise ValueError(f"{NAME}: `momentum`: None, expected {remedy}: {came}.")

    def _assign_steps(self) -> None:
        """Moments bring the counter that is theirs; others go on from one of the same things."""
        news, steps = ([x for x in state if x.role == "step"] for state in self._from_outside)
        free = {x.position for x in steps}
        for new in news if steps else ():
            moment = self._brought.get(new.owner)
            owner, clock = getattr(moment, "owner", None), (moment or new).clock
            like = (owner, clock, new.seen, new.kind)
            kinds_of_steps = ((x.owner, x.clock, x.seen, x.kind) for x in steps)
            alike = [[*map(operator.eq, kind_of_step, like)] for kind_of_step in kinds_of_steps]
            best = [x for x, how in zip(steps, alike, strict=True) if how == max(alike)]
            step = next((x for x in best if x.position in free), best[-1])
            if step.kind == new.kind:
                free.discard(step.position)
            self._assigned[new.position] = step

    # ---- what a leaf is made of ----------------------------------------------------------------

    def _source(self, leaf: StateLeaf) -> Source:
        old = self._assigned.get(leaf.position)
        is_open = old is not None and leaf.field == MW and leaf.unit not in CERTAIN
        crosses = is_open or leaf.position in self._crossing
        if self._is_reset(leaf) or (self._momentum == RESET and crosses):
            return Source(RESET, (), IDENTITY if leaf.is_basis else "")
        if old is None and leaf.field == "count":  # optax counts once
            window = _meaning(leaf._replace(field="mini_step"))
            old = next((x for x in self._old if _meaning(x) == window), None)
        if old is None:
            return self._new(leaf)
        if old.array.shape != leaf.array.shape:
            if leaf.kind and leaf.role in ("like", "measured"):
                return self._new(leaf)
            came = f"shape {tuple(old.array.shape)}, expected {tuple(leaf.array.shape)}"
            raise ValueError(f"{NAME}: `old` does not match `like`{checks.at(old.at)}: {came}.")
        if leaf.role == "sum" and leaf.name != old.name:  # optax has the mean of a window
            how, field = (MEAN, "count") if leaf.name == "acc_grads" else (SUM, "mini_step")
            return Source(CONVERTED, (old, self._numbers[old.owner, field]), how)
        was, now = (forms.form_of(x.array) for x in (old, leaf))
        if was == now:
            return Source(KEPT, (old,))
        change = f"{was[0]} to {now[0]}" if was[0] != now[0] else f"{now[0]} in other blocks"
        return Source(CONVERTED, (old,), change)

    def _new(self, leaf: StateLeaf) -> Source:
        """Of a leaf that the old state does not have: as `like` has it, or as `init` makes it."""
        is_array = all(map(checks.is_array, jax.tree.leaves(leaf.array)))
        if leaf.role == "weights":
            if copy := self._masters.get(leaf.keys):
                return Source(OF_WEIGHTS, (copy,), "the float32 copies")
            if self._has_params or not is_array:
                return Source(OF_WEIGHTS, (), "the parameters")
        if is_array:
            return Source(FROM_LIKE)
        if leaf.is_basis:
            return Source(FROM_LIKE, (), IDENTITY)
        if leaf.field == "loss_scale":
            return Source(FROM_LIKE, (), ONE)
        is_counter = not leaf.array.shape and jnp.issubdtype(leaf.array.dtype, jnp.integer)
        if leaf.role != "like" or is_counter:
            return Source(ZERO)
        problem = "the shape of a part that `old` does not have, and that starts at unknown numbers"
        remedy = "expected arrays: `like=tx.init(params)`"
        raise ValueError(f"{NAME}: `like`{checks.at(leaf.at)}: {problem}, {remedy}.")

    # ---- what is said of it --------------------------------------------------------------------

    def _unused(self, pairs: Made) -> Iterator[StateLeaf]:
        """What the new state has no place for. Of counters of one thing one is enough."""
        used = {x.position for _, source in pairs for x in source.old}
        counted = {x.clock for x in self._old if x.role == "step" and x.position in used}
        reset = {(x.field, x.keys) for x, source in pairs if source.what == RESET}
        for x in self._old:
            is_said = x.role == "measured" or (x.role == "step" and x.clock in counted)
            if not (x.position in used or is_said or (x.field, x.keys) in reset):
                yield x

    def _check_something_fits(self, pairs: Made) -> None:
        """Something is kept or reset; and some moments or weights, where both states have some."""
        states = self._old, self._like
        kept = [x for x, source in pairs if source.old or source.what == RESET]
        moments = [[x for x in state if x.role == "moment"] for state in states]
        if all(moments):
            kept = [x for x in kept if x.role in OF_PARAMETERS]
        if all(states) and not kept:
            both = zip(moments, states, strict=True)
            came, expected = (
                ", ".join(x.called or "arrays" for x in (some or state)[:3]) for some, state in both
            )
            raise ValueError(
                f"{NAME}: `old`: {came}, none of which `like` would keep, expected "
                f"{expected}: name other paths by `rename`, or begin with zeros by `reset=True`."
            )

    def _notes(self, pairs: Made) -> Iterator[str]:
        """What an account says beside its lines: what the new optimizer makes of the state."""
        firsts = {x.keys for x, _ in pairs if x.field == MW}
        begun = [
            x for x, s in pairs if x.field in (VW, IN_BASES) and not s.old and x.keys in firsts
        ]
        if begun and any(s.old for x, s in pairs if x.role == "step"):
            yield _BIAS.format(name=_names(begun))
        units: dict[tuple[str, str], list[StateLeaf]] = {}
        for x, s in pairs:
            if x.field in (MW, VW) and s.old:
                units.setdefault((s.old[0].unit, x.unit), []).append(x)
        for (was, now), leaves in units.items():
            remark = _KEPT if was != now else _ALIKE
            is_open = leaves[0].field == MW and now not in CERTAIN and self._momentum is None
            if was != now or is_open:
                yield remark.format(name=_names(leaves), was=was, now=now)


def _meaning(leaf: StateLeaf) -> Hashable:
    """By which leaves of two states are the same thing; None for counters of updates."""
    is_of_params = leaf.role in ("moment", "weights", "factors")
    seen = frozenset() if is_of_params else leaf.seen
    return None if leaf.role == "step" else (leaf.kind, leaf.field, leaf.keys, leaf.unit, seen)


def _without_seen(leaf: StateLeaf) -> Hashable:
    """The same without the parameters that a wrapper sees; a window of gradients begins anew."""
    no_other = leaf.role in ("step", "moment") or leaf.kind == ACCUMULATE
    return None if no_other else (leaf.kind, leaf.field, leaf.keys, leaf.unit)


def _names(leaves: Sequence[StateLeaf]) -> str:
    one = len(leaves) == 1
    return leaves[0].called if one else f"{leaves[0].shown} of {len(leaves)} leaves"
