"""Whole train steps, compiled for one device: `python -m benchmarks.accelerators.backward`.

The peak of a step in bytes per parameter: weights, state and what lives beside them. Once as it is
usually written, gradient and then update, and once with `jgrad.step_in_backward`. `train_steps` has
the model and the recipes.

Ten minutes on two cores. `--only` picks rows by "target model recipe", `--write` writes the table
of `benchmarks/notes/accelerators.md`.
"""

import pathlib
from typing import NamedTuple

import jax
from absl import app, flags, logging

from benchmarks import markdown
from benchmarks.accelerators import targets
from benchmarks.accelerators.program import Program, on_one_device
from benchmarks.accelerators.targets import TARGETS
from benchmarks.accelerators.train_steps import (
    FORMS,
    MODELS,
    RECIPES,
    TOKENS,
    WIDTH,
    shapes,
    step_of,
)

PAGE = pathlib.Path(__file__).parents[1] / "notes" / "accelerators.md"


class Row(NamedTuple):
    """What is compiled, in each form.

    Attributes:
      target: of `TARGETS`.
      model: of `MODELS`.
      recipe: of `RECIPES`.
    """

    target: str
    model: str
    recipe: str


class Peak(NamedTuple):
    """Bytes per parameter.

    Attributes:
      arguments: weights, state and a batch.
      temporaries: what lives beside them.
    """

    arguments: float
    temporaries: float

    @property
    def total(self) -> float:
        """At the peak of a step; results take the place of arguments."""
        return self.arguments + self.temporaries


def program(target: str, model: str, recipe: str, form: str) -> Program:
    """A train step, compiled."""
    made = RECIPES[recipe]
    params = shapes(model, made.dtype)
    state = jax.eval_shape(made.make().init, params)
    batch = jax.ShapeDtypeStruct((TOKENS, WIDTH), made.dtype)
    args = on_one_device(TARGETS[target], (params, state, batch, batch))
    return Program(TARGETS[target], step_of(made, form), args, donate=(0, 1))


def peak(target: str, model: str, recipe: str, form: str) -> Peak:
    """What a train step takes."""
    counts = program(target, model, recipe, form).counts
    size = sum(x.size for x in jax.tree.leaves(shapes(model, RECIPES[recipe].dtype)))
    return Peak(counts.arguments / size, counts.temporaries / size)


def table(found: dict[Row, list[Peak]]) -> str:
    """In Markdown, a row for each recipe; a cell has the peak of each form."""
    programs = list(dict.fromkeys((x.target, x.model) for x in found))
    columns = ["recipe", *(f"{TARGETS[target].title}, {model}" for target, model in programs)]
    rows = []
    for recipe in dict.fromkeys(x.recipe for x in found):
        cells = [found.get(Row(*program, recipe), []) for program in programs]
        rows.append([recipe, *(" → ".join(f"{x.total:.2f}" for x in peaks) for peaks in cells)])
    return markdown.table(columns, rows)


def page(text: str, found: dict[Row, list[Peak]]) -> str:
    """A page with this table in place of the one that it has."""
    return markdown.replaced(text, "peaks", table(found))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    found: dict[Row, list[Peak]] = {}
    for target in ("v5e", "h100"):
        if reason := targets.missing(TARGETS[target]):
            print(reason)
            continue
        for model in MODELS:
            for name, recipe in RECIPES.items():
                row = Row(target, model, name)
                if flags.FLAGS.only not in " ".join(row):
                    continue
                jax.clear_caches()
                forms = FORMS[:1] if recipe.of_optax else FORMS
                found[row] = [peak(*row, form) for form in forms]
                print(*row, *(f"{x.total:.2f}" for x in found[row]), flush=True)
    if flags.FLAGS.write:
        PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":  # tests import this file beside `decoder`, whose flags have these names
    flags.DEFINE_string("only", "", "Rows whose name holds this.")
    flags.DEFINE_bool("write", False, "Write the table.")
    app.run(main)
