"""README's picture, of the rows of README's table: `python -m benchmarks.picture` draws it."""

import io
import itertools
import pathlib
import re

from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "benchmarks" / "readme.png"
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (\w+) \| ([\d.]+) \| ([\d.]*) ?\|$", re.MULTILINE)


def rows(readme: str) -> list[tuple[str, ...]]:
    """Work, method, form, step and build of each line of README's table."""
    return [found.groups() for found in _ROW.finditer(readme)]


def caption(readme: str) -> str:
    """What is written into the file, to compare with the table."""
    return "; ".join(" ".join(row) for row in rows(readme))


def draw(readme: str, path: pathlib.Path) -> None:
    """Bars for the times of steps and of builds beside optax's, in groups of one work."""
    labels: list[str] = []
    places: list[int] = []
    for work, group in itertools.groupby(rows(readme), key=lambda row: row[0]):
        labels.append(work)
        for _, method, form, *_ in group:
            places.append(len(labels))
            labels.append(f"{method}, {form}")
    figure = Figure((7.4, 0.7 + 0.235 * len(labels)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, column, color, title in (
        (panels[0], 3, "#3b78e7", "step"),
        (panels[1], 4, "#e8892b", "tracing and compiling"),
    ):
        panel.axvline(1, color="gray", linewidth=1, zorder=0)
        for y, row in zip(places, rows(readme), strict=True):
            if row[column]:
                panel.barh(y, float(row[column]), height=0.72, color=color)
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
                at = float(row[column]) + 0.03
                panel.text(at, y, row[column], va="center", fontsize=9, bbox=box)
        panel.set(xlim=(0, 1.32), xticks=(0, 0.5, 1), xticklabels=("0", "0.5", "1 (optax)"))
        panel.set_title(title, fontsize=11)
        panel.tick_params(left=False)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.4, -0.6))
    for y, label in enumerate(panels[0].get_yticklabels()):
        label.set_fontweight("normal" if y in places else "bold")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=140)
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", caption(readme))
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True, pnginfo=info)


if __name__ == "__main__":
    draw((ROOT / "README.md").read_text(), PICTURE)
