"""Inputs and outputs of real Ivy, from `data/ivy_oracle.jsonl.gz`: one case a line.

Ivy 1.0.0.5 ran them on its JAX, PyTorch and TensorFlow backends; kept are cases on which the
backends agree. Encoding: `{"a": [dtype, shape, data]}` an array, `{"d": {...}}` a dict or
`ivy.Container`, `{"list": [...]}` and `{"tuple": [...]}`, `{"v": x}` a Python value. Non-finite
numbers are strings, complex ones pairs. `func` is the function given to a gradient wrapper, a
lambda of (xp, x).
"""

import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

_FILE = pathlib.Path(__file__).parents[1] / "data" / "ivy_oracle.jsonl.gz"


def load(*functions: str) -> list[dict[str, Any]]:
    """The cases of some functions."""
    with gzip.open(_FILE, "rt") as lines:
        return [case for case in map(json.loads, lines) if case["fn"] in functions]


def decode(x: Any, *, double: bool = False) -> Any:
    """The value; with `double`, arrays of float32 as float64, which holds the same numbers."""
    as_jax = lambda flat, dtype: jnp.asarray(
        flat, "float64" if double and dtype == "float32" else dtype
    )
    return _value(x, as_jax)


def expected(x: Any) -> Any:
    """The value with NumPy leaves, in the precision in which they are stored."""
    return _value(x, lambda flat, dtype: flat)


def _value(x: Any, array: Callable[[np.ndarray, str], Any]) -> Any:
    """What a case encodes; `array` makes one of its numbers and their dtype."""
    if x is None:
        return None
    ((kind, value),) = x.items()
    if kind == "a":
        dtype, shape, data = value
        flat = np.array(_numbers(data), dtype=float)
        if dtype.startswith("complex"):
            flat = flat[..., 0] + 1j * flat[..., 1]
        return array(flat.reshape(shape), dtype)
    if kind == "d":
        return {k: _value(v, array) for k, v in value.items()}
    if kind in ("list", "tuple"):
        items = [_value(v, array) for v in value]
        return items if kind == "list" else tuple(items)
    return value


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(x) for x in data]
    return float(data) if isinstance(data, str) else data
