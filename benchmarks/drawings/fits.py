"""The largest decoder that a device trains, as bars: what `accelerators.largest` found."""

from benchmarks.accelerators import bars, largest, llama
from benchmarks.accelerators.targets import TARGETS

MACHINES = ("v5e", "h100", "v5p")
# By the name of a bar, a row of the table; those that were not compiled are left out.
_BACKWARD = "bfloat16, in the backward pass"
PICTURED = {
    "optax, float32": "optax AdamW, float32",
    "optax, bfloat16": "optax AdamW, bfloat16",
    "jgrad, bfloat16, 8 bits": "AdamW in 8 bits, bfloat16",
    "jgrad, bfloat16, 8 bits, in the backward pass": f"AdamW in 8 bits, {_BACKWARD}",
    "jgrad, Adafactor, in the backward pass": f"Adafactor, {_BACKWARD}",
    "jgrad, moments in host memory": f"AdamW, float32 moments in host memory, {_BACKWARD}",
    "jgrad, weights and moments in host memory": (
        "AdamW, bfloat16, all in host memory, bfloat16 moments, in the backward pass"
    ),
}


def svg() -> str:
    """A bar for each device with parameters in billions, or none."""
    found = largest.known()

    def billions(target: str, row: str) -> float | None:
        result = found.get((target, row))
        fits = result is not None and result.fits
        return llama.size(llama.FAMILY[result.model]) / 1e9 if result and fits else None

    rows = {name: [billions(x, row) for x in MACHINES] for name, row in PICTURED.items()}
    rows = {name: figures for name, figures in rows.items() if any(figures)}
    columns = [f"{TARGETS[x].title}, {TARGETS[x].memory / 1e9:.0f} GB" for x in MACHINES]
    title = "Largest decoder, billions of parameters, 2048 tokens"
    return bars.svg(title, columns, rows, form="{:.1f}")
