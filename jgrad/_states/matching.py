"""Which parts of an old state each part of a new one is made of; by shapes alone, so static.

A state may have two moments of one parameter, three counters, and windows of two labels. Each leaf
is a field of an owner, a wrapper or an optimizer, and the owners of both states are compared: by
the parameters that they see, by kind and fields, by what they count, and by where they stand. A
state of the same recipe has the same owners, so each of its leaves is assigned to itself.
"""

import collections
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jgrad._states import account, forms, parts, units
from jgrad._states.account import Account, Entry
from jgrad._states.parts import Keys, Meaning, Part
from jgrad._states.units import Unit
from jgrad._trees import checks, path_rules

# What an array is made of, beside one that is carried over as it is; as accounts say it.
OF_COUNT = "1 for each mini-batch of the window"
OF_Y_AND_Z = "the parameters and z, (y - (1 - b1) z) / b1"
ONE_LESS, ONE_MORE = "less 1, from which optax counts", "and 1, from which optax counts"
FIRST = "1, from which optax counts"
IDENTITY = "the identity, in which moments are Adam's"
MEAN, SUM, ONE = "the mean of a sum", "the sum of a mean", "1; `like=tx.init(params)` has others"

_WINDOW = ("total", "count", "mini_step")  # what begins anew with a window
_SHOWN = 3  # leaves in a message

_BIAS = (
    "{names}: zero beside a step that is kept, which schedules and bias correction count: Adam's "
    "first 100 steps there are up to 6.6 times too long (betas 0.9, 0.999). Warm up their rate, or "
    "set `step` to 0."
)
_NO_STEP = "step: not in `old`, so schedules and bias correction begin anew."
_WEIGHTED = (
    "accumulate: sums of weighted gradients in `old`, of others in `like`: the window begins anew."
)


class Source(NamedTuple):
    """What a leaf of the new state is made of.

    Attributes:
      what: happens to it, as the account says it.
      old: the positions of leaves in the old state.
      how: it is made of them; "" for a change of form, if any.
    """

    what: str
    old: tuple[int, ...] = ()
    how: str = ""


