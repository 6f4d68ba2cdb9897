"""Which part of an old state each part of a new one comes from; by shapes alone, so static."""

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jgrad._states import account, forms, notes, parts, units
from jgrad._states.account import Entry, Source
from jgrad._states.owners import Owners
from jgrad._states.parts import WITHOUT_PARAMETERS, Keys, Part
from jgrad._states.units import Unit
from jgrad._trees import checks

# What an array is made of, beside one that is carried over as it is; as accounts say it.
OF_COUNT = "1 for each mini-batch of the window"
OF_Y_AND_Z = "the parameters and z, (y - (1 - b1) z) / b1"
ONE_LESS, ONE_MORE = "less 1, from which optax counts", "and 1, from which optax counts"
FIRST = "1, from which optax counts"
MEAN, SUM, ONE = "the mean of a sum", "the sum of a mean", "1; `like=tx.init(params)` has others"

_MOMENTS = [(parts.MOMENTS, field) for field in (parts.MW, parts.VW, parts.PER_OUTPUT)]
_WEIGHTS = [
    (parts.MASTER, "master"),
    (parts.EMA, "average"),
    (parts.SCHEDULE_FREE, "z"),
    (parts.SCHEDULE_FREE, "average"),
]
_TOTAL, _COUNT = (parts.ACCUMULATE, "total"), (parts.ACCUMULATE, "count")
_TREES = (*_MOMENTS, *_WEIGHTS, _TOTAL)  # those of one array have no keys
_MINI_STEP, _WEIGHT = (parts.ACCUMULATE, "mini_step"), (parts.ACCUMULATE, "weight")
_Z, _AVERAGE, _B1, _DONE = ((parts.SCHEDULE_FREE, x) for x in ("z", "average", "b1", "done"))
_SHOWN = 3  # leaves in a message
COUNTS = (_COUNT, _MINI_STEP)  # of a window; optax has the second one only
_SCALE = (parts.SKIP, "loss_scale")
# Kinds whose numbers start at zero.
_START_AT_ZERO = (
    *(parts.MOMENTS, parts.ACCUMULATE, parts.SKIP, parts.SPIKES, parts.EMA, parts.SCHEDULE_FREE),
    *(parts.STOCHASTIC, parts.COUNTER),
)


class Matching(NamedTuple):
    """The whole: a source for each leaf of the new state, None for None; entries and notes."""

    sources: list[Source | None]
    entries: list[Entry]
    notes: list[str]


