"""Losses by step of a small language model: what `studies.loss_curves` kept."""

import json
import pathlib

from benchmarks.accelerators.bars import WIDTH
from benchmarks.drawings import shapes
from benchmarks.drawings.shapes import AMBER, BLUE, GREEN, GREY

RESULTS = pathlib.Path(__file__).parents[2] / "studies" / "loss_curves.json"
STEPS, LOWEST, HIGHEST = 200, 2.8, 4.6  # bits per byte; untrained models are above
STYLES = {
    "AdamW": (GREY, 7.0),
    "AdamW, bfloat16, 8 bits": (AMBER, 2.5),
    "LAMB": (BLUE, 2.5),
    "Muon": (GREEN, 2.5),
}
LEFT, TOP, HEIGHT = 30, 70, 230


def svg() -> str:
    """A line for each method, below their names."""
    found = json.loads(RESULTS.read_text())
    title = "Validation loss of a small language model, bits per byte"
    told = ", ".join(f"{name} {losses[-1]:.2f}" for name, losses in found.items())
    parts = [shapes.text(0, 16, title, bold=True)]
    scale = HEIGHT / (HIGHEST - LOWEST)
    for x, y, name in zip((0, 0, 250, 330), (40, 62, 40, 40), STYLES, strict=True):
        parts += [
            f'<rect x="{x}" y="{y - 7}" width="18" height="5" fill="{STYLES[name][0]}"/>',
            shapes.text(x + 24, y, name),
        ]
    for loss in (3, 3.5, 4, 4.5):
        y = TOP + scale * (HIGHEST - loss)
        parts.append(shapes.text(0, y + 5, f"{loss:g}"))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="currentColor" opacity="0.2"/>')
    for name, (color, width) in STYLES.items():
        losses = list(enumerate(found[name]))
        x = (WIDTH - LEFT - 4) / (len(losses) - 1)
        points = [(LEFT + x * i, TOP + scale * (HIGHEST - loss)) for i, loss in losses]
        # The part in front of the first point in the sheet begins at its edge.
        first = next(i for i, (_, y) in enumerate(points) if y >= TOP)
        (x0, y0), (x1, y1) = points[first - 1 : first + 1]
        edge = (x0 + (x1 - x0) * (TOP - y0) / (y1 - y0), TOP)
        shown = " ".join(f"{a:.1f},{b:.1f}" for a, b in [edge, *points[first:]])
        style = f'fill="none" stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round"'
        parts.append(f'<polyline points="{shown}" {style}/>')
    floor = TOP + HEIGHT
    for step in (0, STEPS // 2, STEPS):
        x = LEFT + (WIDTH - LEFT - 4) * step / STEPS
        anchor = "end" if step == STEPS else "start"
        parts.append(shapes.text(x, floor + 18, f"step {step}", anchor=anchor))
    label = f"{title}. After {STEPS} steps: {told}."
    return shapes.sheet(floor + 26, label, parts)
