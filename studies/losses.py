"""What low precision of weights and moments does to the loss, beside float32.

    python -m studies.losses

trains by AdamW, for several seeds, a perceptron on the handwritten digits and a byte-level
transformer on Python's own sources. A seed decides the first weights and the order of the data, and
all recipes share both. Prints a table for each task: the relative difference of a recipe's last
test and training loss from float32's, over the pairs of equal seeds: the mean with its standard
error, and the least and the greatest. Training losses are means over the last tenth of the steps.

All recipes start from bfloat16 numbers. bfloat16 weights are widened to float32 for the loss, so
that nothing but what is stored differs; their gradient is bfloat16. Parameters are packed, so that
small leaves have moments in 8 bits, too. The recipe "float32, moved" says how much of a difference
is chance: its first weights differ by a millionth. "float32, rate + 1%" says how much steps matter
that are as much longer. Needs the extra "demo". Ten minutes on two shared cores.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import digits
import jgrad
import language_model
import text

_SEEDS = flags.DEFINE_integer("seeds", 5, "How many seeds.", lower_bound=2)
_DIGITS = flags.DEFINE_integer("digits_epochs", 15, "Epochs of digits.", lower_bound=1)
_TEXT = flags.DEFINE_integer("text_steps", 500, "Steps of the transformer.", lower_bound=1)
_TASKS = flags.DEFINE_multi_enum("task", ["digits", "text"], ["digits", "text"], "What to train.")

_LAST = 0.1  # part of the training whose losses are averaged


class Task(NamedTuple):
    """What is trained.

    Attributes:
      init: first weights from a key.
      loss: of weights and a batch.
      data: batches for a seed, stacked along the first axis.
      test: the batch of the test loss.
      rate: the highest learning rate.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    data: Callable[[int], Any]
    test: Any
    rate: float


class Recipe(NamedTuple):
    """What is stored, and how.

    Attributes:
      dtype: of the weights.
      make: the optimizer for a learning rate.
      moved: by how much the first weights differ, relative to each.
    """

    dtype: Any
    make: Callable[[Any], optax.GradientTransformation]
    moved: float = 0.0


def adamw(rate: Any, **options: Any) -> optax.GradientTransformation:
    """AdamW; biases and norms do not decay."""
    matrices = jgrad.hidden_matrices(exclude=("norm",))
    return jgrad.adam(rate, weight_decay=0.01, weight_decay_mask=matrices, **options)


def nearest_moments(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """bfloat16 moments as other libraries store them: each rounded to the nearest."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(updates, state, params)
        moments = jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), (state.mw, state.vw))
        return updates, state._replace(mw=moments[0], vw=moments[1])

    return optax.GradientTransformation(tx.init, update)


def _stochastic(**options: Any) -> Callable[[Any], optax.GradientTransformation]:
    return lambda rate: jgrad.stochastic_rounding(adamw(rate, **options))


RECIPES = {
    "float32": Recipe(jnp.float32, adamw),
    "float32, moved": Recipe(jnp.float32, adamw, moved=1e-6),
    "float32, rate + 1%": Recipe(jnp.float32, lambda rate: adamw(lambda n: 1.01 * rate(n))),
    "8bit moments": Recipe(jnp.float32, functools.partial(adamw, moment_dtype="8bit")),
    "bf16 moments": Recipe(jnp.float32, functools.partial(adamw, moment_dtype=jnp.bfloat16)),
    "bf16 moments, nearest": Recipe(jnp.float32, lambda rate: nearest_moments(adamw(rate))),
    "bf16 weights, nearest": Recipe(jnp.bfloat16, adamw),
    "bf16 weights": Recipe(jnp.bfloat16, _stochastic()),
    "bf16 weights, bf16 moments": Recipe(jnp.bfloat16, _stochastic(moment_dtype=jnp.bfloat16)),
    "bf16 weights, 8bit moments": Recipe(jnp.bfloat16, _stochastic(moment_dtype="8bit")),
}


def digits_task(epochs: int) -> Task:
    """64-128-128-10 in batches of 64; 26,000 parameters, of which 24,600 in two large leaves."""
    train, test = digits.load()

    def data(seed: int) -> digits.Digits:
        rng = np.random.default_rng(seed)
        chosen = [batch for _ in range(epochs) for batch in train.batches(64, rng)]
        return digits.Digits(*(np.stack(x) for x in zip(*chosen, strict=True)))

    return Task(functools.partial(digits.init, hidden=128), digits.loss, data, test, 0.001)


def text_task(steps: int) -> Task:
    """Two layers of width 64 on 16 windows of 32 bytes; 115,000 parameters."""
    split = text.load()

    def data(seed: int) -> np.ndarray:
        return split.training.batches(steps, seed=seed)

    return Task(language_model.init, language_model.loss, data, split.test.spread(1024), 0.003)


def run(task: Task, recipe: Recipe, seeds: int) -> np.ndarray:
    """The last test and training loss for each seed, in two columns."""
    steps = len(jax.tree.leaves(task.data(0))[0])
    rate = optax.warmup_cosine_decay_schedule(0.0, task.rate, steps // 20, steps)
    tx = recipe.make(rate)

    @jax.jit
    def loss(w: Any, batch: Any) -> jax.Array:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), jgrad.unpack(w))
        return task.loss(wide, batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(w, batch)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, value

    def first(x: jax.Array) -> jax.Array:
        return (jax.lax.reduce_precision(x, 8, 7) * (1 + recipe.moved)).astype(recipe.dtype)

    found = []
    for seed in range(seeds):
        w = jgrad.pack(jax.tree.map(first, task.init(jax.random.key(seed))))
        state, data, values = tx.init(w), task.data(seed), []
        for i in range(steps):
            w, state, value = step(w, state, jax.tree.map(lambda x, i=i: x[i], data))
            values.append(value)
        found.append((float(loss(w, task.test)), np.mean(values[-math.ceil(_LAST * steps) :])))
    return np.array(found)


def table(task: Task, seeds: int) -> Iterator[str]:
    """Lines of Markdown, one for each recipe."""
    head = ["weights and moments", "test loss", "test, mean", "pairs", "training, mean", "pairs"]
    yield f"| {' | '.join(head)} |"
    yield "| --- " * len(head) + "|"
    exact = None
    for name, recipe in RECIPES.items():
        found = run(task, recipe, seeds)
        exact = found if exact is None else exact
        cells = [name, f"{found[:, 0].mean():.4f}"]
        for x in (100 * (found / exact - 1)).T:
            error = x.std(ddof=1) / seeds**0.5
            cells += [f"{x.mean():+.2f} ± {error:.2f}%", f"{x.min():+.2f} to {x.max():+.2f}%"]
        yield f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    del argv
    tasks = {"digits": (digits_task, _DIGITS), "text": (text_task, _TEXT)}
    for name in _TASKS.value:
        make, length = tasks[name]
        print(f"\n{name}: {make.__doc__} {_SEEDS.value} seeds.\n", flush=True)
        for line in table(make(length.value), _SEEDS.value):
            print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
