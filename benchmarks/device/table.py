"""What was measured on a device, as a table."""

from collections.abc import Sequence

from benchmarks.device.rows import TRAIN, WORKS, Measured, Row
from benchmarks.report import Section

_NOTE = """\
A step is update and apply, compiled, with donated parameters and state; a train step is gradient
and update. A row and its peer run in one process, in turn, ten steps without waiting in between.

- *ms*: median times, of the row and of its peer; *step*: median of the ratios of neighbouring
  times; *quartiles*: theirs.
- *least*: bytes per parameter that a step must move, each argument and each result once, and what
  is needed again behind a norm twice; *moved*: what the compiled program moves; *of copy*: least
  over the time of a step, as a share of what a copy moves meanwhile; where the peer has the same
  recipe, its share, too.
- *kernels*: launched by a step.
- *peak*: bytes per parameter that the device held at most, when the row ran alone in its process;
  *counted*: by the compiler, of arguments, temporaries, and results that take no argument's place.
"""


def section(rows: Sequence[Row], found: dict[str, Measured | str]) -> Section:
    """All rows as a table; of those that were not measured, the reasons."""
    columns = ["recipe", "form", "peer", "ms", "step", "quartiles"]
    columns += ["least", "moved", "of copy", "kernels", "peak", "counted"]
    note = _NOTE
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        x = found[row.name]
        if isinstance(x, str):
            note += f"- **{row.name}** was not measured: {x}\n"
            cells = ["-"] * (len(columns) - 3)
        else:
            cells = _cells(row, x)
        tables.setdefault(WORKS[row.work], []).append((row.recipe, row.form, row.beside, *cells))
    return Section("Steps, timed", note.rstrip(), columns, tables)


def _cells(row: Row, x: Measured) -> list[str]:
    """Behind the names of a row."""
    times = [f"{1e3 * x.step.ours:.3g}", "-", "-"]
    if row.peer:
        times[0] += f" / {1e3 * x.step.theirs:.3g}"
        times[1:] = f"{x.step.ratio:.2f}", f"{x.step.low:.2f} to {x.step.high:.2f}"
    is_update = row.work != TRAIN
    share = f"{x.share:.0%}"
    if row.peer and row.peer[0] == row.recipe:  # both move as much at least
        share += f" / {x.share * x.step.ratio:.0%}"
    return [
        *times,
        f"{x.least / x.size:.1f}" if is_update else "-",
        f"{x.moved / x.size:.1f}",
        share if is_update else "-",
        f"{x.kernels}",
        f"{x.peak / x.size:.2f}" if x.peak is not None else "-",
        f"{x.counted / x.size:.2f}",
    ]
