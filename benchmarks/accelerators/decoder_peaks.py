"""Train steps of decoders in flax, compiled: `python -m benchmarks.accelerators.decoder_peaks`.

The peak of a step in bytes per parameter, gradient and then update beside
`jgrad.step_in_backward`, for one device. `flax_decoders` has the models. Nothing runs.

Half an hour on two cores. `--only` picks rows by "target case", `--write` keeps what was found in
`decoder_peaks.json`, writes the table of `benchmarks/notes/peaks.md`, and draws the picture of
`docs/four_bytes.md`: `--only=none --write` compiles nothing, and does the rest.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from benchmarks import markdown
from benchmarks.accelerators import bars, flax_decoders, targets, train_steps
from benchmarks.accelerators.flax_decoders import LENGTH, Model
from benchmarks.accelerators.targets import TARGETS
from benchmarks.accelerators.train_steps import ALL, FORMS, LAYERS_TOO, ON_HOST, RECIPES, Recipe

PAGE = pathlib.Path(__file__).parents[1] / "notes" / "peaks.md"
RESULTS = pathlib.Path(__file__).with_name("decoder_peaks.json")
PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "pictures" / "decoder_peaks.svg"

MACHINES = ("v5e", "h100")


class Case(NamedTuple):
    """A row of the table.

    Attributes:
      recipe: an optimizer.
      model: of a dtype.
      sequences: in a batch.
    """

    recipe: Recipe
    model: Callable[[Any], Model] = flax_decoders.linen
    sequences: int = 1


def _tied(dtype: Any) -> Model:
    return flax_decoders.linen(dtype, head="")


def _in_slices(dtype: Any) -> Model:
    return flax_decoders.linen(dtype, head="in slices")


_OF_OPTAX = RECIPES["AdamW of optax"]
_EIGHT_BITS = RECIPES["bf16: stochastic(AdamW, 8 bits)"]
_CLIPPED = RECIPES["bf16: skip(clip + stochastic(AdamW, 8 bits))"]
CASES = {
    "AdamW of optax, float32 weights": Case(_OF_OPTAX),
    "AdamW of optax, bfloat16 weights": Case(_OF_OPTAX._replace(dtype=jnp.bfloat16)),
    "AdamW, float32 weights": Case(RECIPES["AdamW"]),
    "AdamW in 8 bits": Case(_EIGHT_BITS),
    "AdamW in 8 bits, nnx": Case(_EIGHT_BITS, flax_decoders.in_nnx),
    "AdamW in 8 bits, clipped and skipped": Case(_CLIPPED),
    "AdamW in 8 bits, tied embeddings": Case(_EIGHT_BITS, _tied),
    "AdamW in 8 bits, head in slices": Case(_EIGHT_BITS, _in_slices),
    "AdamW in 8 bits, 8 sequences": Case(_EIGHT_BITS, sequences=8),
    "AdamW in 8 bits, 8 sequences, head in slices": Case(_EIGHT_BITS, _in_slices, 8),
    "AdamW, moments in host memory": Case(ON_HOST),
    "AdamW, moments in host memory, head in slices": Case(ON_HOST, _in_slices),
    "AdamW, moments and layers in host memory": Case(ON_HOST._replace(on_host=LAYERS_TOO)),
    "AdamW, moments and all weights in host memory": Case(ON_HOST._replace(on_host=ALL)),
}

# By "target case": bytes per parameter of each form; None where gradients alone do not fit.
Peaks = dict[str, list[float | None]]


def peak(target: str, case: Case, form: str) -> float:
    """Bytes per parameter on the device: weights, state, a batch, and what lives beside them."""
    recipe, model = case.recipe, case.model(case.recipe.dtype)
    tokens = jax.ShapeDtypeStruct((case.sequences, LENGTH + 1), jnp.int32)  # inputs and targets
    args = model.loss, model.params, tokens
    counts = train_steps.compiled(TARGETS[target], recipe, form, *args).counts
    size = sum(x.size for x in jax.tree.leaves(model.params))
    return (counts.arguments + counts.temporaries) / size


def known() -> Peaks:
    """What was found before."""
    found: Peaks = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def table(found: Peaks) -> str:
    """In Markdown, a row for each case; a cell has the peak of each form."""

    def cell(row: str) -> str:
        return " → ".join("—" if x is None else f"{x:.2f}" for x in found.get(row, ())) or "—"

    rows = [[name, *(cell(f"{key} {name}") for key in MACHINES)] for name in CASES]
    return markdown.table(["step", *(TARGETS[key].title for key in MACHINES)], rows)


# What the picture shows: a case, and which of its peaks. Weights of a dtype stand together.
PICTURED = {
    "optax, float32": ("AdamW of optax, float32 weights", 0),
    "jgrad, float32, in the backward pass": ("AdamW, float32 weights", 1),
    "optax, bfloat16": ("AdamW of optax, bfloat16 weights", 0),
    "jgrad, bfloat16, 8 bits": ("AdamW in 8 bits", 0),
    "jgrad, bfloat16, 8 bits, in the backward pass": ("AdamW in 8 bits", 1),
}


def picture(found: Peaks) -> str:
    """As SVG."""
    rows = {
        name: [found[f"{key} {case}"][form] for key in MACHINES]
        for name, (case, form) in PICTURED.items()
    }
    title = "Peak of a train step with AdamW, bytes per parameter"
    return bars.svg(title, [TARGETS[key].title for key in MACHINES], rows)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    found: Peaks = {}
    for key in MACHINES:
        if reason := targets.missing(TARGETS[key]):
            print(reason)
            continue
        for name, case in CASES.items():
            row = f"{key} {name}"
            if flags.FLAGS.only not in row:
                continue
            if case.recipe.on_host and not TARGETS[key].has_host:
                continue
            forms = FORMS[:1] if case.recipe.of_optax else FORMS
            beyond = case.recipe.on_host in (LAYERS_TOO, ALL)  # of what the other form can hold
            found[row] = [
                None if beyond and form == FORMS[0] else round(peak(key, case, form), 3)
                for form in forms
            ]
            print(row, *found[row], flush=True)
            if flags.FLAGS.write:
                RESULTS.write_text(json.dumps(known() | found, indent=1) + "\n")
    print(f"\nCompiled, not run.\n\n{table(found)}")
    if flags.FLAGS.write:
        PAGE.write_text(markdown.replaced(PAGE.read_text(), "decoders", table(known())))
        PICTURE.write_text(picture(known()))


if __name__ == "__main__":  # tests import this file beside others, whose flags have these names
    flags.DEFINE_string("only", "", "Rows whose name holds this.")
    flags.DEFINE_bool("write", False, "Keep the results, and write the table.")
    app.run(main)
