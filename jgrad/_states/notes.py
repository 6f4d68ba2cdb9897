"""What an account says beside its lines: what the new optimizer makes of the state."""

from collections.abc import Sequence

from jgrad._states import account, parts, units
from jgrad._states.account import Entry, Source
from jgrad._states.parts import Part

_BIAS = (
    "{names}: zero beside a step that is kept, which schedules and bias correction count: Adam's "
    "first 100 steps there are up to 6.6 times too long (betas 0.9, 0.999). Warm up their rate, or "
    "set `step` to 0."
)
_NO_STEP = "step: not in `old`, so schedules and bias correction begin anew."
_WEIGHTED = (
    "accumulate: sums of weighted gradients in `old`, of others in `like`: the window begins anew."
)

_FIRST, _SECOND = ((parts.MOMENTS, field) for field in (parts.MW, parts.VW))


def of(
    old: Sequence[Part],
    like: Sequence[Part],
    sources: Sequence[Source | None],
    *,
    is_new_window: bool,
) -> list[str]:
    """The notes on a new state.

    Args:
      old: the parts of the old state.
      like: the parts of the new one.
      sources: of its leaves, None for None.
      is_new_window: whether one of weighted gradients begins anew.
    """
    pairs = [(x, s) for x, s in zip(like, sources, strict=True) if s is not None]
    first = {x.keys for x in like if x.role == _FIRST and x.leaf is not None}
    steps = [s for x, s in pairs if x.is_step]
    carried = any(x.is_moment and s.old is not None for x, s in pairs)
    new = [
        x
        for x, s in pairs
        if x.role == _SECOND and s.what in (account.ZERO, account.RESET) and x.keys in first
    ]
    found = []
    if new and any(x.old is not None for x in steps):
        names = Entry("", new[0].shown, new[0].keys).name
        found.append(_BIAS.format(names=names if len(new) == 1 else f"vw of {len(new)} leaves"))
    if is_new_window:
        found.append(_WEIGHTED)
    if carried and any(x.old is None for x in steps):
        found.append(_NO_STEP)
    became = [
        (old[s.old].unit, x.unit, s.how) for x, s in pairs if x.role == _FIRST and s.old is not None
    ]
    return [*found, *units.notes(became)]
