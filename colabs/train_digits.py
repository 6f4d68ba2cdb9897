"""Trains a classifier of handwritten digits with optax's AdamW and with optimizers of jgrad.

    python colabs/train_digits.py
    python colabs/train_digits.py --sweep  # how the learning rates were chosen

The data are the 1797 real digits that scikit-learn ships. Each optimizer trains at a small and at a
large batch. The script shows progress, prints a table, and saves a plot of training losses, test
accuracies, and the bytes that weights and state take. With bfloat16 weights, stochastic rounding
and 8-bit moments, losses follow those of float32 in four bytes per parameter instead of twelve. The
script exits with status 1 if an optimizer misses the target accuracy.

Learning rates were chosen alike for all optimizers: at each batch size, `--sweep` trains with nine
rates from 0.0005 to 0.128 and three seeds on four fifths of the training digits. Of the rates whose
mean loss on the others is within a fifth of the lowest, which three seeds hardly tell apart, the
smallest is taken. The test digits have no part in it.
"""

# ruff: noqa: E402 (first what is missing)
import extras

extras.need("sklearn", "matplotlib", "rich")

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
_PLOT = flags.DEFINE_string("plot", "train_digits.png", "Where to save the plot.")
_SWEEP = flags.DEFINE_bool("sweep", False, "Only choose learning rates.")
_TARGET = flags.DEFINE_float("target", 0.95, "Test accuracy that every optimizer must reach.")

# ---- optimizers and training -------------------------------------------------------------------


# Biases have neither weight decay nor a trust ratio.
_MATRICES = jgrad.by_path({"**/w": True}, rest=False)
_DECAY = {"weight_decay": 1e-4, "weight_decay_mask": _MATRICES}


class Optimizer(NamedTuple):
    """What is compared.

    Attributes:
      make: the transformation for a learning rate or a schedule.
      peaks: the highest learning rates, at the batch sizes of `SWEPT`; between them on a line in
        logarithms.
      style: of its lines in the plot.
      dtype: of the weights.
    """

    make: Callable[..., optax.GradientTransformation]
    peaks: tuple[float, float]
    style: dict[str, Any]
    dtype: Any = jnp.float32


SWEPT = 32, 512
RATES = [0.0005 * 2**k for k in range(9)]
CHOSEN = (
    f"Learning rates: the smallest of {RATES[0]:g} to {RATES[-1]:g} whose held-out loss is within "
    "a fifth of the lowest, for each optimizer and batch size (--sweep)."
)
_EIGHT_BITS = functools.partial(jgrad.adam, moment_dtype="8bit", **_DECAY)
OPTIMIZERS = {
    "optax.adamw": Optimizer(
        functools.partial(optax.adamw, weight_decay=1e-4, mask=_MATRICES),
        (0.001, 0.004),
        {"color": "0.7", "lw": 6},
    ),
    "jgrad.adam": Optimizer(
        functools.partial(jgrad.adam, **_DECAY), (0.001, 0.004), {"color": "black", "lw": 1.5}
    ),
    "jgrad.adam, bfloat16, 8bit": Optimizer(
        lambda rate: jgrad.stochastic_rounding(_EIGHT_BITS(rate)),
        (0.001, 0.004),
        {"color": "C1", "lw": 2.5},
        jnp.bfloat16,
    ),
    "jgrad.lamb": Optimizer(
        functools.partial(jgrad.lamb, trust_ratio_mask=_MATRICES, **_DECAY),
        (0.001, 0.016),
        {"color": "C0"},
    ),
    "jgrad.muon": Optimizer(
        functools.partial(
            jgrad.muon,
            matrices=jgrad.by_path({"layer_1/w": True}, rest=False),  # between two hidden layers
            scale="match_rms_adamw",
            **_DECAY,
        ),
        (0.001, 0.008),
        {"color": "C3"},
    ),
}


class Run(NamedTuple):
    """What one training run came to.

    Attributes:
      optimizer: a name in `OPTIMIZERS`.
      batch: how many digits are in one.
      peak: the highest learning rate.
      losses: of all steps.
      accuracies: on the test digits, after each epoch.
      test_loss: theirs at the end.
      kept: bytes of weights and state, per parameter.
    """

    optimizer: str
    batch: int
    peak: float
    losses: list[float]
    accuracies: list[float]
    test_loss: float
    kept: float

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1]


def peak_of(name: str, batch: int) -> float:
    """The highest learning rate for a batch size."""
    logs = np.log(SWEPT), np.log(OPTIMIZERS[name].peaks)
    return float(np.exp(np.interp(np.log(batch), *logs)))


