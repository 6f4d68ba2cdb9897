"""Results as tables, for the terminal and for the documentation."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.markdown import Markdown
from rich.table import Table

from benchmarks import markdown, muon as muon_benchmark
from benchmarks.measure import Ratio
from benchmarks.results import Figures, Result
from benchmarks.state_bytes import Held


class Section(NamedTuple):
    """Tables with the same columns.

    Attributes:
      title: what they show.
      note: what the columns are, in Markdown.
      columns: their names.
      tables: rows with as many entries each, by what a table is about.
    """

    title: str
    note: str
    columns: Sequence[str]
    tables: dict[str, list[tuple[str, ...]]]

    def rich(self) -> Group:
        """For the terminal."""
        tables: list[Table | str] = []
        for about, rows in self.tables.items():
            table = Table(*self.columns, title=about, title_justify="left")
            for row in rows:
                table.add_row(*row)
            tables += [table, ""]
        return Group(Markdown(f"## {self.title}\n\n{self.note}"), "", *tables)

    def markdown(self, plot: str) -> str:
        """For the documentation, with the name of a plot or nothing."""
        parts = [f"## {self.title}", self.note]
        parts += [f"![{self.title}]({plot})"] if plot else []
        for about, rows in self.tables.items():
            parts += [f"### {about}"] if about else []
            parts += [markdown.table(self.columns, rows)]
        return "\n\n".join(parts) + "\n"


_STEPS_NOTE = """\
Ratios are to optax on the tree, measured in turn in one process: below 1 is quicker. Of two
figures the first is that of the row, the second that of optax.

- A step is update and apply, compiled, with donated parameters and state, in float32; a train step
  is forward and backward too. *step*: median of the ratios of neighbouring times; *quartiles*:
  theirs; *ms*: median times.
- *trace*: ratio of the times of tracing and lowering; *compile*: of compiling; *build*: of the sum
  of both, and its seconds.
- *bytes*: read and written, as XLA counts them, over what a step must move (momentum 20, Adam 28,
  LARS 28, LAMB 40 bytes per parameter). XLA counts a branch that is hardly ever taken, as LARS and
  LAMB have on the tree, and the body of a loop once: a program with a loop has "-".
- *copies*: temporaries of a step, as copies of the parameters.
- *torch*: PyTorch's optimizers, eager, with a thread for each core. Where the machine has other
  things to do, its times grow many times over.
- On 4000 leaves LARS and LAMB are timed packed alone: on the tree they take minutes to compile."""


def steps(results: Sequence[Result]) -> Section:
    """Each form beside optax."""
    columns = ["method", "form", "step", "quartiles", "ms"]
    columns += ["trace", "compile", "build", "bytes", "copies"]
    tables: dict[str, list[tuple[str, ...]]] = {}
    for x in results:
        if x.form != "optax":
            rows = tables.setdefault(x.work, [])
            rows.append((x.method, x.form, *_times(x), *_program(x)))
    return Section("Steps beside optax", _STEPS_NOTE, columns, tables)


def _times(x: Result) -> tuple[str, ...]:
    ratio = x.step
    quartiles = f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio else "-"
    return _ratio(ratio), quartiles, _pair(x, ".3g", lambda figures: 1e3 * figures.step)


def _program(x: Result) -> tuple[str, ...]:
    if not x.ours.builds:  # nothing of it is compiled
        return ("",) * 5
    trace, compiling, build = (
        _ratio(x.optax and Ratio.of(of(x.ours), of(x.optax)))
        for of in (lambda y: y.traces, lambda y: y.compiles, lambda y: y.builds)
    )
    seconds = _pair(x, ".2g", lambda figures: figures.build)
    return (
        trace,
        compiling,
        f"{build} ({seconds} s)",
        _pair(x, ".2f", lambda figures: _over(figures.bytes_accessed, x.floor)) if x.floor else "",
        _pair(x, ".2f", lambda figures: _over(figures.temporary_bytes, 4 * x.elements)),
    )


def _ratio(ratio: Ratio | None) -> str:
    return f"{ratio.ratio:.2f}" if ratio else "-"


def _over(number: float | None, by: float | None) -> float | None:
    return None if number is None or by is None else number / by


def _pair(x: Result, form: str, of: Callable[[Figures], float | None]) -> str:
    found = (figures and of(figures) for figures in (x.ours, x.optax))
    return " / ".join("-" if y is None else f"{y:{form}}" for y in found)


_SCALING_NOTE = """\
Adam; each form is measured in turn, and built once. Milliseconds of a step, and seconds of tracing
and compiling it."""


def by_leaves(results: Sequence[Result]) -> Section:
    """From one leaf to thousands."""
    return _scaling("Against the number of leaves", "a million elements", results)


def by_elements(results: Sequence[Result]) -> Section:
    """From small leaves to large ones."""
    return _scaling("Against the number of elements", "a hundred leaves", results)


def _scaling(title: str, about: str, results: Sequence[Result]) -> Section:
    """A row for each model."""
    forms = list(dict.fromkeys(x.form for x in results))
    columns = [f"{form}, {unit}" for unit in ("ms", "s") for form in forms]
    rows = []
    for work in dict.fromkeys(x.work for x in results):
        own = [x for x in results if x.work == work]
        step = (f"{1e3 * x.ours.step:.3g}" for x in own)
        build = (f"{x.ours.build:.2g}" for x in own)
        rows.append((f"{own[0].leaves:,}", f"{own[0].elements:,}", *step, *build))
    return Section(title, _SCALING_NOTE, ["leaves", "elements", *columns], {about: rows})


_RECIPES_NOTE = """\
Each beside the nearest in optax, measured in turn. *bytes*: read and written per parameter, as XLA
counts them (the body of a loop once); *temporaries*: bytes per parameter. Of two figures the first
is that of the row, the second optax's."""


