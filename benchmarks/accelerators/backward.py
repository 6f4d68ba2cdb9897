"""Whole train steps, compiled for one device: `python -m benchmarks.accelerators.backward`.

The peak of a step in bytes per parameter: weights, state and what lives beside them. Once as it is
usually written, gradient and then update, and once with `jgrad.step_in_backward`. The model has 16
layers of two matrices of 1024 x 4096, with or without attention, and a batch that is small beside
the weights.

Ten minutes on two cores. `--only` picks rows by "target model recipe", `--write` writes the table
of `docs/four_bytes.md`.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging

import jgrad
from benchmarks.accelerators import targets
from benchmarks.accelerators.program import Program, on_one_device
from benchmarks.accelerators.targets import TARGETS

_ONLY = flags.DEFINE_string("only", "", "Rows whose name holds this.")
_WRITE = flags.DEFINE_bool("write", False, "Write the table.")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "four_bytes.md"

LAYERS, WIDTH, HIDDEN, TOKENS, HEAD = 16, 1024, 4096, 64, 64
LAYER_AXES = {"embed": None, "layers": 0, "head": None}
MODELS = ("layers", "attention")
FORMS = ("gradient, then update", "in the backward pass")


class Recipe(NamedTuple):
    """An optimizer.

    Attributes:
      make: makes it.
      dtype: of the weights.
      first_pass: whether it needs a number of all gradients.
      of_optax: whether it is optax's, for the usual form alone.
    """

    make: Callable[[], optax.GradientTransformation]
    dtype: Any = jnp.float32
    first_pass: bool = False
    of_optax: bool = False


def _adamw(**options: Any) -> optax.GradientTransformation:
    return jgrad.adam(1e-3, weight_decay=0.1, **options)


def _clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return jgrad.skip_nonfinite(optax.chain(jgrad.clip_by_global_norm(1.0), tx))


def _muon() -> optax.GradientTransformation:
    matrices = jgrad.hidden_matrices(layer_axes=LAYER_AXES)
    return jgrad.muon(
        0.02, matrices=matrices, layer_axes=LAYER_AXES, weight_decay=0.1, adam_learning_rate=1e-3
    )


_BF16: Any = jnp.bfloat16
RECIPES = {
    "AdamW of optax": Recipe(lambda: optax.adamw(1e-3, weight_decay=0.1), of_optax=True),
    "AdamW": Recipe(_adamw),
    "skip(clip + AdamW)": Recipe(lambda: _clipped(_adamw()), first_pass=True),
    "AdamW, 8 bits": Recipe(lambda: _adamw(moment_dtype="8bit")),
    "bf16: AdamW, 8 bits": Recipe(lambda: _adamw(moment_dtype="8bit"), _BF16),
    "bf16: stochastic(AdamW, 8 bits)": Recipe(
        lambda: jgrad.stochastic_rounding(_adamw(moment_dtype="8bit")), _BF16
    ),
    "bf16: skip(clip + stochastic(AdamW, 8 bits))": Recipe(
        lambda: _clipped(jgrad.stochastic_rounding(_adamw(moment_dtype="8bit"))),
        _BF16,
        first_pass=True,
    ),
    "bf16: stochastic(momentum in bfloat16)": Recipe(
        lambda: jgrad.stochastic_rounding(
            jgrad.gradient_descent(1e-3, momentum=0.9, moment_dtype=jnp.bfloat16)
        ),
        _BF16,
    ),
    "Muon": Recipe(_muon),
    "bf16: stochastic(Muon)": Recipe(lambda: jgrad.stochastic_rounding(_muon()), _BF16),
}


def shapes(model: str, dtype: Any) -> dict[str, Any]:
    """Of all leaves."""
    layers = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    if model == "attention":
        layers |= {"qkv": (LAYERS, WIDTH, 3 * WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
    leaves = {"embed": (WIDTH, WIDTH), "layers": layers, "head": (WIDTH, WIDTH)}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        leaves,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    parts = jnp.split((x @ layer["qkv"]).reshape(TOKENS, -1, HEAD), 3, axis=1)
    return jax.nn.dot_product_attention(*parts, is_causal=True).reshape(x.shape) @ layer["out"]


def block(layer: Any, x: jax.Array) -> jax.Array:
    """A layer of the model."""
    if "qkv" in layer:
        x = x + _attention(layer, x)
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """As a user writes it."""
    x = jgrad.scan_layers(block, params["layers"], jnp.tanh(x @ params["embed"]))
    return jnp.mean(((x @ params["head"]) - y).astype(jnp.float32) ** 2)


def step_of(recipe: Recipe, form: str) -> Callable[..., Any]:
    """(params, state, x, y) -> (params, state, value)."""
    tx = recipe.make()
    if form == FORMS[1]:
        return jgrad.step_in_backward(tx, loss, first_pass=recipe.first_pass)

    def step(params: Any, state: Any, *args: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *args)
        return *jgrad.apply_gradients(tx, grads, state, params), value

    return step


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


_START, _END = "<!-- peaks: start -->", "<!-- peaks: end -->"


def table(found: dict[tuple[str, str, str], list[Peak | None]]) -> str:
    """In Markdown, a row for each recipe."""
    lines = [["compiled for", "model", "recipe", *FORMS], ["---"] * 5]
    for (target, model, recipe), peaks in found.items():
        cells = ["-" if x is None else f"{x.total:.2f}" for x in peaks]
        lines.append([TARGETS[target].title, model, recipe, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # compilers are asked, no device
    logging.set_verbosity(logging.WARNING)
    found: dict[tuple[str, str, str], list[Peak | None]] = {}
    for target in ("v5e", "h100"):
        if reason := targets.missing(TARGETS[target]):
            print(reason)
            continue
        for model in MODELS:
            for name, recipe in RECIPES.items():
                row = target, model, name
                if _ONLY.value not in " ".join(row):
                    continue
                jax.clear_caches()
                forms = FORMS[:1] if recipe.of_optax else FORMS
                found[row] = [peak(*row, form) for form in forms]
                print(*row, *(f"{x.total:.2f}" for x in found[row] if x), flush=True)
                found[row] += [None] * (len(FORMS) - len(forms))
    if _WRITE.value:
        before, rest = PAGE.read_text().split(_START)
        PAGE.write_text(f"{before}{_START}\n\n{table(found)}\n\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    app.run(main)