def train(
    name: str,
    train_set: Digits,
    test_set: Digits,
    *,
    batch: int,
    peak: float,
    seed: int,
    on_epoch: Callable[[], None],
) -> Run:
    """Trains one network from the start."""
    steps = _EPOCHS.value * (len(train_set.labels) // batch)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    tx = OPTIMIZERS[name].make(schedule)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: optax.OptState, batch: Digits) -> tuple[Any, ...]:
        value, grads = jgrad.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(jax.random.key(seed), hidden=_HIDDEN.value)
    params = optax.tree.cast(params, OPTIMIZERS[name].dtype)
    state = tx.init(params)
    size = sum(x.size for x in jax.tree.leaves(params))
    nbytes = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    rng = np.random.default_rng(seed)
    losses, accuracies = [], []
    for _ in range(_EPOCHS.value):
        for digits in train_set.batches(batch, rng):
            params, state, value = step(params, state, digits)
            losses.append(value)
        accuracies.append(accuracy(params, test_set))
        on_epoch()
    losses, accuracies = ([float(x) for x in found] for found in (losses, accuracies))
    test_loss = float(jax.jit(loss)(params, test_set))
    return Run(name, batch, peak, losses, accuracies, test_loss, nbytes / size)


def sweep(digits: Digits, progress: Progress) -> None:
    """Prints the chosen learning rates, and the mean loss on held-out digits for each rate."""
    size = len(digits.labels) * 4 // 5
    seen, held_out = (Digits(*(x[part] for x in digits)) for part in (np.s_[:size], np.s_[size:]))
    for batch in SWEPT:
        for name in OPTIMIZERS:
            bar = progress.add_task(f"{name}, batch {batch}", total=3 * len(RATES) * _EPOCHS.value)
            advance = functools.partial(progress.advance, bar)
            run = functools.partial(train, name, seen, held_out, batch=batch, on_epoch=advance)
            means = {
                peak: np.mean([run(peak=peak, seed=seed).test_loss for seed in range(3)])
                for peak in RATES
            }
            chosen = next(x for x in RATES if means[x] <= 1.2 * min(means.values()))
            shown = ", ".join(f"{peak:g}: {mean:.4f}" for peak, mean in means.items())
            progress.print(f"{name}, batch {batch}, chosen {chosen:g}, from {shown}")


# ---- what is shown -----------------------------------------------------------------------------


def table(runs: list[Run]) -> Table:
    """A line per run."""
    shown = Table(title="Handwritten digits")
    shown.add_column("optimizer", no_wrap=True)
    columns = "batch", "learning rate", "bytes per parameter", "test accuracy"
    for column in columns:
        shown.add_column(column, justify="right")
    for run in runs:
        cells = f"{run.kept:.2f}", f"{run.accuracy:.1%}"
        shown.add_row(run.optimizer, str(run.batch), f"{run.peak:.3g}", *cells)
    return shown


def plot(runs: list[Run], path: str) -> None:
    """Training losses, test accuracies, and bytes of weights and state; a row per batch size."""
    matplotlib.use("Agg")
    batches = sorted({run.batch for run in runs})
    size = (13, 3.5 * len(batches))
    shape = {"squeeze": False, "layout": "constrained"}
    figure, rows = plt.subplots(len(batches), 3, figsize=size, **shape)
    for (left, middle, right), batch in zip(rows, batches, strict=True):
        chosen = [run for run in runs if run.batch == batch]
        for run in chosen:
            style = OPTIMIZERS[run.optimizer].style
            by_epoch = np.mean(np.reshape(run.losses, (_EPOCHS.value, -1)), axis=1)
            epochs = np.arange(1, len(by_epoch) + 1)
            left.semilogy(epochs, by_epoch, **style)
            middle.plot(epochs, 100 * np.array(run.accuracies), **style)
        names = [run.optimizer for run in chosen]
        colors = [OPTIMIZERS[name].style["color"] for name in names]
        bars = right.barh(names, [run.kept for run in chosen], color=colors)
        right.bar_label(bars, fmt="%.1f", padding=3)
        right.invert_yaxis()
        right.set(
            title="weights and state",
            xlabel="bytes per parameter",
            xlim=(0, 14),
        )
        left.set(title=f"batch {batch}: training", ylabel="loss (cross-entropy, nats)")
        middle.set(title=f"batch {batch}: test", ylabel="accuracy (%)", ylim=(88, 100))
        for panel in (left, middle):
            panel.grid(alpha=0.3)
            panel.set_xlabel("epoch")
    figure.supxlabel(CHOSEN, fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of each accelerator that is not there
    train_set, test_set = load()
    runs = []
    with Progress() as progress:
        if _SWEEP.value:
            sweep(train_set, progress)
            return 0
        for batch in _BATCHES.value:
            for name in OPTIMIZERS:
                bar = progress.add_task(f"{name}, batch {batch}", total=_EPOCHS.value)
                advance = functools.partial(progress.advance, bar)
                given = {"batch": batch, "peak": peak_of(name, batch), "seed": _SEED.value}
                runs.append(train(name, train_set, test_set, **given, on_epoch=advance))
    rich.print(table(runs))
    plot(runs, _PLOT.value)
    rich.print(f"Losses, accuracies and bytes: {_PLOT.value}")
    rich.print(CHOSEN)
    missed = [run for run in runs if run.accuracy < _TARGET.value]
    for run in missed:
        rich.print(f"{run.optimizer}, batch {run.batch}: below the target of {_TARGET.value:.0%}")
    return 1 if missed else 0


if __name__ == "__main__":
    app.run(main)
