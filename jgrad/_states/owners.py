"""Which leaf of an old state is which of a new one, where several have the same meaning.

A state may have two moments of one parameter, three counters, and windows of two labels. Each leaf
is a field of an owner, a wrapper or an optimizer, and the owners of both states are compared: by
the parameters that they see, by kind and fields, by what they count, and by where they stand. A
state of the same recipe has the same owners, so each of its leaves is assigned to itself.
"""

import collections
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jgrad._states import parts, units
from jgrad._states.parts import Keys, Part
from jgrad._trees import path_rules

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
            for end in range(len(x.owner) + 1) if x.keys else ():
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
        """For leaves of the new state those of the old one that they are; no two share one.

        For the counters of updates, which may, see `steps`.
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
        return assigned

    def _may_become(self, i: int, j: int) -> bool:
        """Whether an old leaf has the unit of a new one, or one that becomes it; counters share."""
        was, now = self._old[j], self._like[i]
        return now.role != "step" and units.conversion(was.unit, now.unit) is not None

    def steps(self, assigned: Mapping[int, int]) -> dict[int, int]:
        """For counters of updates the old ones that have counted the same; several may share one.

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
