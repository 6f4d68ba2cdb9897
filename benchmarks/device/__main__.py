"""Times what the docs claim on a GPU or TPU: `python -m benchmarks.device --output=device.md`.

It is what to run first where there is one, and takes less than ten minutes. Without one it says so,
and `--any_device --small` tries it out. `--only` picks rows, and `--seconds` is the time for all.
"""

import pathlib
import statistics
import sys
from collections.abc import Iterable
from importlib import metadata

from absl import app, flags
from rich.console import Console

from benchmarks.device import processes, table
from benchmarks.device.rows import ROWS, Measured, Settings

_DEFAULT = Settings()
_ROUNDS = flags.DEFINE_integer(
    "rounds", _DEFAULT.rounds, "Times that each takes its turn, at most.", lower_bound=1
)
_SECONDS = flags.DEFINE_float("seconds", 480, "For all rows; what one leaves is for the next.")
_TOKENS = flags.DEFINE_integer(
    "tokens", _DEFAULT.tokens, "Of a batch of the train steps.", lower_bound=1
)
_ONLY = flags.DEFINE_string("only", "", "Rows whose name holds this.")
_OUTPUT = flags.DEFINE_string("output", "", "Where to write the table; nowhere if empty.")
_ANY_DEVICE = flags.DEFINE_bool("any_device", False, "To try it out: on a CPU, too.")
_SMALL = flags.DEFINE_bool("small", False, "To try it out: a sixteenth of each long axis.")

NO_DEVICE = (
    "JAX finds no GPU or TPU here, so there is nothing to time: install JAX for your device "
    "(https://docs.jax.dev/en/latest/installation.html) and run this again, or try it out on a CPU "
    "by --any_device --small."
)


def circumstances(found: Iterable[Measured | str]) -> str:
    """In which these were measured."""
    versions = ", ".join(f"{x} {metadata.version(x)}" for x in ("jax", "jaxlib", "optax"))
    copies = [x.copy for x in found if isinstance(x, Measured)]
    speed = f"a copy moves {statistics.median(copies) / 1e9:.0f} GB/s; " if copies else ""
    trial = " A trial on small arrays: its figures mean nothing." if _SMALL.value else ""
    return (
        f"{versions}; {speed}at most {_ROUNDS.value} rounds and {_SECONDS.value:.0f} s; batches of "
        f"{_TOKENS.value} tokens.{trial}"
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    rows = [row for name, row in ROWS.items() if _ONLY.value in name]
    if not rows:
        raise app.UsageError(f"--only={_ONLY.value}: no such row")
    device = processes.device()
    if device.platform == "cpu" and not _ANY_DEVICE.value:
        print(NO_DEVICE)
        return
    settings = Settings(rounds=_ROUNDS.value, small=_SMALL.value, tokens=_TOKENS.value)
    found = processes.all_measured(rows, _SECONDS.value, settings)
    shown, about = table.section(rows, found), circumstances(found.values())
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(f"{device.title}: {about}")
    console.print(shown.rich())
    if _OUTPUT.value:
        text = f"# jgrad on {device.title}\n\n`python -m benchmarks.device` wrote this. {about}\n"
        pathlib.Path(_OUTPUT.value).write_text(f"{text}\n{shown.markdown('')}")
        console.print(f"Written to {_OUTPUT.value}")
    if any(isinstance(x, str) for x in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
