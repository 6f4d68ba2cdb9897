"""Figures as bars: an image in SVG, whose text has the color of the page that it stands on."""

import itertools
from collections.abc import Mapping, Sequence

WIDTH = 480  # a phone shows letters at three quarters of their size
GAP = 56  # between columns, and for the figures at the ends of bars
COLORS = {"optax": "#8b949e", "jgrad": "#3b82f6"}  # to be seen on white and on black
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="15" fill="currentColor" color="#768390" \
aria-label="{label}">"""


def svg(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[float | None]],
    form: str = "{:.2f}",
) -> str:
    """A row has a name, whose first word has a color, and a bar or none in each column."""
    each = WIDTH / len(columns)
    scale = (each - GAP) / max(x for figures in rows.values() for x in figures if x)
    told = {name: [form.format(x) if x else "-" for x in y] for name, y in rows.items()}
    words = [f"{name}: {', '.join(figures)}" for name, figures in told.items()]
    label = f"{title} ({', '.join(columns)}): {'; '.join(words)}."
    parts = [
        HEAD.format(width=WIDTH, height=52 + 52 * len(rows), label=label),
        f'<text x="0" y="16" font-weight="bold">{title}</text>',
        *(f'<text x="{i * each:g}" y="44">{column}</text>' for i, column in enumerate(columns)),
    ]
    for y, (name, figures) in zip(itertools.count(76, 52), rows.items(), strict=False):
        parts.append(f'<text x="0" y="{y}">{name}</text>')
        color = COLORS[name.partition(",")[0]]
        for i, x in enumerate(figures):
            if x is None:
                continue
            size = f'width="{x * scale:.1f}" height="18" fill="{color}"'
            parts.append(f'<rect x="{i * each:g}" y="{y + 6}" {size}/>')
            parts.append(
                f'<text x="{i * each + x * scale + 4:.1f}" y="{y + 20}">{form.format(x)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])
