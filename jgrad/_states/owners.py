"""Which leaf of an old state is which of a new one, where several have the same meaning.

A state may have two moments of one parameter, three counters, and windows of two labels. Each leaf
is a field of an owner, a wrapper or an optimizer, and the owners of both states are compared: by
the parameters that they see, by kind and fields, by what they count, and by their places. A state
of the same recipe has the same owners in the same places, so each of its leaves finds itself.
"""

import collections
import functools
from collections.abc import Collection, Sequence
from typing import Any

from jgrad._states import parts, units
from jgrad._states.parts import Keys, Part
from jgrad._trees import path_rules

# How like two owners are; the first number that differs decides.
Likeness = tuple[float, ...]


class _Owners:
    """The owners of a state, by their paths.

    Attributes:
      leaves: the parts of the state.
      parameters: the paths of the parameters that an owner sees: those in its state and inside of
        it; where there are none, as of a counter in a chain, those of what it stands in.
      fields: those in which there is something.
      kinds: of owners.
      clocks: the number of accumulations around an owner. Inside of one updates are counted, around
        it mini-batches.
      depths: the number of owners of the same kind around one.
      ranks: the number of owners of the same kind before one.
    """

    def __init__(self, leaves: Sequence[Part]) -> None:
        self.leaves = leaves
        self.kinds = {x.owner: x.kind for x in leaves}
        self.fields: dict[Keys, set[str]] = {owner: set() for owner in self.kinds}
        below: collections.defaultdict[Keys, set[Keys]] = collections.defaultdict(set)
        for x in leaves:
            if x.leaf is None:
                continue
            self.fields[x.owner].add(x.field)
            if x.keys and x.field not in parts.WITHOUT_PARAMETERS:
                for end in range(len(x.owner) + 1):
                    below[x.owner[:end]].add(x.keys)

        def seen(path: Keys) -> set[Keys]:
            while path and path not in below:
                path = path[:-1]
            return below[path]

        def around(path: Keys, kind: str) -> int:
            return sum(self.kinds.get(path[:end]) == kind for end in range(len(path)))

        before: collections.Counter[str] = collections.Counter()
        self.parameters, self.clocks, self.depths, self.ranks = {}, {}, {}, {}
        for owner, kind in self.kinds.items():
            self.parameters[owner] = seen(owner)
            self.clocks[owner] = around(owner, parts.ACCUMULATE)
            self.depths[owner] = around(owner, kind)
            self.ranks[owner] = before[kind]
            before[kind] += 1

    def clock_of(self, step: Part) -> int:
        """What a counter counts; that of `optax.MultiSteps` counts what is inside."""
        return self.clocks[step.owner] + (step.kind == parts.ACCUMULATE)


class Owners:
    """The owners of two states, side by side.

    Args:
      old: the parts of the old state, by their paths in the new one.
      like: the parts of the new state.
    """

    def __init__(self, old: Sequence[Part], like: Sequence[Part]) -> None:
        self._old, self._like = _Owners(old), _Owners(like)
        self._likeness = functools.cache(self._compared)

    def assigned(self) -> dict[int, int]:
        """For leaves of the new state those of the old one that they are; no two share one.

        For the counters of updates, which may, see `steps`.
        """
        news, olds = _by_meaning(self._like.leaves), _by_meaning(self._old.leaves)
        found: dict[int, int] = {}
        for meaning, own in news.items():
            pairs = [(i, j) for i in own for j in olds.get(meaning, ()) if self._may_become(i, j)]
            if len(pairs) > 1:
                pairs.sort(key=lambda pair: self._of_leaves(*pair), reverse=True)
            taken: set[int] = set()
            for i, j in pairs:
                if i not in found and j not in taken:
                    found[i] = j
                    taken.add(j)
        return found

    def _may_become(self, i: int, j: int) -> bool:
        """Whether an old leaf has the unit of a new one, or one that becomes it."""
        return units.may_become(self._old.leaves[j].unit, self._like.leaves[i].unit)

    def steps(self, assigned: dict[int, int]) -> dict[int, int]:
        """For counters of updates the old ones that have counted the same; several may share one.

        Moments bring their own, which bias correction needs. For others it is one that counts the
        same, so that schedules go on.
        """
        olds = [j for j, x in enumerate(self._old.leaves) if x.is_step and x.leaf is not None]
        brought: collections.defaultdict[Keys, collections.Counter[Keys]]
        brought = collections.defaultdict(collections.Counter)
        for i, j in assigned.items():
            if self._like.leaves[i].is_moment:
                brought[self._like.leaves[i].owner][self._old.leaves[j].owner] += 1
        found: dict[int, int] = {}
        for i, part in enumerate(self._like.leaves):
            if not (part.is_step and part.leaf is not None and olds):
                continue
            before = brought[part.owner]
            clock = self._like.clock_of(part)
            if before:
                clock = self._old.clocks[max(before, key=before.__getitem__)]

            def rank(j: int, i: int = i, before: Any = before, clock: int = clock) -> Likeness:
                step = self._old.leaves[j]
                same_clock = self._old.clock_of(step) == clock
                return (before[step.owner], same_clock, *self._of_leaves(i, j))

            found[i] = max(olds, key=rank)
        return found

    def most_alike(self, i: int, candidates: Sequence[int]) -> int | None:
        """Of leaves of the old state the one whose owner is most like that of a new leaf."""
        return max(candidates, key=lambda j: self._of_leaves(i, j), default=None)

    def clock_of_old(self, j: int) -> int:
        """What a counter of the old state counts."""
        return self._old.clock_of(self._old.leaves[j])

    def _of_leaves(self, i: int, j: int) -> Likeness:
        return self._likeness(self._like.leaves[i].owner, self._old.leaves[j].owner)

    def _compared(self, new: Keys, old: Keys) -> Likeness:
        return (
            _in_common(self._like.parameters[new], self._old.parameters[old]),
            self._like.kinds[new] == self._old.kinds[old],
            _in_common(self._like.fields[new], self._old.fields[old]),
            self._like.clocks[new] == self._old.clocks[old],
            self._like.depths[new] == self._old.depths[old],
            path_rules.common_end(new, old),
            -abs(self._like.ranks[new] - self._old.ranks[old]),
        )


def _by_meaning(leaves: Sequence[Part]) -> dict[Any, list[int]]:
    """Leaves of one role and parameter, without those that are None."""
    found: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.leaf is not None and not x.is_step:
            found.setdefault((x.role, x.keys), []).append(i)
    return found


def _in_common(a: Collection[Any], b: Collection[Any]) -> float:
    """The share of all that both have."""
    both = {*a, *b}
    return len({*a} & {*b}) / len(both) if both else 1.0
