"""Which setup fits, as questions from the most memory to the least: a drawing of docs/choose.md."""

from benchmarks.accelerators.bars import WIDTH
from benchmarks.drawings import shapes
from benchmarks.drawings.shapes import AMBER, BLUE, GREEN

# By what has to fit, in two lines, what to write. Figures are bytes per parameter, as in docs/.
SETUPS = {
    ("16: float32 weights,", "moments, gradients"): "adam(...)",
    ("12: weights and", "gradients in bfloat16"): "stochastic_rounding(adam(...))",
    ("6.03: 8-bit moments", ""): 'adam(moment_dtype="8bit")',
    ("4.42: gradients of", "one layer at a time"): "step_in_backward(tx, loss)",
    ("2.77: moments in", "host memory"): "offload(tx)",
    ("One layer at a time", ""): "weights in host memory",
}
TOP, ROW, LEFT = 48, 78, 210


def svg() -> str:
    """A question at the left, with yes to the right and no downwards."""
    title = "Bytes per parameter: what fits?"
    parts, told = [shapes.text(0, 16, title, bold=True)], []
    for i, ((first, second), setup) in enumerate(SETUPS.items()):
        y, is_last = TOP + ROW * i, i == len(SETUPS) - 1
        parts.append(shapes.box(0, y - 16, LEFT - 26, 54, GREEN if is_last else AMBER))
        parts.append(shapes.text(8, y + (5 if second else 16), first))
        parts.append(shapes.text(8, y + 26, second))
        parts.append(shapes.box(LEFT + 26, y - 4, WIDTH - LEFT - 27, 30, BLUE))
        parts.append(shapes.text(LEFT + 34, y + 16, setup))
        parts.append(shapes.line([(LEFT - 24, y + 11), (LEFT + 24, y + 11)], arrow=True))
        parts.append(shapes.text(LEFT - 14, y + 5, "" if is_last else "yes"))
        if not is_last:
            parts.append(shapes.line([(40, y + 39), (40, y + ROW - 18)], arrow=True))
            parts.append(shapes.text(48, y + 54, "no"))
        told.append(f"{first} {second}".strip() + f" → {setup}")
    height = TOP + ROW * len(SETUPS) - 20
    return shapes.sheet(height, f"{title}: {'; '.join(told)}.", parts)
