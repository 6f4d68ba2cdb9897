"""Losses of a small language model by several methods, for the plot of docs/methods.md.

    python -m studies.loss_curves --write

trains the transformer of `colabs/language_model.ipynb` for 200 steps with each method, by the
learning rate that was the best of four there, on one seed. `--write` keeps the losses in
`loss_curves.json`, from which `python -m benchmarks.drawings` makes the plot. Needs the extra
"demo". Two minutes on two cores.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jgrad
import language_model
import recipes
import text

_WRITE = flags.DEFINE_bool("write", False, "Keep the losses.")
RESULTS = pathlib.Path(__file__).with_suffix(".json")
STEPS, MEASURED, WINDOWS, LENGTH, SEED = 200, 20, 16, 64, 1
# By a name: optimizer and recipe of `colabs/recipes.py`, and the learning rate.
METHODS = {
    "AdamW": ("adamw", "float32", 0.024),
    "AdamW, bfloat16, 8 bits": ("adamw", "8bit_bf16_stochastic", 0.024),
    "LAMB": ("lamb", "float32", 0.03),
    "Muon": ("muon", "float32", 0.03),
}


def loss(params: Any, codes: jax.Array) -> jax.Array:
    """In float32, so that recipes differ in what is stored; in bits per byte."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return language_model.loss(wide, codes) / np.float32(np.log(2))


def train(name: str, split: Any) -> list[float]:
    """Losses on validation texts, at equal distances, the first before training."""
    optimizer, recipe, rate = METHODS[name]
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, STEPS // 10, STEPS)
    tx = recipes.transformation(optimizer, recipe, schedule, clip=1.0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, codes: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jgrad.grad(loss)(params, codes), state, params)
        return optax.apply_updates(params, updates), state

    measure = jax.jit(loss)
    validation = split.validation.spread(256, LENGTH + 1)
    params = language_model.init(jax.random.key(SEED))
    params = jax.tree.map(lambda x: x.astype(recipes.RECIPES[recipe].dtype), params)
    state, found = tx.init(params), [float(measure(params, validation))]
    for i in range(STEPS):
        codes = split.training.batch(i, seed=SEED, windows=WINDOWS, length=LENGTH + 1)
        params, state = step(params, state, codes)
        if (i + 1) % (STEPS // MEASURED) == 0:
            found.append(float(measure(params, validation)))
    return found


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    split, found = text.load(), {}
    for name in METHODS:
        found[name] = [round(x, 3) for x in train(name, split)]
        print(f"{name}: {found[name][-1]:.3f} bits per byte after {STEPS} steps", flush=True)
    if _WRITE.value:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
