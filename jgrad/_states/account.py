"""What `carry_over` did with each part of a state, to read and to ask."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

_ORDER = ("kept", "converted", "of weights", "from like", "zero", "reset", "dropped")
KEPT, CONVERTED, OF_WEIGHTS, FROM_LIKE, ZERO, RESET, DROPPED = _ORDER
_LOST_OR_NEW = (OF_WEIGHTS, FROM_LIKE, ZERO, DROPPED)


class Entry(NamedTuple):
    """One leaf.

    Attributes:
      what: happened to it.
      part: of the state that it belongs to.
      keys: of its parameter.
      detail: more of it, or "".
    """

    what: str
    part: str
    keys: tuple[str, ...]
    detail: str = ""

    @property
    def name(self) -> str:
        """As accounts call it: `mw/embed/table`."""
        return "/".join(filter(None, (self.part, *self.keys)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Account:
    """What `carry_over` did with each part of a state; `str(account)` says it line by line.

    Each attribute is a tuple of names such as `mw/embed/table`. It is static, so that functions
    under `jax.jit` can return it.

    Attributes:
      kept: bit for bit.
      converted: to another dtype, to 8 bits or back, from a mean to a sum, or back.
      of_weights: made of the parameters, or of the float32 copies in `old`.
      from_like: what `old` does not have, and starts as in `like`.
      zero: what starts at zero because `old` does not have it.
      reset: what starts at zero because `reset` or `momentum` says so.
      dropped: what `like` has no place for.
      notes: sentences about what the new optimizer makes of it.

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

    @classmethod
    def of_entries(cls, entries: Sequence[Entry], notes: Sequence[str]) -> "Account":
        """The account of leaves, each with what happened to it."""
        ways = {
            what.replace(" ", "_"): tuple(x.name for x in entries if x.what == what)
            for what in _ORDER
        }
        return cls(**ways, notes=tuple(notes), _entries=tuple(entries))

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
    of_part = collections.Counter(x.part for x in entries)
    lines = []
    for (what, part, detail), leaves in sorted(alike.items(), key=lambda x: _ORDER.index(x[0][0])):
        count, name = len(leaves), leaves[0].name or "the tree"
        if 1 < count == of_part[part]:
            name = f"{part or name}, {count} leaves"
        elif count > 1:
            name = f"{name} and {count - 1} more"
        lines.append(f"{what:<11}{name}{f': {detail}' if detail else ''}")
    return lines
