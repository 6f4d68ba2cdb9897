"""The order of wrappers, from the outermost: a drawing of docs/wrappers.md."""

from benchmarks.accelerators.bars import WIDTH
from benchmarks.drawings import shapes
from benchmarks.drawings.shapes import BLUE, GREEN, GREY

# Each around all that follow: a name, and what it is for.
WRAPPERS = {
    "offload": "state in host memory",
    "zero": "state over devices",
    "watch": "norms for your logger",
    "skip_spikes": "skips loss spikes",
    "skip_nonfinite": "skips NaN, scales the loss",
    "accumulate": "mini-batches, as a mean",
    "stochastic_rounding": "or master_weights",
    "average_params": "averages weights",
}
CHAIN = ("clip_by_global_norm", "adam")
LINE, INDENT, TOP = 30, 9, 44


def svg() -> str:
    """Boxes in boxes; in the innermost, a chain."""
    inner = TOP + LINE * len(WRAPPERS)
    chain = 62
    height = inner + chain + INDENT * len(WRAPPERS) // 2 + 12
    parts = [
        shapes.text(0, 16, "gradients", bold=True),
        shapes.line([(36, 22), (36, TOP - 4)], arrow=True),
        shapes.text(WIDTH, 16, "updates", bold=True, anchor="end"),
        shapes.line([(WIDTH - 36, TOP - 4), (WIDTH - 36, 22)], arrow=True),
    ]
    for i, (name, what) in enumerate(WRAPPERS.items()):
        x, y = INDENT * i / 2, TOP + LINE * i
        bottom = height - 6 - INDENT * i / 2
        parts.append(
            shapes.box(x, y, WIDTH - 2 * x, bottom - y, BLUE if i % 2 else GREY, opacity=0.04)
        )
        parts.append(shapes.text(x + 10, y + 20, name, bold=True))
        parts.append(shapes.text(WIDTH - x - 10, y + 20, what, anchor="end"))
    x = INDENT * len(WRAPPERS) / 2
    width = (WIDTH - 2 * x - 40) / 2
    for i, name in enumerate(CHAIN):
        left = x + 4 + i * (width + 32)
        parts.append(shapes.box(left, inner + 8, width, 44, GREEN))
        parts.append(shapes.text(left + width / 2, inner + 35, name, bold=True, anchor="middle"))
    middle = x + 4 + width
    parts.append(shapes.line([(middle + 3, inner + 30), (middle + 29, inner + 30)], arrow=True))
    parts.append(shapes.text(WIDTH / 2, inner + 72, "optax.chain", anchor="middle"))
    order = ", ".join([*WRAPPERS, f"and a chain of {' and '.join(CHAIN)}"])
    return shapes.sheet(height, f"The order of wrappers, from the outermost: {order}.", parts)