def recipes(results: Sequence[Result]) -> Section:
    """What people run."""
    columns = ["recipe", "form", "bytes", "temporaries", "step", "quartiles", "ms", "build"]
    tables: dict[str, list[tuple[str, ...]]] = {}
    for x in results:
        if x.form == "optax":
            continue
        build = _ratio(x.optax and Ratio.of(x.ours.builds, x.optax.builds))
        row = (
            _pair(x, ".3g", lambda y, n=x.elements: _over(y.counted_bytes, n)),
            _pair(x, ".2f", lambda y, n=x.elements: _over(y.temporary_bytes, n)),
            *_times(x),
            f"{build} ({_pair(x, '.2g', lambda y: y.build)} s)",
        )
        tables.setdefault(x.work, []).append((x.method, x.form, *row))
    return Section("Recipes", _RECIPES_NOTE, columns, tables)


_GROWTH_NOTE = """\
Seconds of tracing and compiling one step, on leaves of 16 x 24: jgrad's and optax's."""


def growth(results: Sequence[Result]) -> Section:
    """How building grows with the leaves."""
    counts = list(dict.fromkeys(x.leaves for x in results))
    rows = []
    for name in dict.fromkeys(x.method for x in results):
        own = [x for x in results if x.method == name and x.form == "tree"]
        rows.append((name, *(_pair(x, ".2g", lambda y: y.build) for x in own)))
    columns = ["recipe", *(f"{count} leaves" for count in counts)]
    return Section("Building against the number of leaves", _GROWTH_NOTE, columns, {"": rows})


_MEMORY_NOTE = """\
Each beside jgrad's AdamW with float32 parameters and moments in the same form, measured in turn.

- Bytes per parameter. *state*: between steps, of the transformation alone; *temporaries*: of a
  step; *peak*: parameters, gradients, state, temporaries, and outputs that are written in the place
  of none of them, as XLA counts them.
- A step is update and apply, compiled, with donated parameters and state. *step*: median of the
  ratios of neighbouring times to float32 AdamW; *quartiles*: theirs; *ms*: median time.
- *trace*: ratio of the times of tracing and lowering to those of the same recipe in float32;
  *build*: with compiling, and its seconds. The peer of bfloat16 parameters is float32 AdamW."""


def memory(results: Sequence[Held]) -> Section:
    """State in few bits."""
    columns = ["recipe", "form", "state", "temporaries", "peak"]
    columns += ["step", "quartiles", "ms", "trace", "build"]
    tables: dict[str, list[tuple[str, ...]]] = {}
    for x in results:
        temporaries = x.ours.temporary_bytes or 0
        row = (
            *(f"{b / x.elements:.2f}" for b in (x.state_bytes, temporaries, x.peak_bytes)),
            f"{x.step.ratio:.2f}",
            f"{x.step.low:.2f} to {x.step.high:.2f}",
            f"{1e3 * x.step.ours:.3g}",
            f"{x.trace.ratio:.2f}",
            f"{x.build.ratio:.2f} ({x.build.ours:.2g} s)",
        )
        tables.setdefault(x.work, []).append((x.recipe, x.form, *row))
    return Section("Memory", _MEMORY_NOTE, columns, tables)


_MUON_NOTE = """\
Ours over `optax.contrib.muon`, with parameters and state donated: *step*, and *build*, tracing and
compiling; *ms*: our median. *temporaries*: beside arguments and results, in copies of the
parameters, ours and optax's; ours needs a stack of the matrices, the results once more, and a
chunk."""


def muon(results: Sequence[muon_benchmark.Result]) -> Section:
    """Matrices of one shape."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for x in results:
        used = f"{x.temporaries:.1f}, {x.theirs:.1f}"
        times = f"{x.step.ratio:.2f}", f"{x.build.ratio:.2g}", f"{1e3 * x.step.ours:.3g}"
        tables.setdefault(x.work, []).append(("Muon", "tree", *times, used))
    columns = ["method", "form", "step", "build", "ms", "temporaries"]
    return Section("Muon", _MUON_NOTE, columns, tables)


_TRAFFIC_NOTE = """\
Eight matrices on eight devices under `jit`, compiled and not run: collectives of one update,
`muon(shard_over="data")` and `optax.contrib.muon`. Those of optax are in its iterations."""


def muon_traffic(results: Sequence[muon_benchmark.Traffic]) -> Section:
    """Collectives of sharded matrices."""

    def shown(kinds: dict[str, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"

    rows = [(x.placed, shown(x.ours), shown(x.theirs)) for x in results]
    return Section("Muon on devices", _TRAFFIC_NOTE, ["matrices", "jgrad", "optax"], {"": rows})
