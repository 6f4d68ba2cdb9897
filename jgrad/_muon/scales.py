"""The factor of Muon's direction, by the numbers of outputs and inputs of a matrix."""

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jgrad._inputs import numbers
from jgrad._muon import split_leaves
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._trees import values

ScaleFunction = Callable[[int, int], Any]  # of outputs and inputs
Scale = str | ScaleFunction | None

_SCALES: dict[Any, ScaleFunction] = {
    "original": lambda out, into: math.sqrt(max(1.0, out / max(1, into))),
    "match_rms_adamw": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "spectral": lambda out, into: math.sqrt(out / max(1, into)),
    None: lambda out, into: 1.0,
}


def read_scale(function: str, scale: Scale) -> ScaleFunction:
    """The function of (outputs, inputs)."""
    if callable(scale):
        _check_takes_two(function, scale)
        return scale
    values.one_of(function, "scale", scale, _SCALES)
    return _SCALES[scale]


def _check_takes_two(function: str, scale: ScaleFunction) -> None:
    try:
        signature = inspect.signature(scale)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind(1, 1)
    except TypeError:
        came = f"{getattr(scale, '__name__', type(scale).__name__)}{signature}"
        expected = "a function of the numbers of outputs and inputs of a matrix"
        raise TypeError(f"{function}: `scale`: {came}, expected {expected}.") from None


def factors_of(function: str, scale: ScaleFunction, axes: Sequence[MatrixAxes]) -> list[Any]:
    """For each array a scalar, or one number per output where it has blocks of several sizes.

    Matrices with equal sizes share one in the program.
    """
    sizes = [tuple(own.sizes for own in split_leaves.pieces(x)) for x in axes]
    different = dict.fromkeys(itertools.chain(*sizes))
    factors = {size: numbers.scalar(function, f"scale{size}", scale(*size)) for size in different}
    return [
        factors[own[0]]
        if len(set(own)) == 1
        else split_leaves.per_output([factors[size] for size in own], x)
        for own, x in zip(sizes, axes, strict=True)
    ]
