"""What `jgrad.watch` measured in a run: a table, and a plot of the ratios of updates to weights."""

import csv
import pathlib
from typing import Any, NamedTuple

import numpy as np

_MEASURES = ("grad_norm", "update_norm", "param_norm", "update_ratio")


class Watched:
    """Rows of a table, of each step that was measured, leaf and layer.

    Attributes:
      rows: the rows, in order.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, step: int, numbers: dict[str, Any]) -> None:
        """What `jgrad.report` returned after a step."""
        prefix = f"{_MEASURES[0]}/"
        for path in (name.removeprefix(prefix) for name in numbers if name.startswith(prefix)):
            columns = [np.atleast_1d(numbers[f"{measure}/{path}"]) for measure in _MEASURES]
            for layer, values in enumerate(zip(*columns, strict=True)):
                self.rows.append(Row(step, path, layer, *map(float, values)))

    def write(self, path: str) -> None:
        """The table, as comma-separated values."""
        with pathlib.Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(self.rows)

    def plot(self, path: str) -> None:
        """A panel for each leaf, with a line for each layer."""
        import matplotlib.pyplot as plt  # a run without a plot does without it

        plt.switch_backend("Agg")
        names = list(dict.fromkeys(row.leaf for row in self.rows))
        columns = 3
        count = -(-len(names) // columns)
        figure, panels = plt.subplots(
            count, columns, figsize=(9, 1 + 1.9 * count), sharex=True, sharey=True, squeeze=False
        )
        for panel, name in zip(panels.flat, names, strict=False):
            own = [row for row in self.rows if row.leaf == name]
            layers = sorted({row.layer for row in own})
            for layer in layers:
                of_layer = [row for row in own if row.layer == layer and row.update_ratio]
                line = [(row.step, row.update_ratio) for row in of_layer]
                if line:
                    color = plt.cm.viridis(layer / max(1, len(layers) - 1) * 0.85)
                    label = f"layer {layer}" if len(layers) > 1 else None
                    panel.plot(*zip(*line, strict=True), color=color, lw=1.2, label=label)
            panel.set_title(name, fontsize=9)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
            if len(layers) > 1:
                panel.legend(fontsize=7)
        for panel in panels.flat[len(names) :]:
            panel.set_visible(False)
        figure.supxlabel("step", fontsize=10)
        figure.supylabel("norm of the update / norm of the weights", fontsize=10)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


class Row(NamedTuple):
    """What was measured of one layer of a leaf in one step; names as `jgrad.watch` has them."""

    step: int
    leaf: str
    layer: int
    grad_norm: float
    update_norm: float
    param_norm: float
    update_ratio: float
