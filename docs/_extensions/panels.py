"""One panel of a plot of several: what a card has room for."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

DARK = 100  # the lightest grey of a frame
SHARE = 0.12  # of the image, at least, in each direction


def runs(row: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of stretches of True that are long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start >= least:
            yield int(start), int(end)


def boxes(is_line: np.ndarray, width: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    """Left, top, right and bottom of rectangles of lines, from the top."""
    for top in range(len(is_line)):
        for left, right in runs(is_line[top], width):
            for bottom in range(top + height, len(is_line)):
                if is_line[bottom, left:right].mean() > 0.9:
                    yield left, top, right, bottom + 1
                    break


def first(png: bytes) -> bytes:
    """Inside the frame of the first panel, or all of an image without frames."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    grey = np.asarray(image.convert("L"))
    least = int(SHARE * image.width), int(SHARE * image.height)
    panel = next(boxes(grey < DARK, *least), None)
    if panel:
        image = image.crop(panel)
    found = io.BytesIO()
    image.save(found, "PNG")
    return found.getvalue()
