"""The page of the study: its text, the table of passes, each form beside float32, the problems."""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import markdown
from studies.lightbench.problems import LEVELS, PROBLEMS
from studies.lightbench.search import COLUMNS, Column

TEXT = """# Problems of LightBench

Made by `python -m studies.lightbench`, on one core of a CPU, in {minutes:.0f} minutes.

**This is not LightBench.** {count} of the 51 problems of lightbench 0.1.1 were written anew in JAX
from their definitions, at two of its six difficulties, in float32. Sizes and win conditions were
scaled, as the last table says. Its sampler is not used either: upstream learns from up to 1000
trials of 100,000 steps. Here {settings} settings are drawn once, the same for each column and each
problem, and each is run for {steps} steps from {seeds} seeds: the learning rate from 1e-4 to 10,
1 - beta1 from 0.01 to 1, 1 - beta2 from 0.001 to 1. Rates are constant. So the totals cannot be
compared with upstream's, only with each other. After trial runs, a win condition or a difficulty
was eased where `adam` failed in all three forms, and made harder where everything passed.

- **A pass, `x`**: at one of the settings, at least 2 seeds win before one of the steps. Else `-`.
- **In parentheses**: the column's rule has no leaf to act on. `muon` and `hyperball` are Adam where
  no leaf is a matrix. Moments in 8 bits are float32 where no leaf has {limit} elements.
- **8**: `moment_dtype="8bit"`.
- **bf16**: bfloat16 weights with `stochastic_rounding`, moments in float32.
- `schedule_free` is around Adam without a first moment. What may win is the average.
- `hyperball` keeps the norm of a matrix, so it cannot reach an optimum of another norm.
- Some win conditions are finer than bfloat16: `quadratic_varying_target` asks for 1e-4 beside
  targets of up to 0.43 (easy), where bfloat16 numbers are 2e-3 apart. The average of
  `schedule_free` is float32.
- `constrained_optimization_relu` begins at 4096 equal elements. In float32 they stay equal. Rounded
  stochastically each goes its own way, and all of them have to be near at the same step.
- A search of {settings} settings is coarse: a pass at one setting may be lost by a small change.
  The second table counts the trainings that won, too.

## Passes

{passes}

## 8 bits and bfloat16 beside float32

*rows* are those where the form applies. *passes lost* and *gained* are the rows that differ from
float32 in the same method. *won* are the trainings of these rows that won, of {settings} x {seeds}
each.

{beside}

## Problems

The equation, the file upstream, and what was changed.

{problems}
"""


class Cell(NamedTuple):
    """What a column came to in a row.

    Attributes:
      passed: whether it did.
      applies: whether its rule had a leaf to act on.
      won: trainings that won, of all settings and seeds.
    """

    passed: bool
    applies: bool
    won: int

    def __str__(self) -> str:
        mark = "x" if self.passed else "-"
        return mark if self.applies else f"({mark})"


Row = dict[Column, Cell]
Rows = dict[tuple[str, str], Row]


def title(column: Column) -> str:
    """The head of a column."""
    short = {"float32": "", "8 bits": " 8", "bfloat16": " bf16"}[column.form]
    return f"{column.method}{short}"


def passes(rows: Rows) -> str:
    """The table of passes, with totals."""
    body = [[name, level, *map(str, cells.values())] for (name, level), cells in rows.items()]
    for chosen in (*([level] for level in LEVELS), LEVELS):
        own = [found for (_, level), found in rows.items() if level in chosen]
        counts = [str(sum(found[column].passed for found in own)) for column in COLUMNS]
        body.append([f"passes of {len(own)}", " and ".join(chosen), *counts])
    return markdown.table(["problem", "level", *map(title, COLUMNS)], body)


def beside(rows: Rows) -> str:
    """Each form beside float32: the rows that differ, and the trainings that won."""

    def body() -> Iterator[list[str]]:
        for exact, *forms in (COLUMNS[i : i + 3] for i in range(0, len(COLUMNS) - 1, 3)):
            for form in forms:
                own = {at: found for at, found in rows.items() if found[form].applies}
                names: dict[bool, list[str]] = {False: [], True: []}
                for at, found in own.items():
                    if found[form].passed != found[exact].passed:
                        names[found[form].passed].append(" ".join(at))
                cells = [", ".join(names[passed]) or "none" for passed in (False, True)]
                won = [str(sum(x[column].won for x in own.values())) for column in (exact, form)]
                yield [title(form), str(len(own)), *cells, *won]

    head = ["column", "rows", "passes lost", "passes gained", "won in float32", "won"]
    return markdown.table(head, list(body()))


def problems(names: list[str]) -> str:
    """What each problem is."""
    body = []
    for name in names:
        equation, _, file = (inspect.getdoc(PROBLEMS[name]) or "").rpartition("; ")
        changed = "; ".join(dict.fromkeys(PROBLEMS[name](level).changed for level in LEVELS))
        body.append([f"`{equation.replace('|', chr(92) + '|')}`", file, changed])
    return markdown.table(["equation", "file", "changed"], body)
