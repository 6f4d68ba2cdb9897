"""Trains a transformer on the sources of Python's library, with any optimizer and recipe.

    python colabs/train_language_model.py

Shows progress, by a line now and then where the output is a file. Saves a plot, and prints a table,
which has the loss of a bigram model, too, and a sample of what the model writes. Less than three
minutes on two cores. Some other runs:

    --optimizer=muon --recipe=8bit_bf16_stochastic
    --devices=4 --zero --accumulate=4 --skip --ema=0.99
    --watch=10 --spikes
    --step_in_backward --recipe=8bit_bf16_stochastic
    --checkpoint_folder=language_model_checkpoints

With a folder, the same command goes on after the last checkpoint, to the bits of a run that was
never stopped, also when it was killed: the last line is a digest of the parameters. With
--resume_as it goes on with another optimizer, recipe or schedule, and says what became of the
state. Needs the extras "demo" and "distributed".
"""

# ruff: noqa: E402 (first what is missing)
import sys

import extras

extras.need("rich", "orbax", *([] if "--plot=" in sys.argv else ["matplotlib"]))

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import rich
from absl import app, flags, logging
from rich.panel import Panel
from rich.text import Text as Plain

import bigram
import jgrad
import language_model
import processes
import recipes
import text
from bits import digest
from checkpoints import CheckpointError, Checkpoints
from language_training import Run, Settings, SettingsError, evaluated, train, windows
from shown import Shown, plot, table
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
_integer(
    "warmup",
    "Updates in which the rate rises, one in 14 by default; then it falls to 0 as a cosine does.",
    0,
)
_float("clip", "Largest norm of a gradient; 0 for no clipping.")
_integer("accumulate", "Steps for each update.", 1)
flags.DEFINE_bool("skip", _DEFAULT.skip, "Whether steps that are not finite are left out.")
flags.DEFINE_bool("spikes", _DEFAULT.spikes, "Whether steps with a loss far off are left out.")
_integer("watch", "Updates from one that is measured to the next; 0 to measure none.", 0)
_float("ema", "Decay of an average of the parameters, which is evaluated; 0 for none.", 0.9999)
flags.DEFINE_bool(
    "step_in_backward",
    _DEFAULT.step_in_backward,
    "Whether each layer is updated as soon as its gradient is known; on a CPU the step stays the "
    "ordinary one. Not with --packed, --zero or --accumulate, which need all gradients at once.",
)
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
        shown = Shown(settings)
        stack.enter_context(shown.progress)
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
    print(f"parameters {digest(found.params)}", flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # orbax and JAX tell of every step
    try:
        settings = Settings(*(flags.FLAGS[name].value for name in Settings._fields)).checked()
        if _PLOT.value or settings.watch:
            extras.need("matplotlib")
        # XLA reads this once, when JAX first computes something.
        os.environ.update(processes.environment(settings.devices if settings.devices > 1 else 0))
        run(settings)
    except (SettingsError, CheckpointError) as error:
        sys.exit(f"Not trained: {error}")


if __name__ == "__main__":
    app.run(main)
