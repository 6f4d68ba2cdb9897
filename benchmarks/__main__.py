"""Prints the tables: `python -m benchmarks`.

About 30 minutes on two cores that have nothing else to do. `--rounds` trades time for steadiness,
`--only` picks rows, and `--results=benchmarks/results.md` writes what the README quotes, with plots
beside it.
"""

import collections
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from absl import app, flags, logging
from rich.console import Console
from rich.progress import Progress

from benchmarks import (
    muon,
    plots,
    pytorch,
    recipes,
    report,
    scaling,
    state_bytes,
    training,
    updates,
)
from benchmarks.methods import METHODS
from benchmarks.report import Section
from benchmarks.workloads import WORKLOADS

_ROUNDS = flags.DEFINE_integer("rounds", 21, "Times that each takes its turn.", lower_bound=2)
_BUILDS = flags.DEFINE_integer(
    "builds", 3, "Times that each is traced and compiled.", lower_bound=1
)
_ONLY = flags.DEFINE_string("only", "", "Rows whose name holds this.")
_RESULTS = flags.DEFINE_string("results", "", "Where to write the tables; nowhere if empty.")


class Job(NamedTuple):
    """Some rows of a section.

    Attributes:
      section: one of `_SECTIONS`.
      name: shown meanwhile, and what `--only` is looked for in.
      run: measures them.
    """

    section: str
    name: str
    run: Callable[[], list[Any]]


class Kind(NamedTuple):
    """Of a section: what makes it of results, and what plots them to a file."""

    make: Callable[[list[Any]], Section]
    plot: Callable[[list[Any], pathlib.Path], None] | None = None


_SECTIONS = {
    "steps": Kind(report.steps, plots.steps),
    "leaves": Kind(report.by_leaves, plots.by_leaves),
    "elements": Kind(report.by_elements, plots.by_elements),
    "recipes": Kind(report.recipes),
    "growth": Kind(report.growth, plots.growth),
    "memory": Kind(report.memory),
    "muon": Kind(report.muon),
    "muon on devices": Kind(report.muon_traffic),
}


def jobs() -> Iterator[Job]:
    """All that there is to measure."""
    rounds, builds = _ROUNDS.value, _BUILDS.value
    for name, work in WORKLOADS.items():
        for method in METHODS:
            compare = functools.partial(
                updates.compare,
                name,
                method,
                work.shapes,
                work.forms(method),
                rounds=rounds,
                builds=min(builds, work.builds),
            )
            yield Job("steps", f"{name} {method}", compare)
    for method in training.TIMED:
        train = functools.partial(training.compare, method, rounds=rounds, builds=builds)
        yield Job("steps", f"{training.WORK} {method}", train)
    yield Job("steps", f"{updates.EAGER} Adam", functools.partial(updates.eager, rounds=rounds))
    for name, point in scaling.LEAVES.items():
        yield Job("leaves", name, functools.partial(point, rounds=rounds))
    for name, point in scaling.ELEMENTS.items():
        yield Job("elements", name, functools.partial(point, rounds=rounds))
    for name in recipes.RECIPES:
        compare = functools.partial(recipes.compare, name, rounds=rounds, builds=builds)
        yield Job("recipes", f"recipes: {name}", compare)
    for name in recipes.GROWING:
        yield Job("growth", f"growth: {name}", functools.partial(recipes.growth, name))
    for work in state_bytes.WORKS:
        for name in state_bytes.RECIPES:
            compare = functools.partial(
                state_bytes.compare, work, name, rounds=rounds, builds=builds
            )
            yield Job("memory", f"{work} {name}", compare)
    for name in muon.WORKS:
        compare = functools.partial(muon.compare, name, rounds=rounds, builds=builds)
        yield Job("muon", f"muon: {name}", compare)
    yield Job("muon on devices", "muon: collectives", muon.traffic)


def measured(todo: list[Job]) -> dict[str, list[Any]]:
    """The results of each section."""
    found: dict[str, list[Any]] = collections.defaultdict(list)
    with Progress() as progress:
        bar = progress.add_task("", total=len(todo))
        for job in todo:
            progress.update(bar, description=job.name)
            found[job.section] += job.run()
            progress.advance(bar)
    return found


def write(found: dict[str, list[Any]], path: pathlib.Path) -> None:
    """The tables as Markdown, and their plots beside it."""
    text = f"# jgrad beside others\n\n`python -m benchmarks` wrote this. {_circumstances()}\n"
    for name, results in found.items():
        kind, image = _SECTIONS[name], ""
        if kind.plot:
            image = f"{path.stem}_{name}.png"
            kind.plot(results, path.with_name(image))
        text += "\n" + kind.make(results).markdown(image)
    path.write_text(text)


def _circumstances() -> str:
    return (
        f"jax {jax.__version__}, optax {optax.__version__}, {pytorch.version()}; "
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores; "
        f"{_ROUNDS.value} rounds, {_BUILDS.value} builds."
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of each accelerator that is not there
    todo = [job for job in jobs() if _ONLY.value in job.name]
    if not todo:
        raise app.UsageError(f"--only={_ONLY.value}: no such row")
    found = measured(todo)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(_circumstances())
    for name, results in found.items():
        console.print(_SECTIONS[name].make(results).rich())
    if _RESULTS.value:
        write(found, pathlib.Path(_RESULTS.value))
        console.print(f"Written to {_RESULTS.value}")


if __name__ == "__main__":
    app.run(main)