class Matcher:
    """Finds a source for each leaf of the new state.

    Args:
      function: whose errors they are.
      old: the parts of the old state, by their paths in the new one.
      like: the parts of the new state.
      reset: paths of parameters whose moments start at zero.
      has_decay: whether the decay is known by which sums become averages.
    """

    def __init__(
        self,
        function: str,
        old: Sequence[Part],
        like: Sequence[Part],
        reset: Collection[Keys],
        has_decay: bool,
    ) -> None:
        self._function, self._old, self._like, self._reset = function, old, like, reset
        self._has_decay = has_decay
        self._olds = parts.by_meaning(old)
        self._units: dict[Meaning, list[Unit | None]] = {}
        for x in like:
            self._units.setdefault(x.meaning, []).append(x.unit)
        self._owners = Owners(old, like)
        self._assigned = self._owners.assigned()
        self._numbers, self._old_numbers = map(_numbers, (like, old))

    def match(self) -> tuple[list[Source | None], Account]:
        """A source for each leaf of the new state, None for None; and the account of all."""
        sources = [None if x.leaf is None else self._source(i, x) for i, x in enumerate(self._like)]
        made = [(x, s) for x, s in zip(self._like, sources, strict=True) if s is not None]
        dropped = [(x, self._lost(x)) for x in self._unused(made)]
        self._check_something_fits(made, {x.keys for x, why in dropped if why})
        entries = [
            Entry(source.what, part.shown, part.keys, self._detail(part, source))
            for part, source in made
            if part.role != "measured"
        ]
        entries += [Entry(account.DROPPED, x.shown, x.keys, why) for x, why in dropped]
        return sources, Account.of_entries(entries, self._notes(made))

    def _source(self, i: int, part: Part) -> Source:
        """That of a leaf."""
        j = self._assigned.get(i)
        is_reset = any(keys in self._reset for keys in part.owners_keys)
        if part.role in ("moment", "factors") and is_reset:
            return Source(account.RESET, (), IDENTITY if _is_basis(part) else "")
        if part.role == "step" and j is None:
            done = self._owners.most_alike(i, self._positions(parts.SCHEDULE_FREE, "done"))
            if done is None:
                return Source(account.ZERO)
            return self._carried(part, done, ONE_LESS * (self._old[done].name == "step_count"))
        if j is None or not self._may_be_carried(part, j):
            return self._new(i, part)
        how = self._made_by(part, self._old[j])
        counts = (self._old_numbers.get((self._old[j].owner, x)) for x in ("count", "mini_step"))
        count = next((x for x in counts if x is not None), None) if how in (MEAN, SUM) else None
        return self._carried(part, j, how, beside=() if count is None else (count,))

    def _positions(self, kind: str, field: str, keys: Keys = ()) -> list[int]:
        """Where the old state has leaves of a meaning."""
        return self._olds.get((kind, field, keys), [])

    def _of_owner(self, part: Part, *fields: str) -> int | None:
        """Where the old state has the first of these numbers of the owner of a new leaf."""
        news = (self._numbers.get((part.owner, field)) for field in fields)
        olds = (self._assigned.get(i) for i in news if i is not None)
        return next((j for j in olds if j is not None), None)

    def _carried(self, part: Part, j: int, how: str = "", beside: tuple[int, ...] = ()) -> Source:
        self._check_shape(part, self._old[j])
        same = not how and forms.is_form_of(self._old[j].leaf, part.leaf)
        return Source(account.KEPT if same else account.CONVERTED, (j, *beside), how)

    def _new(self, i: int, part: Part) -> Source:
        """Of a leaf that the old state does not have."""
        count = self._of_owner(part, "count", "mini_step")
        if part.kind == parts.ACCUMULATE and count is not None:
            if part.field == "weight":
                return self._carried(part, count, OF_COUNT)
            if part.field == "count" and not self._loses_weights(part):
                return self._carried(part, count)  # of optax, which counts once
        if part.field == parts.VW:
            firsts = self._positions(parts.MOMENTS, parts.MW, part.keys)
            first = self._owners.most_alike(i, firsts)
            how = "" if first is None else units.squares_of(self._old[first].unit)
            if first is not None and how and self._old[first].leaf.shape == part.leaf.shape:
                return Source(account.ESTIMATED, (first,), how)
        if part.field == parts.IN_BASES:  # of the identity, where the old state has no bases
            seconds = self._positions(parts.MOMENTS, parts.VW, part.keys)
            second = self._owners.most_alike(i, seconds)
            if second is not None and units.conversion(self._old[second].unit, part.unit) == "":
                return self._carried(part, second)
        if _is_basis(part):
            return Source(account.FROM_LIKE, (), IDENTITY)
        if part.role == "weights":
            return self._of_weights(i, part)
        if part.name == "step_count":
            return Source(account.FROM_LIKE, (), FIRST)
        has_array = checks.is_array(part.leaf)
        if part.field == "loss_scale" and not has_array:
            return Source(account.FROM_LIKE, (), ONE)
        if part.role not in ("like", "measured"):
            return Source(account.ZERO)
        if has_array:
            return Source(account.FROM_LIKE)
        is_counter = jnp.issubdtype(part.leaf.dtype, jnp.integer) and not part.leaf.shape
        if is_counter or part.role == "measured":
            return Source(account.ZERO)
        problem = "the shape of a part that `old` does not have, and that starts at unknown numbers"
        remedy = "expected arrays: `like=tx.init(params)`"
        raise ValueError(f"{self._function}: `like`{checks.at(part.at)}: {problem}, {remedy}.")

    def _of_weights(self, i: int, part: Part) -> Source:
        """Copies of the float32 copies in the old state, else of the parameters.

        optax's `schedule_free` does not keep its average, which is made of these and of its z.
        """
        copies = self._positions("master_weights", "master", part.keys)
        for j in copies:
            self._check_shape(part, self._old[j])
        z = self._owners.most_alike(i, self._positions(parts.SCHEDULE_FREE, "z", part.keys))
        b1 = None if z is None else self._old_numbers.get((self._old[z].owner, "b1"))
        is_average = part.kind == parts.SCHEDULE_FREE and part.field == "average"
        if z is not None and b1 is not None and is_average:
            return Source(account.OF_WEIGHTS, (z, b1, *copies), OF_Y_AND_Z)
        return Source(account.OF_WEIGHTS, (*copies,))

    def _may_be_carried(self, part: Part, j: int) -> bool:
        """Whether the shape of what is no parameter's is that of before: else it begins anew.

        A window of losses begins anew with its counters, and one of weighted gradients with its
        sum, if gradients are not weighted any more.
        """
        if part.kind == parts.SPIKES and part.field in ("losses", "accepted", "streak"):
            was, now = self._of_owner(part, "losses"), self._numbers[part.owner, "losses"]
            return was is not None and self._old[was].leaf.shape == self._like[now].leaf.shape
        if part.kind == parts.ACCUMULATE and part.field in _WINDOW and self._loses_weights(part):
            return False
        may_differ = part.role in ("like", "measured") and part.kind != parts.PLAIN
        return not may_differ or self._old[j].leaf.shape == part.leaf.shape

    def _loses_weights(self, part: Part) -> bool:
        """Whether the window of a new leaf is none of weighted gradients, as it was."""
        j = self._of_owner(part, "mini_step")
        was = j is not None and (self._old[j].owner, "weight") in self._old_numbers
        return was and (part.owner, "weight") not in self._numbers

    def _check_shape(self, part: Part, old: Part) -> None:
        if old.leaf.shape == part.leaf.shape:
            return
        came = f"shape {tuple(old.leaf.shape)}, expected {tuple(part.leaf.shape)}"
        raise ValueError(
            f"{self._function}: `old` does not match `like`{checks.at(old.at)}: {came}."
        )

    def _made_by(self, part: Part, old: Part) -> str:
        """optax's `MultiSteps` has the mean of a window, ours has the sum; moments have units."""
        if part.role == "moment":
            how = units.conversion(old.unit, part.unit) or ""
            return how if self._has_decay or how not in units.BY_DECAY else ""
        was, now = old.name, part.name
        if part.kind == parts.SCHEDULE_FREE and part.field == "done" and was != now:
            return ONE_MORE if now == "step_count" else ONE_LESS
        if part.role != "sum" or was == now:
            return ""
        return MEAN if now == "acc_grads" else SUM

    def _lost(self, part: Part) -> str:
        """Why, of a moment that `like` has too, but in another unit."""
        return units.lost(part.unit, self._units.get(part.meaning, ()))

    def _detail(self, part: Part, source: Source) -> str:
        if source.how:
            return source.how
        if source.what == account.OF_WEIGHTS:
            return "the float32 copies" if source.old else "the parameters"
        if source.what != account.CONVERTED:
            return ""
        was, now = map(forms.description, (self._old[source.old[0]].leaf, part.leaf))
        return f"{was} to {now}" if was != now else f"{now} in other blocks"

    def _unused(self, made: Sequence[tuple[Part, Source]]) -> list[Part]:
        """What the new state has no place for. Of counters of one thing one is enough."""
        used = {j for _, source in made if source.what != account.ESTIMATED for j in source.old}
        counted = {self._owners.clock_of_old(j) for j in used if self._old[j].role == "step"}
        for part, source in made:
            if source.what == account.RESET:
                used.update(self._olds.get(part.meaning, ()))
            elif part.name == "acc_grads":  # of optax, which counts once
                used.update(self._positions(parts.ACCUMULATE, "count"))
        return [
            x
            for j, x in enumerate(self._old)
            if not (x.leaf is None or j in used or x.role == "measured")
            and not (x.role == "step" and self._owners.clock_of_old(j) in counted)
        ]

    def _check_something_fits(
        self, made: Sequence[tuple[Part, Source]], lost: Collection[Keys]
    ) -> None:
        """Something is kept or reset; some of the moments, where both states have some.

        The account says why those of lost parameters are not: their units.
        """
        had = [x for x in self._old if x.leaf is not None]
        if not (made and had):
            return
        if not (lost or any(source.old or source.what == account.RESET for _, source in made)):
            came = ", ".join(sorted({x.shown or "arrays" for x in had}))
            raise ValueError(
                f"{self._function}: `old`: {came}, none of which `like` has, expected the state "
                "of an optimizer for the same parameters."
            )
        had = [x for x in had if x.role == "moment" and x.keys not in lost]
        wanted = [(x, s) for x, s in made if x.role == "moment" and x.keys not in lost]
        if not had or all(s.what == account.RESET for _, s in wanted):
            return
        # Trees of bare arrays have no keys.
        if any(s.old and (x.keys or x.role in ("moment", "weights", "sum")) for x, s in made):
            return
        came, expected = _listed(had), _listed([x for x, _ in wanted])
        raise ValueError(
            f"{self._function}: `old`: {came}, none of which `like` would keep, expected "
            f"{expected}: name other paths by `rename`, or begin with zeros by `reset=True`."
        )

    def _notes(self, made: Sequence[tuple[Part, Source]]) -> list[str]:
        """What an account says beside its lines: what the new optimizer makes of the state."""
        firsts = {x.keys: s for x, s in made if x.role == "moment" and x.field == parts.MW}
        begun = [
            x
            for x, s in made
            if x.field in (parts.VW, parts.IN_BASES)
            and s.what in (account.ZERO, account.RESET)
            and x.keys in firsts
        ]
        steps = [s for x, s in made if x.role == "step"]
        notes = []
        if begun and any(s.old for s in steps):
            name = Entry("", begun[0].shown, begun[0].keys).name
            names = name if len(begun) == 1 else f"vw of {len(begun)} leaves"
            notes.append(_BIAS.format(names=names))
        if any(x.role == "sum" and self._loses_weights(x) for x in self._like):
            notes.append(_WEIGHTED)
        if not all(s.old for s in steps) and any(x.role == "moment" and s.old for x, s in made):
            notes.append(_NO_STEP)
        for x, s in made:
            was = self._old[s.old[0]].unit if s.old and x.field == parts.MW else None
            if was is not None and x.unit is not None:
                notes += [text for text in units.notes(was, x.unit, s.how) if text not in notes]
        return notes


