"""What is in device memory while a step runs, on paper: an ordinary step, and two of jgrad's.

Of 16 equal layers, with weights in bfloat16 and moments in 8 bits, on one sequence of 512 tokens of
width 1024; embedding, head and what a layer computes inside are left out. At any time, a step has
weights and moments, inputs of the layers that the backward pass has not visited, and gradients that
no update has used.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.accelerators.bars import WIDTH
from benchmarks.drawings import shapes
from benchmarks.drawings.shapes import AMBER, BLUE, GREEN, GREY

LAYERS = 16
PARAMETERS = 12 * 1024 * 1024 * LAYERS
INPUTS = 512 * 1024 * 2 * LAYERS / PARAMETERS
WEIGHTS, MOMENTS, GRADIENTS = 2.0, 2 * (1 + 1 / 256), 2.0  # bytes per parameter
KINDS = {"weights": GREY, "moments": BLUE, "layer inputs": GREEN, "gradients": AMBER}
TITLE = "In device memory during a step, bytes per parameter"


class Alive(NamedTuple):
    """Bytes per parameter at a time, in the order of `KINDS`."""

    weights: float
    moments: float
    inputs: float
    gradients: float


def ordinary() -> Iterator[Alive]:
    """All gradients, then all updates."""
    for k in range(LAYERS + 1):
        yield Alive(WEIGHTS, MOMENTS, INPUTS * k / LAYERS, 0.0)
    for k in range(1, LAYERS + 1):
        done = k / LAYERS
        yield Alive(WEIGHTS, MOMENTS, INPUTS * (1 - done), GRADIENTS * done)
    for k in range(1, LAYERS // 2 + 1):
        yield Alive(WEIGHTS, MOMENTS, 0.0, GRADIENTS * (1 - 2 * k / LAYERS))


def in_backward() -> Iterator[Alive]:
    """Each layer is updated as soon as its gradient is known."""
    for k in range(LAYERS + 1):
        yield Alive(WEIGHTS, MOMENTS, INPUTS * k / LAYERS, 0.0)
    for k in range(LAYERS):
        yield Alive(WEIGHTS, MOMENTS, INPUTS * (1 - k / LAYERS), GRADIENTS / LAYERS)
    yield Alive(WEIGHTS, MOMENTS, 0.0, 0.0)


def on_the_host() -> Iterator[Alive]:
    """A layer is fetched for its turn, with its moments in the backward pass alone."""
    for k in range(LAYERS + 1):
        yield Alive(WEIGHTS / LAYERS, 0.0, INPUTS * k / LAYERS, 0.0)
    for k in range(LAYERS):
        share = WEIGHTS / LAYERS, MOMENTS / LAYERS, INPUTS * (1 - k / LAYERS), GRADIENTS / LAYERS
        yield Alive(*share)
    yield Alive(0.0, 0.0, 0.0, 0.0)


STEPS = {
    "Ordinary step": ordinary,
    "Updates in the backward pass": in_backward,
    "Weights and moments in host memory, too": on_the_host,
}
TOP, PANEL, GAP, SCALE, LEFT = 56, 96, 34, 15.0, 8


def peak(name: str) -> float:
    """Of a step."""
    return max(sum(x) for x in STEPS[name]())


def panel(y: float, name: str) -> list[str]:
    """Areas over time, one on the other, and the peak as a number."""
    times = list(STEPS[name]())
    x = [
        LEFT + (WIDTH - 2 * LEFT - 60) * i / (len(list(ordinary())) - 1) for i in range(len(times))
    ]
    floor, parts = y + PANEL, [shapes.text(0, y, name, bold=True)]
    below = [0.0] * len(times)
    for kind, color in enumerate(KINDS.values()):
        above = [b + t[kind] for b, t in zip(below, times, strict=True)]
        outline = [(a, floor - SCALE * b) for a, b in zip(x, above, strict=True)]
        outline += [(a, floor - SCALE * b) for a, b in zip(x[::-1], below[::-1], strict=True)]
        if above != below:
            parts.append(shapes.area(outline, color))
        below = above
    highest = max(range(len(times)), key=below.__getitem__)
    parts.append(shapes.line([(LEFT, floor), (WIDTH - LEFT - 60, floor)]))
    at = min(x[highest] + 6, WIDTH - 90)
    parts.append(shapes.text(at, floor - SCALE * below[highest] - 3, f"{peak(name):.1f}"))
    return parts


def svg() -> str:
    """The drawing."""
    peaks = "; ".join(f"{name}: at most {peak(name):.1f}" for name in STEPS)
    label = f"{TITLE}, of a model of {LAYERS} layers, on paper. {peaks}."
    parts = [shapes.text(0, 16, TITLE, bold=True)]
    for x, (kind, color) in zip((0, 92, 192, 312), KINDS.items(), strict=True):
        parts += [
            f'<rect x="{x}" y="29" width="12" height="12" fill="{color}"/>',
            shapes.text(x + 17, 40, kind),
        ]
    for i, name in enumerate(STEPS):
        parts += panel(TOP + 16 + i * (PANEL + GAP), name)
    height = TOP + 16 + len(STEPS) * (PANEL + GAP) - GAP + 26
    parts.append(shapes.text(LEFT, height - 6, "forward"))
    parts.append(shapes.text(LEFT + 165, height - 6, "backward"))
    parts.append(shapes.text(LEFT + 330, height - 6, "update"))
    return shapes.sheet(height, label, parts)
