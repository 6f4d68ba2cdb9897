"""Draws the pictures of the guides and of the cards of programs: `python -m benchmarks.drawings`.

They are drawn from numbers in their files, or from what other commands have kept.
`benchmarks.accelerators.decoder_peaks` draws its own.
"""

import pathlib

from absl import app

from benchmarks.drawings import alive, cards, curves, fits, nesting, setups

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
OF_CARDS = FOLDER.parent / "_static" / "cards"
DRAWINGS = {
    "alive": alive.svg,
    "curves": curves.svg,
    "fits": fits.svg,
    "nesting": nesting.svg,
    "setups": setups.svg,
}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())
    for name, draw in cards.CARDS.items():
        (OF_CARDS / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    app.run(main)
