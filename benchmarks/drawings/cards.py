"""Pictures of the gallery's cards of programs: losses that they print, digits that they read.

    python -m benchmarks.drawings.cards

runs four programs of colabs/ and keeps their losses, for `python -m benchmarks.drawings` to draw.
"""

import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from absl import app

from benchmarks.drawings import curves
from benchmarks.drawings.shapes import AMBER, BLUE, GREEN, GREY, line

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = pathlib.Path(__file__).with_suffix(".json")
WIDTH, HEIGHT, EDGE = 400, 250, 25
SHEET = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="thumbnail" \
aria-hidden="true" color="#768390">
{parts}
</svg>
"""
COLORS = {"train_nnx": BLUE, "train_linen": GREEN, "train_equinox": AMBER, "train_plain": GREY}
LOSS = re.compile(r"loss (\d+\.\d+)")
SHADES = 16  # of scikit-learn's digits, which are 8 x 8


def sheet(parts: Iterable[str]) -> str:
    """A picture of a card."""
    return SHEET.format(width=WIDTH, height=HEIGHT, parts="\n".join(parts))


def rectangle(x: float, y: float, width: float, height: float, color: str, opacity: float) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{color}" fill-opacity="{opacity:g}"/>'


def falling(losses: Sequence[float], color: str, lowest: float, highest: float) -> Iterator[str]:
    """A line of losses over steps, on a scale of logarithms."""
    scale = (HEIGHT - 2 * EDGE) / math.log(highest / lowest)
    x = (WIDTH - 2 * EDGE) / (len(losses) - 1)
    places = [(EDGE + i * x, EDGE + scale * math.log(highest / y)) for i, y in enumerate(losses)]
    shown = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    yield f'<polyline points="{shown}" fill="none" stroke="{color}" stroke-width="4"/>'


def losses(name: str) -> str:
    """Those that a program prints, with a dot for each."""
    found = json.loads(RESULTS.read_text())[name]
    return sheet(falling(found, COLORS[name], min(found), max(found)))


def digits(*, upside_down: bool = False) -> str:
    """Eight of them, in two rows."""
    size, parts = 10, []
    for k, pixels in enumerate(json.loads(RESULTS.read_text())["digits"]):
        left, top = 20 + 93 * (k % 4), 22 + 116 * (k // 4)
        for i, shade in enumerate(reversed(pixels) if upside_down else pixels):
            place = left + size * (i % 8), top + size * (i // 8)
            parts.append(rectangle(*place, size, size, "currentColor", shade / SHADES))
    return sheet(parts)


def mesh() -> str:
    """Two by two devices: those of a column have the same half of a kernel, and of its scales."""
    parts = []
    for k, color in enumerate((BLUE, GREEN)):
        x = 60 + 145 * k
        for y, height in ((30, 75), (110, 75), (205, 20)):
            parts.append(rectangle(x, y, 140, height, color, 0.5 if y == 110 else 0.8))
    return sheet(parts)


def processes() -> str:
    """Two of them, which hand each other sums of gradients."""
    parts = [rectangle(x, 75, 110, 100, color, 0.8) for x, color in ((40, BLUE), (250, GREEN))]
    parts += [
        line([(160, 105), (240, 105)], arrow=True),
        line([(240, 145), (160, 145)], arrow=True),
    ]
    return sheet(parts)


def methods() -> str:
    """The curves of the page of methods: the script trained these."""
    found = json.loads(curves.RESULTS.read_text())
    parts = []
    for name, (color, _) in curves.STYLES.items():
        parts += falling([min(x, 5.0) for x in found[name]], color, curves.LOWEST, 5.0)
    return sheet(parts)


CARDS = {
    **{name: lambda name=name: losses(name) for name in COLORS},
    "finetune_lora": lambda: digits(upside_down=True),
    "train_digits": digits,
    "train_sharded_nnx": mesh,
    "train_distributed": processes,
    "train_language_model": methods,
}


def printed(name: str) -> list[float]:
    """The losses that a program prints, with an empty folder for its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        place = [] if name == "train_plain" else [folder]
        command = [sys.executable, ROOT / "colabs" / f"{name}.py", *place]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(x) for x in LOSS.findall(done.stdout)]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    from sklearn.datasets import load_digits

    found = {name: printed(name) for name in COLORS}
    found["digits"] = load_digits().data[:8].astype(int).tolist()
    RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    app.run(main)
