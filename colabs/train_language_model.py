"""Trains a transformer on the sources of Python's library, with any optimizer and recipe.

    python colabs/train_language_model.py

Shows progress, saves a plot, and prints a table, which has the loss of a bigram model, too, and a
sample of what the model writes. Less than three minutes on two cores. Some other runs:

    --optimizer=muon --recipe=8bit_bf16_stochastic
    --devices=4 --zero --accumulate=4 --skip --ema=0.99
    --watch=10 --spikes
    --checkpoint_folder=language_model_checkpoints

With a folder, the same command goes on after the last checkpoint, to the bits of a run that was
never stopped, also when it was killed. With --resume_as it goes on with another optimizer, recipe
or schedule, and says what became of the state. Needs the extras "demo" and "distributed".
"""

import contextlib
import functools
import math
import os
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
from absl import app, flags, logging
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text as Plain

import bigram
import jgrad
import language_model
import processes
import recipes
import text
from checkpoints import CheckpointError, Checkpoints
from language_training import (
    Run,
    Settings,
    SettingsError,
    bytes_on_one_device,
    evaluated,
    measured,
    train,
    windows,
)
from watched import Watched

_DEFAULT = Settings()


def _integer(name: str, what: str, lower_bound: int) -> None:
    flags.DEFINE_integer(name, getattr(_DEFAULT, name), what, lower_bound=lower_bound)


def _float(name: str, what: str, upper_bound: float | None = None) -> None:
    flags.DEFINE_float(
        name, getattr(_DEFAULT, name), what, lower_bound=0.0, upper_bound=upper_bound
    )


# What decides the numbers, a flag for each field of `Settings`. Names are checked there.
flags.DEFINE_string("optimizer", _DEFAULT.optimizer, f"One of {', '.join(recipes.OPTIMIZERS)}.")
flags.DEFINE_string("recipe", _DEFAULT.recipe, f"One of {', '.join(recipes.RECIPES)}.")
flags.DEFINE_bool("packed", _DEFAULT.packed, "Whether parameters are one array per dtype.")
_integer("devices", "How many share each batch; on a CPU, virtual ones.", 1)
flags.DEFINE_bool("zero", _DEFAULT.zero, "Whether `jgrad.zero` shards a packed state over them.")
_float("rate", "Highest learning rate; that of the optimizer by default.")
_float("weight_decay", "Of the matrices of layers.")
_integer("warmup", "Updates in which the rate rises; then it falls to 0 as a cosine does.", 0)
_float("clip", "Largest norm of a gradient; 0 for no clipping.")
_integer("accumulate", "Steps for each update.", 1)
flags.DEFINE_bool("skip", _DEFAULT.skip, "Whether steps that are not finite are left out.")
flags.DEFINE_bool("spikes", _DEFAULT.spikes, "Whether steps with a loss far off are left out.")
_integer("watch", "Updates from one that is measured to the next; 0 to measure none.", 0)
_float("ema", "Decay of an average of the parameters, which is evaluated; 0 for none.", 0.9999)
_integer("steps", "Batches to train on.", 1)
_integer("batch", "Windows in a batch.", 1)
_integer("length", "Bytes in a window.", 1)
_integer("layers", "Of the transformer.", 1)
_integer("width", "Of a layer.", 1)
_integer("heads", "Of attention.", 1)
_integer("seed", "Of the first weights and the batches.", 0)

