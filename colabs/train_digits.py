"""Trains a classifier of handwritten digits with every optimizer, at a small and a large batch.

    python colabs/train_digits.py

The data are 1797 real digits of scikit-learn. Shows progress, prints a table, saves a plot of the
loss curves, and exits with status 1 if an optimizer misses the target accuracy. About ten seconds
on two cores.
"""

# ruff: noqa: E402 (first what is missing)
import extras

extras.need("sklearn", "matplotlib", "rich")

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
import rich
from absl import app, flags, logging
from rich.progress import Progress
from rich.table import Table

import jgrad
from digits import Digits, Params, accuracy, init, load, loss

_BATCHES = flags.DEFINE_multi_integer(
    "batch", [32, 512], "Batch sizes: --batch=32 --batch=512.", lower_bound=1, upper_bound=1437
)
_EPOCHS = flags.DEFINE_integer("epochs", 40, "Passes over the training digits.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 128, "Width of the two hidden layers.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the initial weights and the order of the digits.")
_PLOT = flags.DEFINE_string("plot", "train_digits.png", "Where to save the loss curves.")
_TARGET = flags.DEFINE_float("target", 0.95, "Test accuracy that every optimizer must reach.")

# ---- optimizers and training -------------------------------------------------------------------


def matrices(params: Params) -> Params:
    """A mask: large-batch recipes leave biases without decay and without a trust ratio."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


_DECAY = {"weight_decay": 1e-4, "weight_decay_mask": matrices}
_TRUST = {"trust_ratio_mask": matrices}

# The optimizer that a learning rate or schedule makes, and its highest rate at a batch of 32.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformationExtraArgs], float]] = {
    "momentum": (functools.partial(jgrad.gradient_descent, momentum=0.9, **_DECAY), 0.05),
    "adam": (functools.partial(jgrad.adam, **_DECAY), 0.002),
    "lars": (functools.partial(jgrad.lars, trust_coefficient=0.02, **_DECAY, **_TRUST), 0.2),
    "lamb": (functools.partial(jgrad.lamb, **_DECAY, **_TRUST), 0.01),
}


class Run(NamedTuple):
    """What one training run came to."""

    optimizer: str
    batch: int
    losses: list[float]
    seconds: float
    accuracy: float


def train(
    name: str, train_set: Digits, test_set: Digits, *, batch: int, on_epoch: Callable[[], None]
) -> Run:
    """Trains one network from the start."""
    steps = _EPOCHS.value * (len(train_set.labels) // batch)
    make, rate = OPTIMIZERS[name]
    peak = rate * (batch / 32) ** 0.5  # the square-root rule, of the LAMB paper
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    tx = make(schedule)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: jgrad.OptState, batch: Digits) -> tuple[Any, ...]:
        value, grads = jgrad.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    start = time.perf_counter()
    params = init(jax.random.key(_SEED.value), hidden=_HIDDEN.value)
    state = tx.init(params)
    rng = np.random.default_rng(_SEED.value)
    losses = []
    for _ in range(_EPOCHS.value):
        for digits in train_set.batches(batch, rng):
            params, state, value = step(params, state, digits)
            losses.append(value)
        on_epoch()
    found = float(accuracy(params, test_set))
    return Run(name, batch, [float(x) for x in losses], time.perf_counter() - start, found)


# ---- what is shown -----------------------------------------------------------------------------


def table(runs: list[Run]) -> Table:
    """A line per run."""
    shown = Table("optimizer", title="Handwritten digits")
    for column in ("batch", "steps", "seconds", "test accuracy"):
        shown.add_column(column, justify="right")
    for run in runs:
        numbers = (run.batch, len(run.losses), f"{run.seconds:.1f}", f"{run.accuracy:.1%}")
        shown.add_row(run.optimizer, *map(str, numbers))
    return shown


def plot(runs: list[Run], path: str) -> None:
    """Training loss, averaged over each epoch, a panel per batch size."""
    matplotlib.use("Agg")
    batches = sorted({run.batch for run in runs})
    figure, panels = plt.subplots(
        1, len(batches), figsize=(4.5 * len(batches), 3.6), sharey=True, squeeze=False
    )
    for panel, batch in zip(panels[0], batches, strict=True):
        for run in runs:
            if run.batch == batch:
                by_epoch = np.mean(np.reshape(run.losses, (_EPOCHS.value, -1)), axis=1)
                panel.semilogy(np.arange(1, len(by_epoch) + 1), by_epoch, label=run.optimizer)
        panel.set(title=f"batch {batch}", xlabel="epoch")
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("training loss (cross-entropy, nats)")
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of each accelerator that is not there
    train_set, test_set = load()
    runs = []
    with Progress() as progress:
        for batch in _BATCHES.value:
            for name in OPTIMIZERS:
                bar = progress.add_task(f"{name}, batch {batch}", total=_EPOCHS.value)
                advance = functools.partial(progress.advance, bar)
                runs.append(train(name, train_set, test_set, batch=batch, on_epoch=advance))
    rich.print(table(runs))
    plot(runs, _PLOT.value)
    rich.print(f"Loss curves: {_PLOT.value}")
    missed = [run for run in runs if run.accuracy < _TARGET.value]
    for run in missed:
        rich.print(f"{run.optimizer}, batch {run.batch}: below the target of {_TARGET.value:.0%}")
    return 1 if missed else 0


if __name__ == "__main__":
    app.run(main)
