"""Which of LightBench's problems each method solves, in float32, in 8 bits and in bfloat16.

    python -m studies.lightbench --out benchmarks/notes/lightbench.md

20 problems at two difficulties, 16 columns, 16 settings and 3 seeds. About twenty minutes on one
core of a CPU.
"""

import pathlib
import time

import jax
from absl import app, flags

from studies.lightbench import search, table
from studies.lightbench.problems import LEVELS, PROBLEMS
from studies.lightbench.search import COLUMNS
from studies.lightbench.table import Cell, Row

_STEPS = flags.DEFINE_integer("steps", 400, "Steps of a training.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds, of which 2 have to win.", lower_bound=2)
_SETTINGS = flags.DEFINE_integer("settings", 16, "Settings of the search.", lower_bound=1)
_PROBLEMS = flags.DEFINE_multi_enum("problem", list(PROBLEMS), list(PROBLEMS), "What to solve.")
_OUT = flags.DEFINE_string("out", None, "A file of Markdown to write; else it is printed.")


def row(name: str, level: str, *, steps: int, seeds: int, settings: int) -> Row:
    """Each column on one problem."""
    problem = PROBLEMS[name](level)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    found = {}
    for column in COLUMNS:
        won = search.wins(problem, column, search.settings(settings), steps=steps, seeds=seeds)
        applies = search.applies(column, params)
        found[column] = Cell(search.passes(won), applies, int(won.sum()))
    return found


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    begun, rows = time.perf_counter(), {}
    sizes = {"steps": _STEPS.value, "seeds": _SEEDS.value, "settings": _SETTINGS.value}
    names = list(dict.fromkeys(_PROBLEMS.value))
    for name in names:
        for level in LEVELS:
            rows[name, level] = row(name, level, **sizes)
            print(name, level, *rows[name, level].values(), flush=True)
    text = table.TEXT.format(
        minutes=(time.perf_counter() - begun) / 60,
        count=len(names),
        limit=search.EIGHT_BITS,
        passes=table.passes(rows),
        beside=table.beside(rows),
        problems=table.problems(names),
        **sizes,
    )
    if _OUT.value is None:
        print(text)
    else:
        pathlib.Path(_OUT.value).write_text(text)


if __name__ == "__main__":
    app.run(main)
