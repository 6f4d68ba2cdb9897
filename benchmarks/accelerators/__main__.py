"""Prints what steps cost, compiled for TPU and GPU: `python -m benchmarks.accelerators`.

About an hour on two cores. `--only` picks recipes, `--targets` machines, `--models` sizes, and
`--write` writes `benchmarks/accelerators/results.md`.
"""

import collections
import pathlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import jax
import optax
from absl import app, flags, logging
from rich.console import Console
from rich.progress import Progress

from benchmarks.accelerators import program, sharded, targets
from benchmarks.accelerators.program import Counts
from benchmarks.accelerators.recipes import MODELS, RECIPES, Known, Recipe
from benchmarks.accelerators.sharded import ARRANGEMENTS, TOPOLOGIES
from benchmarks.accelerators.targets import TARGETS
from benchmarks.report import Section

_TARGETS = flags.DEFINE_list("targets", ["v5e", "h100"], f"Some of {', '.join(TARGETS)}.")
_MODELS = flags.DEFINE_list("models", list(MODELS), f"Some of {', '.join(MODELS)}.")
_TOPOLOGIES = flags.DEFINE_list("topologies", ["v5e:4x4"], f"Some of {', '.join(TOPOLOGIES)}.")
_ONLY = flags.DEFINE_string("only", "", "Recipes whose name holds this.")
_WRITE = flags.DEFINE_bool("write", False, "Write the tables to results.md.")

RESULTS = pathlib.Path(__file__).with_name("results.md")

# What grows with the number of leaves alone: kernels, and seconds of building.
_OF_MANY = ("AdamW", "clip + AdamW", "skip(clip + AdamW)", "LAMB", "bf16: stochastic(AdamW)")

_STEP_NOTE = """\
A step is update and apply, compiled with donated parameters and state. Nothing ran: these are
counts, and no times but those of building. Of two figures the first is ours, the second optax's.

- Bytes per parameter. *bytes*: read from HBM and written to it; *rare*: what a branch adds that is
  hardly ever taken; *copied*: of the bytes, those with which nothing is computed; *temporaries*:
  beside arguments and results.
- *kernels*: launched by a step; *build*: seconds of tracing, lowering and compiling."""

_SHARDED_NOTE = """\
A step under `jit` of a transformer with eight layers of width 2048, whose leaves are sharded. Bytes
are of a device, for each parameter of its share. Of two figures the first is ours, the second
optax's. *collectives*: those of rare branches too."""


class Job(NamedTuple):
    """A row.

    Attributes:
      section: "step" or "sharded".
      table: what it is about.
      name: of the recipe, shown meanwhile.
      run: makes its cells.
    """

    section: str
    table: str
    name: str
    run: Callable[[], list[tuple[str, ...]]]


def jobs(console: Console) -> Iterator[Job]:
    """All rows that this machine can compile; says which it cannot."""
    recipes = {name: x for name, x in RECIPES.items() if _ONLY.value in name}
    for key in _TARGETS.value:
        target = TARGETS[key]
        if reason := targets.missing(target):
            console.print(reason, markup=False)
            continue
        for model in _MODELS.value:
            for name, recipe in recipes.items():
                is_of = model in recipe.models or (model == "many" and name in _OF_MANY)
                if is_of and (recipe.on_tpu or target.platform != "tpu"):
                    table = f"Compiled for {target.title}: {MODELS[model].title}"
                    yield Job("step", table, name, _of_step(name, recipe, key, model))
    for topology in _TOPOLOGIES.value:
        target = TARGETS[topology.partition(":")[0]]
        if reason := targets.missing(target, topology):
            console.print(reason, markup=False)
            continue
        for arrangement in ARRANGEMENTS.values():
            table = f"Compiled for {topology}, {TOPOLOGIES[topology]} chips: {arrangement.title}"
            for name, recipe in recipes.items():
                if recipe.on_tpu:
                    yield Job(
                        "sharded", table, name, _of_sharded(name, recipe, arrangement, topology)
                    )