class Matcher:
    """Finds a source for each leaf of the new state.

    Args:
      function: whose errors they are.
      old: the parts of the old state, by their paths in the new one.
      like: the parts of the new state.
      reset: paths of parameters whose moments start at zero.
    """

    def __init__(
        self, function: str, old: Sequence[Part], like: Sequence[Part], reset: Collection[Keys]
    ) -> None:
        self._function, self._old, self._like, self._reset = function, old, like, reset
        self._by_role = _by_role(old)
        self._places: dict[Any, list[Unit | None]] = {}
        for x in like:
            self._places.setdefault((x.role, x.keys), []).append(x.unit)
        self._owners = Owners(old, like)
        self._own = self._owners.assigned()
        self._own |= self._owners.steps(self._own)
        self._numbers, self._old_numbers = map(numbers, (like, old))
        self._used: set[int] = set()

    def match(self) -> Matching:
        """All of it."""
        sources: list[Source | None] = []
        entries = []
        for i, part in enumerate(self._like):
            if part.leaf is None:
                sources.append(None)
                continue
            source = self._source(i, part)
            sources.append(source)
            detail = self._detail(part, source)
            if part.field != parts.REPORT:
                entries.append(Entry(source.what, part.shown, part.keys, detail))
        entries += [Entry(account.DROPPED, x.shown, x.keys, self._lost(x)) for x in self._unused()]
        self._check_something_fits(sources)
        is_new_window = any(x.role == _TOTAL and self._loses_weights(x) for x in self._like)
        said = notes.of(self._old, self._like, sources, is_new_window=is_new_window)
        return Matching(sources, entries, said)

    def _source(self, i: int, part: Part) -> Source:
        """That of a leaf."""
        own = self._own.get(i)
        if part.role in _MOMENTS and part.keys in self._reset:
            self._used.update(self._by_role[part.role, part.keys])
            return Source(account.RESET)
        if part.is_step and own is None:
            done = self._owners.most_alike(i, self._by_role[_DONE, ()])
            if done is None:
                return Source(account.ZERO)
            how = ONE_LESS if self._old[done].name == "step_count" else ""
            return self._carried(part, done, how)
        if own is not None and self._may_be_carried(part, own):
            return self._carried(part, own, self._made_by(part, own))
        return self._new(i, part)

    def _of_owner(self, part: Part, *fields: str) -> int | None:
        """Where the old state has the first of these numbers of the owner of a new leaf."""
        new = (self._numbers.get((part.owner, field)) for field in fields)
        found = (self._own.get(i) for i in new if i is not None)
        return next((own for own in found if own is not None), None)

    def _carried(self, part: Part, own: int, how: str = "") -> Source:
        self._check_shape(part, own)
        self._used.add(own)
        same = not how and forms.is_form_of(self._old[own].leaf, part.leaf)
        return Source(account.KEPT if same else account.CONVERTED, own, how)

    def _new(self, i: int, part: Part) -> Source:
        """Of a leaf that the old state does not have."""
        count = self._of_owner(part, _COUNT[1], _MINI_STEP[1])
        if part.role == _WEIGHT and count is not None:
            return self._carried(part, count, OF_COUNT)
        if part.role == _COUNT and count is not None and not self._loses_weights(part):
            return self._carried(part, count)  # of optax, which counts once
        if part.role == _MOMENTS[1]:
            first = self._owners.most_alike(i, self._by_role[_MOMENTS[0], part.keys])
            how = "" if first is None else units.squares_of(self._old[first].unit)
            if first is not None and how and self._old[first].leaf.shape == part.leaf.shape:
                return Source(account.ESTIMATED, first, how)
        if part.role in _WEIGHTS:
            masters = self._by_role[_WEIGHTS[0], part.keys]
            for own in masters:
                self._check_shape(part, own)
                self._used.add(own)
            z = self._owners.most_alike(i, self._by_role[_Z, part.keys])
            b1 = None if z is None else self._old_numbers.get((self._old[z].owner, _B1[1]))
            if part.role == _AVERAGE and b1 is not None:
                self._used.add(b1)
                return Source(account.OF_WEIGHTS, z, OF_Y_AND_Z)
            return Source(account.OF_WEIGHTS, masters[0] if masters else None)
        if part.name == "step_count":
            return Source(account.FROM_LIKE, None, FIRST)
        if part.role == _SCALE and not checks.is_array(part.leaf):
            return Source(account.FROM_LIKE, None, ONE)
        is_integer = jnp.issubdtype(part.leaf.dtype, jnp.integer)
        is_hyperparameter = part.kind == parts.COUNTER and not is_integer
        is_number_of_user = part.role in (_SCALE, _B1) or is_hyperparameter
        if part.kind in _START_AT_ZERO and not is_number_of_user:
            return Source(account.ZERO)
        if checks.is_array(part.leaf):
            return Source(account.FROM_LIKE)
        if (is_integer and not part.leaf.shape) or part.field == parts.REPORT:
            return Source(account.ZERO)
        problem = "the shape of a part that `old` does not have, and that starts at unknown numbers"
        remedy = "expected arrays: `like=tx.init(params)`"
        raise ValueError(f"{self._function}: `like`{checks.at(part.path)}: {problem}, {remedy}.")

    def _may_be_carried(self, part: Part, own: int) -> bool:
        """Whether the shape of what is no parameter's is that of before: else it begins anew.

        A window of losses begins anew with its counters, and one of weighted gradients with its
        sum, if gradients are not weighted any more.
        """
        if part.is_step:
            return True
        if part.kind == parts.SPIKES and part.field in ("losses", "accepted", "streak"):
            was, now = self._of_owner(part, "losses"), self._numbers[part.owner, "losses"]
            return was is not None and self._old[was].leaf.shape == self._like[now].leaf.shape
        if part.role in (_TOTAL, _COUNT, _MINI_STEP) and self._loses_weights(part):
            return False
        is_known = part.kind in (*_START_AT_ZERO, parts.MASTER, parts.PLAIN)
        return is_known or self._old[own].leaf.shape == part.leaf.shape

    def _loses_weights(self, part: Part) -> bool:
        """Whether the window of a new leaf is none of weighted gradients, as it was."""
        own = self._of_owner(part, _MINI_STEP[1])
        was = own is not None and (self._old[own].owner, _WEIGHT[1]) in self._old_numbers
        return was and (part.owner, _WEIGHT[1]) not in self._numbers

    def _check_shape(self, part: Part, own: int) -> None:
        old = self._old[own]
        if old.leaf.shape == part.leaf.shape:
            return
        came = f"shape {tuple(old.leaf.shape)}, expected {tuple(part.leaf.shape)}"
        raise ValueError(
            f"{self._function}: `old` does not match `like`{checks.at(old.path)}: {came}."
        )

    def _made_by(self, part: Part, own: int) -> str:
        """optax's `MultiSteps` has the mean of a window, ours has the sum; moments have units."""
        if part.unit is not None:
            return units.conversion(self._old[own].unit, part.unit) or ""
        was, now = self._old[own].name, part.name
        if part.role == _DONE and was != now:
            return ONE_MORE if now == "step_count" else ONE_LESS
        if part.role != _TOTAL or (was == "acc_grads") == (now == "acc_grads"):
            return ""
        return MEAN if now == "acc_grads" else SUM

    def _lost(self, part: Part) -> str:
        """Why, of a moment for which `like` has a place, but in another unit."""
        return units.lost(part.unit, self._places.get((part.role, part.keys), ()))

    def _detail(self, part: Part, source: Source) -> str:
        if source.how:
            return source.how
        if source.what == account.OF_WEIGHTS:
            return "the parameters" if source.old is None else "the float32 copies"
        if source.what != account.CONVERTED or source.old is None:
            return ""
        was, now = map(forms.description, (self._old[source.old].leaf, part.leaf))
        return f"{was} to {now}" if was != now else f"{now} in other blocks"

    def _unused(self) -> list[Part]:
        """What the new state has no place for. Of counters of one thing one is enough."""
        steps = [i for i in self._used if self._old[i].is_step]
        counted = set(map(self._owners.clock_of_old, steps))
        if self._by_role[_COUNT, ()] and any(x.name == "acc_grads" for x in self._like):
            self._used.update(self._by_role[_COUNT, ()])
        return [
            x
            for i, x in enumerate(self._old)
            if x.leaf is not None
            and i not in self._used
            and not (x.is_step and self._owners.clock_of_old(i) in counted)
            and x.field != parts.REPORT
        ]

    def _check_something_fits(self, sources: Sequence[Source | None]) -> None:
        pairs = [(x, s) for x, s in zip(self._like, sources, strict=True) if s is not None]
        had = [x for x in self._old if x.leaf is not None]
        if not (pairs and had):
            return
        lost = {x.keys for x in had if self._lost(x)}  # the parameter fits, and not the unit
        if lost or any(s.old is not None or s.what == account.RESET for _, s in pairs):
            self._check_moments(pairs, had, lost)
            return
        came = ", ".join(sorted({x.shown or "arrays" for x in had}))
        raise ValueError(
            f"{self._function}: `old`: {came}, of which `like` has nothing, expected the state of "
            "an optimizer for the same parameters."
        )

    def _check_moments(
        self, pairs: Sequence[tuple[Part, Source]], had: Sequence[Part], lost: Collection[Keys]
    ) -> None:
        """Some of the moments are kept, where both have some, or all are reset.

        The account says why those of lost parameters are not: their units.
        """
        had = [x for x in had if x.is_moment and x.keys not in lost]
        wanted = [(x, s) for x, s in pairs if x.is_moment and x.keys not in lost]
        if not had or all(s.what == account.RESET for _, s in wanted):
            return
        kept = [x for x, s in pairs if s.old is not None]
        if any(x.role in _TREES or (x.keys and x.field not in WITHOUT_PARAMETERS) for x in kept):
            return
        came, expected = _listed(had), _listed([x for x, _ in wanted])
        raise ValueError(
            f"{self._function}: `old`: {came}, of which `like` would keep none, expected "
            f"{expected}: name other paths by `rename`, or begin with zeros by `reset=True`."
        )


def _by_role(old: Sequence[Part]) -> Mapping[Any, list[int]]:
    found: collections.defaultdict[Any, list[int]] = collections.defaultdict(list)
    for i, x in enumerate(old):
        if x.leaf is not None:
            found[x.role, x.keys].append(i)
    return found


def numbers(state: Sequence[Part]) -> Mapping[tuple[Keys, str], int]:
    """Where the numbers of owners are, those that are there."""
    found = enumerate(state)
    return {(x.owner, x.field): i for i, x in found if x.leaf is not None and not x.keys}


def _listed(found: Sequence[Part]) -> str:
    """Names of leaves, as accounts have them."""
    names = [Entry("", x.shown, x.keys).name for x in found]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