def _is_basis(part: Part) -> bool:
    return part.role == "factors" and part.keys[-1].endswith("basis")


def _numbers(state: Sequence[Part]) -> dict[tuple[Keys, str], int]:
    """The positions of the numbers of owners, those that are there."""
    return {(x.owner, x.field): i for i, x in enumerate(state) if x.leaf is not None and not x.keys}


def _listed(leaves: Sequence[Part]) -> str:
    """Names of leaves, as accounts have them."""
    names = [Entry("", x.shown, x.keys).name for x in leaves]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---- owners ------------------------------------------------------------------------------------

# How like two owners are; the first number that differs decides.
Likeness = tuple[float, ...]


class _Owner(NamedTuple):
    """A wrapper or an optimizer.

    Attributes:
      kind: of it.
      fields: those in which there is something.
      parameters: the paths of the parameters that it sees: those in its state and inside of it;
        where there are none, as of a counter in a chain, those of what it stands in.
      clock: the number of accumulations around it. Inside of one updates are counted, around it
        mini-batches.
      depth: the number of owners of the same kind around it.
      rank: the number of owners of the same kind before it.
    """

    kind: str
    fields: Collection[str]
    parameters: Collection[Keys]
    clock: int
    depth: int
    rank: int


def _owners(leaves: Sequence[Part]) -> dict[Keys, _Owner]:
    """The owners of a state, by their paths."""
    fields: dict[Keys, set[str]] = {x.owner: set() for x in leaves}
    parameters: dict[Keys, set[Keys]] = {(): set()}  # at and below a path
    for x in leaves:
        if x.leaf is not None:
            fields[x.owner].add(x.field)
            for end in range(len(x.owner) + 1) if x.keys and x.role != "factors" else ():
                parameters.setdefault(x.owner[:end], set()).add(x.keys)
    owners: dict[Keys, _Owner] = {}
    kinds = {x.owner: x.kind for x in leaves}
    before: collections.Counter[str] = collections.Counter()
    for path, kind in kinds.items():
        ends = [path[:end] for end in reversed(range(len(path) + 1))]
        seen = next(parameters[end] for end in ends if end in parameters)
        around = [kinds.get(end) for end in ends[1:]]
        clock, depth = around.count(parts.ACCUMULATE), around.count(kind)
        owners[path] = _Owner(kind, fields[path], seen, clock, depth, before[kind])
        before[kind] += 1
    return owners