def _of_step(name: str, recipe: Recipe, key: str, model: str) -> Callable[[], Any]:
    def run() -> list[tuple[str, ...]]:
        work, target = MODELS[model], TARGETS[key]

        def counts(tx: optax.GradientTransformation, packed: bool, options: Any) -> Counts:
            jax.clear_caches()  # what another has traced before is no help in building
            params = work.params(recipe.dtype, packed=packed)
            return program.step_counts(target, tx, params, **options)

        theirs = counts(recipe.optaxs(), False, {}) if recipe.optaxs else None
        ours = {
            "tree": lambda: counts(recipe.ours(Known(work.layer_axes)), False, recipe.options),
            "packed": lambda: counts(recipe.ours(Known()), True, recipe.options),
        }
        return [(name, form, *_cells(ours[form](), theirs, work.size)) for form in recipe.forms]

    return run


def _cells(ours: Counts, theirs: Counts | None, size: int) -> tuple[str, ...]:
    """Of a table of steps, those behind the recipe and its form."""
    return (
        _pair(lambda x: f"{x.bytes / size:.1f}", ours, theirs),
        _pair(lambda x: f"{x.rare / size:.1f}", ours, theirs),
        _pair(lambda x: f"{x.copied / size:.1f}", ours, theirs),
        _pair(lambda x: f"{x.temporaries / size:.2f}", ours, theirs),
        _pair(lambda x: f"{x.kernels}", ours, theirs),
        _pair(lambda x: f"{x.seconds:.2g}", ours, theirs),
    )


def _of_sharded(name: str, recipe: Recipe, arrangement: Any, topology: str) -> Callable[[], Any]:
    def run() -> list[tuple[str, ...]]:
        ours, share = sharded.counts(recipe, arrangement, topology, form="tree")
        theirs = None
        if recipe.optaxs:
            theirs, _ = sharded.counts(recipe, arrangement, topology, form="optax")
        cells = (
            _pair(lambda x: f"{x.bytes / share:.1f}", ours, theirs),
            _pair(lambda x: f"{x.temporaries / share:.2f}", ours, theirs),
            _pair(_collectives, ours, theirs),
        )
        return [(name, *cells)]

    return run


def _collectives(counts: Counts) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.collectives.items()) or "none"


def _pair(words: Callable[[Counts], str], ours: Counts, theirs: Counts | None) -> str:
    return " / ".join(words(x) for x in (ours, theirs) if x)


def sections(rows: dict[str, dict[str, list[tuple[str, ...]]]]) -> list[Section]:
    """Of rows by section and table."""
    step = ["recipe", "form", "bytes", "rare", "copied", "temporaries", "kernels", "build"]
    found = {
        "step": ("A step on one device", _STEP_NOTE, step),
        "sharded": (
            "A step on many devices",
            _SHARDED_NOTE,
            ["recipe", "bytes", "temporaries", "collectives"],
        ),
    }
    return [Section(*found[name], tables) for name, tables in rows.items()]


def circumstances() -> str:
    """Versions of the compilers."""
    names = ("jax", "optax", "libtpu", "jax-cuda12-plugin")
    found = {x.metadata["Name"]: x.version for x in metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for flag, known in ((_TARGETS, TARGETS), (_MODELS, MODELS), (_TOPOLOGIES, TOPOLOGIES)):
        if unknown := set(flag.value) - set(known):
            raise app.UsageError(f"--{flag.name}: {sorted(unknown)}, expected {', '.join(known)}")
    if not any(_ONLY.value in name for name in RECIPES):
        raise app.UsageError(f"--only={_ONLY.value}: no such recipe")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    todo = list(jobs(console))
    if not todo:
        return  # it was said which compilers are missing
    rows: dict[str, dict[str, list[tuple[str, ...]]]] = collections.defaultdict(dict)
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for job in todo:
            progress.update(bar, description=f"{job.name}: {job.table}")
            rows[job.section].setdefault(job.table, []).extend(job.run())
            progress.advance(bar)
    console.print(circumstances())
    for section in sections(rows):
        console.print(section.rich())
    if _WRITE.value:
        text = (
            "# Compiled for TPU and GPU\n\n`python -m benchmarks.accelerators --write` wrote this. "
        )
        text += f"{circumstances()}.\n"
        RESULTS.write_text(text + "".join(f"\n{x.markdown('')}" for x in sections(rows)))
        console.print(f"Written to {RESULTS}")


if __name__ == "__main__":
    app.run(main)