_FOLDER = flags.DEFINE_string("checkpoint_folder", "", "Where checkpoints are; none by default.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "Steps between checkpoints.", lower_bound=1)
_RESUME_AS = flags.DEFINE_bool(
    "resume_as", False, "Whether to go on with other settings than those of the checkpoint."
)
_WATCH_FILE = flags.DEFINE_string(
    "watch_file", "train_language_model_watch", "With --watch, a table .csv and a plot .png."
)
_VALIDATE_EVERY = flags.DEFINE_integer(
    "validate_every", 100, "Steps between validation losses.", lower_bound=1
)
_PLOT = flags.DEFINE_string(
    "plot", "train_language_model.png", "Where to save the loss curves; nowhere if empty."
)
_SAMPLE = flags.DEFINE_integer("sample", 400, "Bytes to write at the end.", lower_bound=0)
_PROMPT = flags.DEFINE_string("prompt", "def ", "What they begin with.")
flags.register_validator(_PROMPT, bool, "expected one byte at least")

_BITS = math.log2(math.e)  # in a nat

# ---- what is shown -------------------------------------------------------------------------------


class Shown:
    """A line of progress: the loss, tokens per second, and bytes of state."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._progress, self._settings = progress, settings
        self.state_bytes = 0
        self.seconds: list[float] = []

    def start(self, done: int, state: Any) -> None:
        self.state_bytes = bytes_on_one_device(state)
        each = " on each device" if self._settings.devices > 1 else ""
        shown = f"state {self.state_bytes / 1e6:.2f} MB{each}"
        self._task = self._progress.add_task(
            "compiling", total=self._settings.steps, completed=done, speed="", state=shown
        )
        if done:
            self._progress.console.print(f"Going on after step {done}.")

    def account(self, done: int, account: jgrad.Account) -> None:
        self._progress.console.print(f"With other settings after step {done}:")
        self._progress.console.print(Plain(str(account)))

    def step(self, done: int, loss: float, seconds: float) -> None:
        self.seconds.append(seconds)
        said = f"loss {loss * _BITS:.2f} bits"
        speed = f"{self.tokens_per_second():,.0f} tokens/s"
        self._progress.update(self._task, completed=done, description=said, speed=speed)

    def tokens_per_second(self) -> float:
        """By the median of the last steps of this run; the first one is compiled."""
        last = self.seconds[1:][-50:] or self.seconds
        return self._settings.batch * self._settings.length / statistics.median(last)


def table(
    run: Run, settings: Settings, split: text.Split, pairs: np.ndarray, shown: Shown
) -> Table:
    """The losses of a bigram model and of this one, and what they took."""
    made = Table(f"{settings.optimizer}, {settings.recipe}", title="Python's library")
    for column in ("validation", "test"):
        made.add_column(f"{column} (bits per byte)", justify="right")
    rows = {
        "bigram model": lambda x: bigram.loss(pairs, windows(x, settings)),
        "transformer, average" if settings.ema else "transformer": functools.partial(
            measured, run.params, run.state, settings
        ),
    }
    for name, loss in rows.items():
        made.add_row(name, *(f"{loss(x) * _BITS:.3f}" for x in (split.validation, split.test)))
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(jgrad.unpack, run.params)))
    each = " on each device" if settings.devices > 1 else ""
    made.caption = f"{count:,} parameters, {shown.state_bytes:,} bytes of optimizer state{each}"
    if shown.seconds:
        made.caption += f", {shown.tokens_per_second():,.0f} tokens (bytes of text) per second"
    if settings.skip:
        made.caption += f", {_counted(run.state, jgrad.SkipState)} steps skipped"
    if settings.spikes:
        made.caption += f", {_counted(run.state, jgrad.SpikeState)} spikes left out"
    return made


def _counted(state: Any, kind: type) -> int:
    """How many steps a wrapper has left out, wherever its state is."""
    states = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return next(int(x.skipped) for x in states if isinstance(x, kind))


def plot(run: Run, bigram_loss: float, settings: Settings, path: str) -> None:
    """Training and validation loss after each step."""
    import matplotlib.pyplot as plt  # a run without a plot does without it

    plt.switch_backend("Agg")
    figure, panel = plt.subplots(figsize=(6, 3.8))
    losses = _BITS * np.array(run.history.training)
    steps = np.arange(1, len(losses) + 1)
    panel.plot(steps, losses, color="C0", alpha=0.3, lw=0.8, label="training, each batch")
    if run.history.validation:
        done, values = zip(*run.history.validation, strict=True)
        panel.plot(done, _BITS * np.array(values), "o-", color="C1", label="validation")
    panel.axhline(_BITS * bigram_loss, color="0.4", ls="--", label="bigram model, validation")
    title = f"Python's library, {settings.optimizer}, {settings.recipe}"
    panel.set(title=title, xlabel="step", ylabel="bits per byte")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def sampled(run: Run, settings: Settings) -> str:
    """What the model writes after a prompt."""
    params = jgrad.unpack(evaluated(run.params, run.state, settings))
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), jax.device_get(params))
    prompt = jnp.asarray(np.frombuffer(_PROMPT.value.encode(), np.uint8), jnp.int32)
    codes = language_model.sample(
        wide,
        prompt,
        jax.random.key(settings.seed),
        number=_SAMPLE.value,
        length=settings.length,
        heads=settings.heads,
    )
    found = np.asarray(codes, np.uint8).tobytes().decode(errors="replace")
    return "".join(x if x.isprintable() or x == "\n" else "?" for x in found)


# ---- the command ---------------------------------------------------------------------------------


def run(settings: Settings) -> None:
    """Trains, and shows what came of it."""
    split = text.load()
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if _FOLDER.value:
            checkpoints = stack.enter_context(contextlib.closing(Checkpoints(_FOLDER.value)))
        columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
        others = (TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[state]}"))
        shown = Shown(
            settings, stack.enter_context(Progress(*columns, *others, TimeRemainingColumn()))
        )
        watched = Watched()
        found = train(
            settings,
            split,
            checkpoints=checkpoints,
            save_every=_SAVE_EVERY.value,
            validate_every=_VALIDATE_EVERY.value,
            resume_as=_RESUME_AS.value,
            on_start=shown.start,
            on_other_settings=shown.account,
            on_report=watched.add,
            on_step=shown.step,
        )
    pairs = bigram.log_probabilities(split.training.codes)
    rich.print(table(found, settings, split, pairs, shown))
    if _SAMPLE.value:
        rich.print(Panel(Plain(sampled(found, settings)), title="a sample"))
    if _PLOT.value:
        plot(found, bigram.loss(pairs, windows(split.validation, settings)), settings, _PLOT.value)
        rich.print(f"Loss curves: {_PLOT.value}")
    if watched.rows:
        table_file, picture = (f"{_WATCH_FILE.value}.{x}" for x in ("csv", "png"))
        watched.write(table_file)
        watched.plot(picture)
        rich.print(f"Norms of each layer: {table_file}, {picture}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax and JAX tell of every step
    try:
        settings = Settings(*(flags.FLAGS[name].value for name in Settings._fields)).checked()
        # XLA reads this once, when JAX first computes something.
        os.environ.update(processes.environment(settings.devices if settings.devices > 1 else 0))
        run(settings)
    except (SettingsError, CheckpointError) as error:
        sys.exit(f"Not trained: {error}")


if __name__ == "__main__":
    app.run(main)
