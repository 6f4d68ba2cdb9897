"""The largest decoder that fits one device: `python -m benchmarks.accelerators.largest`.

A train step on one sequence of 2048 tokens, whose layers are computed once more in the backward
pass, of decoders with the widths and layers of published models. For each optimizer it is compiled
for larger and larger ones, until one does not fit. Nothing runs.

An hour on two cores. `--only` picks rows by "target recipe", `--write` keeps what was found in
`largest.json` and writes the table of `docs/four_bytes.md`.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

import jgrad
from benchmarks import markdown
from benchmarks.accelerators import llama, targets
from benchmarks.accelerators.llama import FAMILY
from benchmarks.accelerators.program import Program, on_one_device
from benchmarks.accelerators.targets import TARGETS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "four_bytes.md"
RESULTS = pathlib.Path(__file__).with_name("largest.json")

TOKENS = 2048


class Recipe(NamedTuple):
    """An optimizer.

    Attributes:
      make: makes it.
      dtype: of weights and gradients.
      guess: bytes per parameter, where the search begins.
      in_backward: whether the step is taken in the backward pass.
    """

    make: Callable[[], optax.GradientTransformation]
    dtype: Any
    guess: float
    in_backward: bool = False


def _adamw(**options: Any) -> optax.GradientTransformation:
    return jgrad.adam(1e-4, weight_decay=0.1, **options)


def _eight_bits() -> optax.GradientTransformation:
    return jgrad.stochastic_rounding(_adamw(moment_dtype="8bit"))


def _adafactor() -> optax.GradientTransformation:
    return jgrad.stochastic_rounding(jgrad.adafactor(1e-2, layer_axes=llama.LAYER_AXES))


def _of_optax() -> optax.GradientTransformation:
    return optax.adamw(1e-4, weight_decay=0.1)


_BF16: Any = jnp.bfloat16
RECIPES = {
    "optax AdamW, float32": Recipe(_of_optax, jnp.float32, 17.0),
    "optax AdamW, bfloat16": Recipe(_of_optax, _BF16, 8.5),
    "AdamW, float32, in the backward pass": Recipe(_adamw, jnp.float32, 13.5, True),
    "AdamW in 8 bits, bfloat16": Recipe(_eight_bits, _BF16, 6.5),
    "AdamW in 8 bits, bfloat16, in the backward pass": Recipe(_eight_bits, _BF16, 4.5, True),
    "Adafactor, bfloat16, in the backward pass": Recipe(_adafactor, _BF16, 2.6, True),
}
MACHINES = ("v5e", "h100", "v5p")


class Result(NamedTuple):
    """Of a compiled step.

    Attributes:
      target: one of `TARGETS`.
      recipe: one of `RECIPES`.
      model: one of `FAMILY`.
      peak: bytes; None where the compiler says that it is too large.
    """

    target: str
    recipe: str
    model: str
    peak: int | None

    @property
    def fits(self) -> bool:
        """Into the memory of the device."""
        return self.peak is not None and self.peak <= TARGETS[self.target].memory


def compiled(target: str, recipe: str, name: str) -> Result:
    """A train step."""
    made, model = RECIPES[recipe], FAMILY[name]
    tx = made.make()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return llama.loss(model, params, tokens)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return *jgrad.apply_gradients(tx, grads, state, params), value

    if made.in_backward:
        step = jgrad.step_in_backward(tx, loss)
    params = llama.shapes(model, made.dtype)
    args = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    jax.clear_caches()
    try:
        on_device = on_one_device(TARGETS[target], args)
        counts = Program(TARGETS[target], step, on_device, donate=(0, 1)).counts
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Result(target, recipe, name, None)
    return Result(target, recipe, name, counts.arguments + counts.temporaries)


def largest(target: str, recipe: str, compile_step: Callable[..., Result] = compiled) -> Result:
    """That which fits where the next one of the family does not."""
    names = sorted(FAMILY, key=lambda name: llama.size(FAMILY[name]))
    limit = TARGETS[target].memory / RECIPES[recipe].guess
    k = max(sum(llama.size(FAMILY[name]) <= limit for name in names) - 1, 0)
    found = compile_step(target, recipe, names[k])
    while found.fits and k + 1 < len(names):
        after = compile_step(target, recipe, names[k + 1])
        if not after.fits:
            return found
        found, k = after, k + 1
    while not found.fits and k > 0:
        k -= 1
        found = compile_step(target, recipe, names[k])
    return found


def known() -> dict[tuple[str, str], Result]:
    """What was found before."""
    found = [Result(**x) for x in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    return {(x.target, x.recipe): x for x in found}


def table(found: dict[tuple[str, str], Result]) -> str:
    """In Markdown, a row for each recipe: parameters, and bytes for each of them."""
    machines = [x for x in MACHINES if any(target == x for target, _ in found)]
    columns = ["optimizer", *(f"{TARGETS[x].title}, {_memory(x)}" for x in machines)]
    return markdown.table(
        columns,
        [[name, *(_cell(found.get((x, name))) for x in machines)] for name in RECIPES],
    )


def _memory(target: str) -> str:
    return f"{TARGETS[target].memory / 1e9:.0f} GB"


def _cell(found: Result | None) -> str:
    if found is None or not found.fits or found.peak is None:
        return "-"
    size = llama.size(FAMILY[found.model])
    return f"{size / 1e9:.1f} B: {found.model} ({found.peak / size:.2f})"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    found = {}
    for target in MACHINES:
        if reason := targets.missing(TARGETS[target]):
            print(reason)
            continue
        for recipe in RECIPES:
            if flags.FLAGS.only in f"{target} {recipe}":
                found[target, recipe] = largest(target, recipe)
                print(f"{target} {recipe}: {_cell(found[target, recipe])}", flush=True)
                if flags.FLAGS.write:
                    rows = [x._asdict() for x in (known() | found).values()]
                    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nCompiled, not run.\n\n{table(found)}")
    if flags.FLAGS.write:
        PAGE.write_text(markdown.replaced(PAGE.read_text(), "largest", table(known())))


if __name__ == "__main__":  # tests import this file beside others, whose flags have these names
    flags.DEFINE_string("only", "", "Rows whose name holds this.")
    flags.DEFINE_bool("write", False, "Keep the results, and write the table.")
    app.run(main)
