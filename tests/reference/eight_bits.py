"""Numbers in 8 bits in float64 NumPy, from what the docstrings say and not from operations on bits."""

import numpy as np

SIZE = 256  # elements of a block
TINY = float(np.finfo(np.float32).tiny)

_MANTISSAS = 1 + np.arange(8) / 8  # three bits

# Two octaves at and above the scale, and 30 or 14 below; the smallest number is in the place of 0.
SECOND = np.concatenate([[0], np.outer(2.0 ** np.arange(-30, 2), _MANTISSAS).ravel()[1:]])
FIRST = np.concatenate([[0], np.outer(2.0 ** np.arange(-14, 2), _MANTISSAS).ravel()[1:]])


def grid(*, second):
    """The numbers of the codes from 0 upwards, for a scale of 1."""
    return SECOND if second else FIRST


def decode(codes, scale):
    """The numbers of codes, each with its scale."""
    codes = np.asarray(codes)
    size = grid(second=codes.dtype == np.uint8)[np.abs(codes.astype(int))]
    return np.sign(codes.astype(int)) * size * np.asarray(scale, float)


def scale_of(x):
    """The power of two for a block: its largest magnitude, once rounded up to the grid, is in [s, 2 s)."""
    largest = np.max(np.abs(np.asarray(x, float)), initial=0)
    if largest < TINY * 15 / 16:
        return 0.0
    s = 2.0 ** np.floor(np.log2(largest))
    return min(2 * s if largest > 1.875 * s else s, 2.0**126)


def neighbours(x, scale, *, second):
    """The numbers of the grid at or below, and at or above, magnitudes up to the largest one."""
    numbers, y = grid(second=second), np.abs(np.asarray(x, float)) / scale
    above = np.clip(np.searchsorted(numbers, y), 0, len(numbers) - 1)
    below = np.where(numbers[above] > y, np.maximum(above - 1, 0), above)
    return numbers[below] * scale, numbers[above] * scale


def blocks_of(shape, stacked=()):
    """The number of the block of each element: 256 along the last axis, or of a flattened layer."""
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    if shape and shape[-1] % SIZE == 0 and len(shape) - 1 not in stacked:
        return (np.arange(np.prod(shape)) // SIZE).reshape(shape)
    layers = int(np.prod([shape[axis] for axis in stacked]))
    size = int(np.prod([shape[axis] for axis in axes]))
    each = -(-size // SIZE)
    numbers = np.arange(layers)[:, None] * each + np.arange(size)[None] // SIZE
    order = [*stacked, *axes]
    in_order = numbers.reshape([shape[axis] for axis in order])
    return np.transpose(in_order, np.argsort(order))
