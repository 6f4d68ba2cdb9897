"""What a training of the language model shows: its progress, a table, and a plot."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text as Plain

import bigram
import jgrad
from language_training import Run, Settings, bytes_on_one_device, evaluated, loss_of, windows
from text import Split

BITS = math.log2(math.e)  # in a nat
_LINES = 10  # in a run, at equal distances
_SECONDS = 10.0  # between two lines at most, if steps are shorter


class Shown:
    """The loss, tokens per second, and bytes of state: a bar in a terminal, else lines.

    A file gets a line for the first step, ten at equal distances, and one every ten seconds.
    """

    def __init__(
        self,
        settings: Settings,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._console = console or Console()
        columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
        others = (TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[state]}"))
        self.progress = Progress(
            *columns,
            *others,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._last_line = -math.inf
        self.state_bytes = 0
        self.seconds: list[float] = []

    def start(self, done: int, state: Any) -> None:
        self.state_bytes = bytes_on_one_device(state)
        each = " on each device" if self._settings.devices > 1 else ""
        self._state = f"state {self.state_bytes / 1e6:.2f} MB{each}"
        self._task = self.progress.add_task(
            "compiling", total=self._settings.steps, completed=done, speed="", state=self._state
        )
        if done:
            self._console.print(f"Going on after step {done}.")

    def account(self, done: int, account: jgrad.Account) -> None:
        self._console.print(f"With other settings after step {done}:")
        self._console.print(Plain(str(account)))

    def step(self, done: int, loss: float, seconds: float) -> None:
        self.seconds.append(seconds)
        said = f"loss {loss * BITS:.2f} bits"
        speed = f"{self.tokens_per_second():,.0f} tokens/s"
        self.progress.update(self._task, completed=done, description=said, speed=speed)
        if not self._console.is_terminal and self._line_is_due(done):
            self._last_line = self._clock()
            line = f"step {done} of {self._settings.steps}: {said}, {speed}, {self._state}"
            self._console.print(Plain(line), soft_wrap=True)

    def _line_is_due(self, done: int) -> bool:
        before, now = ((i * _LINES) // self._settings.steps for i in (done - 1, done))
        return now > before or self._clock() - self._last_line >= _SECONDS

    def tokens_per_second(self) -> float:
        """By the median of the last steps of this run; the first one is compiled."""
        last = self.seconds[1:][-50:] or self.seconds
        return self._settings.batch * self._settings.length / statistics.median(last)


def table(run: Run, settings: Settings, split: Split, pairs: np.ndarray, shown: Shown) -> Table:
    """The losses of a bigram model and of this one, also of an average, and what they took."""
    made = Table(f"{settings.optimizer}, {settings.recipe}", title="Python's library")
    for column in ("validation", "test"):
        made.add_column(f"{column} (bits per byte)", justify="right")
    texts = split.validation, split.test
    made.add_row("bigram model", *(_bits(bigram.loss(pairs, windows(x, settings))) for x in texts))
    made.add_row("transformer", *(_bits(loss_of(run.params, settings, x)) for x in texts))
    if settings.ema:
        average = evaluated(run.params, run.state, settings)
        own = (_bits(loss_of(average, settings, x)) for x in texts)
        made.add_row("transformer, average", *own)
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


def _bits(nats: float) -> str:
    return f"{nats * BITS:.3f}"


def _counted(state: Any, kind: type) -> int:
    """How many steps a wrapper has left out, wherever its state is."""
    states = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return next(int(x.skipped) for x in states if isinstance(x, kind))


def plot(run: Run, bigram_loss: float, settings: Settings, path: str) -> None:
    """Training and validation loss after each step."""
    import matplotlib.pyplot as plt  # a run without a plot does without it

    plt.switch_backend("Agg")
    figure, panel = plt.subplots(figsize=(6, 3.8))
    losses = BITS * np.array(run.history.training)
    steps = np.arange(1, len(losses) + 1)
    panel.plot(steps, losses, color="C0", alpha=0.3, lw=0.8, label="training, each batch")
    if run.history.validation:
        done, values = zip(*run.history.validation, strict=True)
        panel.plot(done, BITS * np.array(values), "o-", color="C1", label="validation")
    panel.axhline(BITS * bigram_loss, color="0.4", ls="--", label="bigram model, validation")
    title = f"Python's library, {settings.optimizer}, {settings.recipe}"
    panel.set(title=title, xlabel="step", ylabel="bits per byte")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
