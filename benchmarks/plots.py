"""Results as plots, saved as images."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measure import Ratio
from benchmarks.results import Result

Ratios = dict[tuple[str, str], Ratio]  # by method and form

_STYLES: dict[str, dict[str, Any]] = {
    form: {"color": color, "marker": marker, "markersize": 4}
    for form, color, marker in (
        ("optax", "black", "s"),
        ("tree", "tab:blue", "o"),
        ("packed", "tab:orange", "D"),
        ("small packed", "tab:green", "^"),
        ("torch foreach", "tab:purple", "<"),
        ("torch fused", "tab:red", ">"),
        ("eager", "tab:brown", "P"),
    )
}


def steps(results: Sequence[Result], path: pathlib.Path) -> None:
    """The ratios of the times of a step with their quartiles, a panel for each model."""
    ratios: dict[str, Ratios] = {}
    for x in results:
        if x.form != "optax" and x.step:
            ratios.setdefault(x.work, {})[x.method, x.form] = x.step
    heights = [len({method for method, _ in own}) for own in ratios.values()]
    figure = Figure((8, 1 + 0.6 * len(heights) + 0.4 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (work, own) in zip(panels, ratios.items(), strict=True):
        _ratios(panel, own)
        panel.set_title(work)
    panels[-1].xaxis.set_major_formatter("{x:g}")
    panels[-1].set_xlabel("time of a step / optax's on the tree (less is quicker)")
    marks: dict[str, Any] = {}
    for panel in panels:
        marks.update(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(list(marks.values()), list(marks), loc="outside upper center", ncols=len(marks))
    figure.savefig(path, dpi=120)


def _ratios(panel: Axes, ratios: Ratios) -> None:
    """A row for each method, and in it each form below the one before."""
    methods = list(dict.fromkeys(method for method, _ in ratios))
    forms = list(dict.fromkeys(form for _, form in ratios))
    for (method, form), x in ratios.items():
        row = methods.index(method) + 0.7 * ((forms.index(form) + 0.5) / len(forms) - 0.5)
        spread = [[x.ratio - x.low], [x.high - x.ratio]]
        panel.errorbar(x.ratio, row, xerr=spread, label=form, **_STYLES[form])
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set(xscale="log", yticks=range(len(methods)), yticklabels=methods)
    panel.set_ylim(len(methods) - 0.5, -0.5)
    panel.grid(axis="x", which="both", alpha=0.3)


def by_leaves(results: Sequence[Result], path: pathlib.Path) -> None:
    """Times against the number of leaves."""
    _scaling(results, "leaves", path)


def by_elements(results: Sequence[Result], path: pathlib.Path) -> None:
    """Times against the number of elements."""
    _scaling(results, "elements", path)


def growth(results: Sequence[Result], path: pathlib.Path) -> None:
    """Seconds of building against the number of leaves: ours in full lines, optax's in dashes."""
    figure = Figure((8, 5), layout="constrained")
    panel = figure.subplots()
    for i, name in enumerate(dict.fromkeys(x.method for x in results)):
        for form, style in (("tree", "-"), ("optax", "--")):
            own = [x for x in results if x.method == name and x.form == form]
            label = name if form == "tree" else None
            seconds = [x.ours.build for x in own]
            panel.loglog([x.leaves for x in own], seconds, f"C{i}{style}", label=label)
    panel.set(xlabel="leaves", ylabel="s", title="tracing and compiling a step (dashed: optax)")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _scaling(results: Sequence[Result], against: str, path: pathlib.Path) -> None:
    """Times of a step and of building it, against an attribute of the results."""
    figure = Figure((9, 3.8), layout="constrained")
    step, build = figure.subplots(1, 2)
    for form in dict.fromkeys(x.form for x in results):
        own = [x for x in results if x.form == form]
        numbers = [getattr(x, against) for x in own]
        step.loglog(numbers, [1e3 * x.ours.step for x in own], label=form, **_STYLES[form])
        build.loglog(numbers, [x.ours.build for x in own], **_STYLES[form])
    step.set(xlabel=against, ylabel="ms", title="a step of Adam")
    build.set(xlabel=against, ylabel="s", title="tracing and compiling it")
    for panel in (step, build):
        panel.grid(alpha=0.3)
    step.legend()
    figure.savefig(path, dpi=120)
