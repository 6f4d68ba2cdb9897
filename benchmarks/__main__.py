"""Prints the table: `python -m benchmarks`.

About eight minutes on two cores. `--rounds` trades time for steadiness, `--only` picks rows, and
`--results=benchmarks/results.md` writes the table that the README quotes.
"""

import functools
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import rich
from absl import app, flags, logging
from rich.progress import track
from rich.table import Table

import jgrad
from benchmarks.measure import Ratio, Step, in_turn
from benchmarks.workloads import METHODS, WORKLOADS, Shapes, many_leaves, tree

_ROUNDS = flags.DEFINE_integer("rounds", 21, "Steps timed of each.", lower_bound=2)
_BUILDS = flags.DEFINE_integer(
    "builds", 3, "Times that each is traced and compiled.", lower_bound=1
)
_ONLY = flags.DEFINE_string("only", "", "Rows whose name holds this.")
_RESULTS = flags.DEFINE_string("results", "", "Where to write the table; nowhere if empty.")

_COLUMNS = ("work", "method", "step", "quartiles", "ms", "trace", "compile", "MB")

Row = tuple[str, ...]


def compare(shapes: Shapes, method: str) -> Row:
    """The figures of one method on one model."""
    params, grads = tree(shapes, 0), tree(shapes, 1)
    pair = METHODS[method]

    def build(make: Callable[[], optax.GradientTransformation]) -> Step:
        return Step(make(), jax.tree.map(jnp.copy, params), grads)

    built = [(build(pair.jgrad), build(pair.optax)) for _ in range(_BUILDS.value)]
    ours, theirs = built[-1]
    trace = Ratio.of([a.trace for a, _ in built], [b.trace for _, b in built])
    compiling = Ratio.of([a.compile for a, _ in built], [b.compile for _, b in built])
    del built
    for step in (ours, theirs, ours, theirs):
        jax.block_until_ready(step())
    stepping = in_turn(ours, theirs, _ROUNDS.value)
    megabytes = " / ".join(f"{step.temporary_bytes / 1e6:.0f}" for step in (ours, theirs))
    return (*shown(stepping), f"{trace.ratio:.2f}", f"{compiling.ratio:.2f}", megabytes)


def eager() -> Row:
    """`adam_update` without jit on 100 leaves, beside optax's update and apply_updates."""
    shapes = many_leaves(100)
    w, g = tree(shapes, 0), tree(shapes, 1)
    zeros = jax.tree.map(jnp.zeros_like, w)
    tx = optax.adam(1e-3)
    state = tx.init(w)

    def theirs() -> object:
        updates, new = tx.update(g, state, w)
        return optax.apply_updates(w, updates), new

    ours = functools.partial(jgrad.adam_update, w, g, 1e-3, zeros, zeros, 1)
    in_turn(ours, theirs, 3)
    return (*shown(in_turn(ours, theirs, 5 * _ROUNDS.value)), "", "", "")


def shown(ratio: Ratio) -> Row:
    """The ratio, its quartiles, and the two times in milliseconds."""
    times = f"{1e3 * ratio.ours:.3g} / {1e3 * ratio.theirs:.3g}"
    return (f"{ratio.ratio:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}", times)


def rows() -> dict[tuple[str, str], Callable[[], Row]]:
    """Each row by its work and method."""
    found: dict[tuple[str, str], Callable[[], Row]] = {
        (work, method): functools.partial(compare, shapes, method)
        for work, shapes in WORKLOADS.items()
        for method in METHODS
    }
    found["eager call, 100 leaves", "Adam"] = eager
    return {name: row for name, row in found.items() if _ONLY.value in " ".join(name)}


def markdown(table: list[Row]) -> str:
    """The table with where it came from."""
    lines = [
        "# jgrad beside optax",
        "",
        "`python -m benchmarks` wrote this. Ratios are jgrad / optax, measured in turn in one",
        "process: below 1 jgrad is the quicker. A step is update and apply, compiled, with donated",
        "parameters and state, in float32: the median of the ratios, their quartiles, and both",
        "medians in ms. MB are temporaries of the compiled step, of both.",
        "",
        f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind} with "
        f"{os.cpu_count()} cores, {_ROUNDS.value} rounds, {_BUILDS.value} builds.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "| " + " | ".join("---" for _ in _COLUMNS) + " |",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of each accelerator that is not there
    todo = rows()
    if not todo:
        raise app.UsageError(f"--only={_ONLY.value}: no such row")
    found = [(*name, *row()) for name, row in track(todo.items(), "Measuring")]
    table = Table(*_COLUMNS, title="jgrad / optax")
    for line in found:
        table.add_row(*line)
    rich.print(table)
    if _RESULTS.value:
        pathlib.Path(_RESULTS.value).write_text(markdown(found))
        rich.print(f"Written to {_RESULTS.value}")


if __name__ == "__main__":
    app.run(main)