class Owners:
    """The owners of two states, side by side.

    Args:
      old: the parts of the old state, by their paths in the new one.
      like: the parts of the new state.
    """

    def __init__(self, old: Sequence[Part], like: Sequence[Part]) -> None:
        self._old, self._like = old, like
        self._old_owners, self._new_owners = _owners(old), _owners(like)
        self._likeness = functools.cache(self._compared)

    def assigned(self) -> dict[int, int]:
        """For leaves of the new state those of the old one that they are.

        No two share one, but for the counters of updates.
        """
        olds = parts.by_meaning(self._old)
        assigned: dict[int, int] = {}
        taken: set[int] = set()
        for meaning, news in parts.by_meaning(self._like).items():
            candidates = [
                (i, j) for i in news for j in olds.get(meaning, ()) if self._may_become(i, j)
            ]
            if len(candidates) > 1:
                candidates.sort(key=lambda both: self._of_leaves(*both), reverse=True)
            for i, j in candidates:
                if i not in assigned and j not in taken:
                    assigned[i] = j
                    taken.add(j)
        return assigned | self._steps(assigned)

    def _may_become(self, i: int, j: int) -> bool:
        """Whether an old leaf has the unit of a new one, or one that becomes it; counters share."""
        was, now = self._old[j], self._like[i]
        return now.role != "step" and units.conversion(was.unit, now.unit) is not None

    def _steps(self, assigned: Mapping[int, int]) -> dict[int, int]:
        """For counters of updates the old ones that have counted the same.

        Moments bring their own, which bias correction needs. For others it is one that counts the
        same, so that schedules go on.
        """
        olds = [j for j, x in enumerate(self._old) if x.role == "step" and x.leaf is not None]
        news = [i for i, x in enumerate(self._like) if x.role == "step" and x.leaf is not None]
        brought: dict[Keys, collections.Counter[Keys]] = {
            self._like[i].owner: collections.Counter() for i in news
        }
        for i, j in assigned.items():
            if self._like[i].role == "moment" and self._like[i].owner in brought:
                brought[self._like[i].owner][self._old[j].owner] += 1

        def rank(j: int, i: int) -> Likeness:
            moments = brought[self._like[i].owner]
            clock = _clock(self._like[i], self._new_owners)
            if moments:
                clock = self._old_owners[max(moments, key=moments.__getitem__)].clock
            same_clock = self.clock_of_old(j) == clock
            return (moments[self._old[j].owner], same_clock, *self._of_leaves(i, j))

        if len(olds) < 2:  # nothing to choose
            return dict.fromkeys(news, olds[0]) if olds else {}
        return {i: max(olds, key=functools.partial(rank, i=i)) for i in news}

    def most_alike(self, i: int, candidates: Sequence[int]) -> int | None:
        """Of leaves of the old state the one whose owner is most like that of a new leaf."""
        return max(candidates, key=lambda j: self._of_leaves(i, j), default=None)

    def clock_of_old(self, j: int) -> int:
        """What a counter of the old state counts."""
        return _clock(self._old[j], self._old_owners)

    def _of_leaves(self, i: int, j: int) -> Likeness:
        return self._likeness(self._like[i].owner, self._old[j].owner)

    def _compared(self, new: Keys, old: Keys) -> Likeness:
        a, b = self._new_owners[new], self._old_owners[old]
        return (
            _in_common(a.parameters, b.parameters),
            a.kind == b.kind,
            _in_common(a.fields, b.fields),
            a.clock == b.clock,
            a.depth == b.depth,
            path_rules.common_end(new, old),
            -abs(a.rank - b.rank),
        )


def _clock(step: Part, owners: Mapping[Keys, _Owner]) -> int:
    """What a counter counts; that of `optax.MultiSteps` counts what is inside."""
    return owners[step.owner].clock + (step.kind == parts.ACCUMULATE)


def _in_common(a: Collection[object], b: Collection[object]) -> float:
    """The share of all that both have."""
    union = {*a, *b}
    return len({*a} & {*b}) / len(union) if union else 1.0
