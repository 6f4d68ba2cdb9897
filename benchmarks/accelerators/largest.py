"""The largest decoder that fits one device: `python -m benchmarks.accelerators.largest`.

A train step on one sequence of 2048 tokens, whose layers are computed once more in the backward
pass, of decoders with the widths and layers of published models. For each optimizer it is compiled
for larger and larger ones, until one does not fit. Nothing runs. Where weights and state are in
host memory, the inputs of layers are, too.

Two hours on two cores. `--only` picks rows by "target recipe", `--write` keeps what was found in
`largest.json` and writes the table of `benchmarks/notes/peaks.md`.
"""

import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

import jgrad
from benchmarks import markdown
from benchmarks.accelerators import llama, targets, train_steps
from benchmarks.accelerators.llama import FAMILY, INPUTS_ON_HOST
from benchmarks.accelerators.targets import TARGETS
from benchmarks.accelerators.train_steps import ALL, FORMS, RECIPES, STATE, Recipe

PAGE = pathlib.Path(__file__).parents[1] / "notes" / "peaks.md"
RESULTS = pathlib.Path(__file__).with_name("largest.json")

TOKENS = 2048


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      recipe: an optimizer.
      form: of the step, one of `FORMS`.
      guess: bytes per parameter, where the search begins.
    """

    recipe: Recipe
    form: str
    guess: float


def _adafactor() -> optax.GradientTransformation:
    return jgrad.stochastic_rounding(jgrad.adafactor(1e-2, layer_axes=llama.LAYER_AXES))


def _on_host(moments: Any, what: str, guess: float) -> Row:
    return Row(train_steps.on_host(moments, what), _IN_BACKWARD, guess)


_OF_OPTAX = RECIPES["AdamW of optax"]
_EIGHT_BITS = RECIPES["bf16: stochastic(AdamW, 8 bits)"]
_USUAL, _IN_BACKWARD = FORMS
ROWS = {
    "optax AdamW, float32": Row(_OF_OPTAX, _USUAL, 17.0),
    "optax AdamW, bfloat16": Row(_OF_OPTAX._replace(dtype=jnp.bfloat16), _USUAL, 8.5),
    "AdamW, float32, in the backward pass": Row(RECIPES["AdamW"], _IN_BACKWARD, 13.5),
    "AdamW in 8 bits, bfloat16": Row(_EIGHT_BITS, _USUAL, 6.5),
    "AdamW in 8 bits, bfloat16, in the backward pass": Row(_EIGHT_BITS, _IN_BACKWARD, 4.5),
    "AdamW, float32 moments in host memory, bfloat16, in the backward pass": _on_host(
        None, STATE, 2.5
    ),
    "AdamW, bfloat16, all in host memory, float32 moments, in the backward pass": _on_host(
        None, ALL, 0.4
    ),
    "AdamW, bfloat16, all in host memory, bfloat16 moments, in the backward pass": _on_host(
        jnp.bfloat16, ALL, 0.2
    ),
    "AdamW, bfloat16, all in host memory, 8-bit moments, in the backward pass": _on_host(
        "8bit", ALL, 0.2
    ),
    "Adafactor, bfloat16, in the backward pass": Row(
        Recipe(_adafactor, jnp.bfloat16), _IN_BACKWARD, 2.6
    ),
}
MACHINES = ("v5e", "h100", "v5p")


class Result(NamedTuple):
    """Of a compiled step.

    Attributes:
      target: one of `TARGETS`.
      recipe: one of `ROWS`.
      model: one of `FAMILY`.
      peak: bytes; None where the compiler says that it is too large.
      host: bytes of arguments in host memory.
      seconds: that compiling took; None where nobody wrote it down.
    """

    target: str
    recipe: str
    model: str
    peak: int | None
    host: int = 0
    seconds: int | None = None

    @property
    def fits(self) -> bool:
        """Into the memory of the device."""
        return self.peak is not None and self.peak <= TARGETS[self.target].memory


def compiled(target: str, row: str, name: str, sequences: int = 1, remat: Any = None) -> Result:
    """A train step; None as `remat` has the inputs of layers on the host where weights are."""
    (recipe, form, _), model = ROWS[row], FAMILY[name]
    params = llama.shapes(model, recipe.dtype)
    tokens = jax.ShapeDtypeStruct((sequences, TOKENS), jnp.int32)
    if remat is None:
        remat = INPUTS_ON_HOST if recipe.on_host == ALL else True
    loss = functools.partial(llama.loss, model, remat=remat)
    try:
        counts = train_steps.compiled(TARGETS[target], recipe, form, loss, params, tokens).counts
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Result(target, row, name, None)
    peak = counts.arguments + counts.temporaries
    return Result(target, row, name, peak, counts.host, round(counts.seconds))


def largest(target: str, row: str) -> Result:
    """That which fits where the next one of the family does not."""
    names = sorted(FAMILY, key=lambda name: llama.size(FAMILY[name]))
    limit = TARGETS[target].memory / ROWS[row].guess
    k = max(sum(llama.size(FAMILY[name]) <= limit for name in names) - 1, 0)
    found = compiled(target, row, names[k])
    while found.fits and k + 1 < len(names):
        after = compiled(target, row, names[k + 1])
        if not after.fits:
            return found
        found, k = after, k + 1
    while not found.fits and k > 0:
        k -= 1
        found = compiled(target, row, names[k])
    return found


def with_and_without(name: str, sequences: int) -> None:
    """Prints the peak of a batch on a v5e, with inputs of layers on the host and on the device."""
    row = next(x for x in ROWS if "all in host memory, bfloat16" in x)
    for where, remat in (("host", INPUTS_ON_HOST), ("device", True)):
        peak = compiled("v5e", row, name, sequences, remat).peak
        shown = "too large to compile" if peak is None else f"{peak / 1e9:.1f} GB"
        print(f"{name}, {sequences} x {TOKENS} tokens, inputs on the {where}: {shown}", flush=True)


def known() -> dict[tuple[str, str], Result]:
    """What was found before."""
    found = [Result(**x) for x in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    return {(x.target, x.recipe): x for x in found}


def table(found: dict[tuple[str, str], Result]) -> str:
    """In Markdown, a row for each recipe: parameters, and bytes for each of them.

    Behind these, what is in host memory.
    """
    machines = [x for x in MACHINES if any(target == x for target, _ in found)]
    columns = ["optimizer", *(f"{TARGETS[x].title}, {_memory(x)}" for x in machines)]
    return markdown.table(
        columns,
        [
            [name, *(_cell(found.get((x, name))) for x in machines)]
            for name in ROWS
            if any((x, name) in found for x in machines)  # it was compiled
        ],
    )


def _memory(target: str) -> str:
    return f"{TARGETS[target].memory / 1e9:.0f} GB"


def _cell(found: Result | None) -> str:
    if found is None or not found.fits or found.peak is None:
        return "-"
    size = llama.size(FAMILY[found.model])
    on_host = f", {found.host / 1e9:.0f} GB on the host" if found.host else ""
    return f"{size / 1e9:.1f} B: {found.model} ({found.peak / size:.2f}){on_host}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    if flags.FLAGS.model:
        with_and_without(flags.FLAGS.model, flags.FLAGS.sequences)
        return
    found = {}
    for target in MACHINES:
        if reason := targets.missing(TARGETS[target]):
            print(reason)
            continue
        for recipe, row in ROWS.items():
            if row.recipe.on_host and not TARGETS[target].has_host:
                continue
            if flags.FLAGS.only in f"{target} {recipe}":
                found[target, recipe] = largest(target, recipe)
                result = found[target, recipe]
                print(f"{target} {recipe}: {_cell(result)}; {result.seconds} s", flush=True)
                if flags.FLAGS.write:
                    rows = [x._asdict() for x in (known() | found).values()]
                    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nCompiled, not run.\n\n{table(found)}")
    if flags.FLAGS.write:
        PAGE.write_text(markdown.replaced(PAGE.read_text(), "largest", table(known())))


if __name__ == "__main__":  # tests import this file beside others, whose flags have these names
    flags.DEFINE_string("only", "", "Rows whose name holds this.")
    flags.DEFINE_bool("write", False, "Keep the results, and write the table.")
    flags.DEFINE_enum("model", "", ["", *FAMILY], "Instead, one with inputs on host and device.")
    flags.DEFINE_integer("sequences", 8, "Of the batch, with `--model`.")
    app.run(main)
