"""One panel of a plot of several, without its legend: what a card has room for."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

DARK = 100  # the lightest grey of an axis
EDGE = 200, 222  # the greys of a legend's edge; lines of a grid are lighter
MARGIN = 6  # of the round corners of a legend, in pixels
TICK = 6  # how far a mark stands out of an axis, in pixels
SHARE = 0.12  # of the image, at least, in each direction


def least(image: Image.Image) -> tuple[int, int]:
    """The width and the height of what counts."""
    return int(SHARE * image.width), int(SHARE * image.height)


def runs(row: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of stretches of True that are long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start >= least:
            yield int(start), int(end)


def axes(is_line: np.ndarray, width: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    """Left, top, right and bottom of what is right of one axis and above another."""
    for left in range(is_line.shape[1]):
        for top, bottom in runs(is_line[:, left], height):
            for start, right in runs(is_line[bottom - 1], width):
                if left - TICK <= start <= left:
                    yield left, top, right, bottom


def boxes(is_line: np.ndarray, width: int, height: int) -> Iterator[tuple[int, int, int, int]]:
    """Left, top, right and bottom of rectangles of lines, from the top."""
    for top in range(len(is_line)):
        for left, right in runs(is_line[top], width):
            for bottom in range(top + height, len(is_line)):
                if is_line[bottom, left:right].mean() > 0.9:
                    yield left, top, right, bottom + 1
                    break


def first(png: bytes) -> bytes:
    """Inside the axes of the first panel, or all of an image without axes."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    panel = next(axes(np.asarray(image.convert("L")) < DARK, *least(image)), None)
    if panel:
        image = image.crop(panel)
    grey, (low, high) = np.asarray(image.convert("L")), EDGE
    legend = next(boxes((grey > low) & (grey < high), *least(image)), None)
    if legend:
        left, top, right, bottom = legend
        image.paste("white", (left - MARGIN, top, right + MARGIN, bottom))
    found = io.BytesIO()
    image.save(found, "PNG")
    return found.getvalue()
