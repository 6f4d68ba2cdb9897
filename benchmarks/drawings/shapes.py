"""Shapes of SVG, on a sheet as wide as those of `benchmarks.accelerators.bars`."""

import html
from collections.abc import Iterable

from benchmarks.accelerators.bars import HEAD, WIDTH

# To be seen on white and on black.
GREY, BLUE, GREEN, AMBER = "#8b949e", "#3b82f6", "#10b981", "#f59e0b"


def sheet(height: int, label: str, parts: Iterable[str]) -> str:
    """A whole drawing, with what it shows in words."""
    head = HEAD.format(width=WIDTH, height=height, label=html.escape(label))
    return "\n".join([head, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, bold: bool = False, anchor: str = "start") -> str:
    """A line of text."""
    weight = ' font-weight="bold"' if bold else ""
    words = html.escape(words, quote=False)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(
    x: float, y: float, width: float, height: float, color: str, *, opacity: float = 0.15
) -> str:
    """A box with round corners, lightly filled."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'<rect {place} fill="{color}" fill-opacity="{opacity:g}" stroke="{color}"/>'


def area(points: Iterable[tuple[float, float]], color: str) -> str:
    """A filled polygon."""
    shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{shown}" fill="{color}"/>'


def line(points: Iterable[tuple[float, float]], *, arrow: bool = False) -> str:
    """A line, with a head of an arrow at its end if it has one."""
    points = list(points)
    shown = " ".join(f"{x:g},{y:g}" for x, y in points)
    found = f'<polyline points="{shown}" fill="none" stroke="currentColor"/>'
    if arrow:
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        head = [(x, y), (x - 7 * dx - 4 * dy, y - 7 * dy - 4 * dx)]
        head += [(x - 7 * dx + 4 * dy, y - 7 * dy + 4 * dx)]
        found += area(head, "currentColor")
    return found
