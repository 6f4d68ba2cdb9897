"""What `carry_over` did with each part of a state, to read and to ask."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

KEPT, CONVERTED, OF_WEIGHTS, ESTIMATED, FROM_LIKE, ZERO, RESET, DROPPED = (
    *("kept", "converted", "of weights", "estimated", "from like", "zero", "reset", "dropped"),
)
_ORDER = (KEPT, CONVERTED, OF_WEIGHTS, ESTIMATED, FROM_LIKE, ZERO, RESET, DROPPED)
_LOST_OR_NEW = (OF_WEIGHTS, ESTIMATED, FROM_LIKE, ZERO, DROPPED)
_SHOWN = 5  # subtrees of one part that went the same way


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


class Source(NamedTuple):
    """What a leaf of the new state is made of.

    Attributes:
      what: happens to it, as the account says it.
      old: the position of the leaf in the old state, or None.
      how: it is made of that; "" for a change of form, if any.
    """

    what: str
    old: int | None = None
    how: str = ""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Account:
    """What `carry_over` did: `str(account)` says it line by line.

    Each attribute is a tuple of names such as `mw/embed/table`. It is static, so that functions
    under `jax.jit` can return it.

    Attributes:
      kept: bit for bit.
      converted: to another dtype, unit or sign, to 8 bits or back, from a mean to a sum, or back.
      of_weights: made of the parameters, or of the float32 copies in `old`.
      estimated: second moments made of first ones.
      from_like: numbers of a wrapper that `old` does not have, which start as in `like`.
      zero: what starts at zero because `old` does not have it.
      reset: what starts at zero because `reset` says so.
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
    estimated: tuple[str, ...]
    from_like: tuple[str, ...]
    zero: tuple[str, ...]
    reset: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]
    _entries: tuple[Entry, ...]

    @classmethod
    def of_entries(cls, entries: Sequence[Entry], notes: Sequence[str]) -> "Account":
        """The account of leaves, each with what happened to it."""

        def names(what: str) -> tuple[str, ...]:
            return tuple(x.name for x in entries if x.what == what)

        return cls(
            kept=names(KEPT),
            converted=names(CONVERTED),
            of_weights=names(OF_WEIGHTS),
            estimated=names(ESTIMATED),
            from_like=names(FROM_LIKE),
            zero=names(ZERO),
            reset=names(RESET),
            dropped=names(DROPPED),
            notes=tuple(notes),
            _entries=tuple(entries),
        )

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
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        parts.setdefault(entry.part, []).append(entry)
    rows = [row for own in parts.values() for row in _rows(own)]
    return [line for what in _ORDER for own, line in rows if own == what]


def _rows(entries: list[Entry]) -> Iterator[tuple[str, str]]:
    """The lines of one part, a line for each way that something in it went."""
    subtrees: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for way, name, count in _uniform(entries, 0):
        subtrees.setdefault(way, []).append((name, count))
    for (what, detail), found in subtrees.items():
        shown, rest = found[:_SHOWN], found[_SHOWN:]
        if len(rest) == 1:
            shown, rest = found, []
        end = f": {detail}" if detail else ""
        for name, count in shown:
            yield what, f"{what:<11}{name}{_counted(count)}{end}"
        if rest:
            count = sum(n for _, n in rest)
            yield what, f"{what:<11}and {count} more of {entries[0].part or 'the tree'}{end}"


def _counted(count: int) -> str:
    return "" if count == 1 else f", {count} leaves"


def _uniform(entries: list[Entry], depth: int) -> Iterator[tuple[tuple[str, str], str, int]]:
    """The largest subtrees whose leaves all went the same way."""
    first = entries[0]
    if len({(x.what, x.detail) for x in entries}) == 1:
        keys = first.keys if len(entries) == 1 else first.keys[:depth]
        name = Entry("", first.part, keys).name or "the tree"
        yield (first.what, first.detail), name, len(entries)
        return
    children: dict[str | None, list[Entry]] = {}
    for x in entries:
        children.setdefault(x.keys[depth] if depth < len(x.keys) else None, []).append(x)
    for key, own in children.items():
        if key is None:
            yield from (((x.what, x.detail), x.name, 1) for x in own)
        else:
            yield from _uniform(own, depth + 1)
