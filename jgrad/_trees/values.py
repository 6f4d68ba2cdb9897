"""Checks of single values: counts, options, flags, names of mesh axes.

As in `checks`, a `ValueError` is about the value, a `TypeError` about the kind of an object.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jgrad._trees.checks import describe


def no_out(function: str, out: object) -> None:
    """`out=` follows JAX's convention: accepted for parity, never written to."""
    if out is not None:
        raise NotImplementedError(
            f"{function}: `out` is not supported, since arrays in JAX are immutable. Use the "
            "returned value; to reuse memory, give the argument to "
            "`jax.jit(..., donate_argnums=...)`."
        )


def count(function: str, name: str, value: object, low: int = 1) -> None:
    """An int of at least `low`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{function}: `{name}`: {describe(value)}, expected an int.")
    if not low <= value < 2**31:
        raise ValueError(f"{function}: `{name}`: {value}, expected a number in [{low}, 2^31).")


def one_of(function: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """An option that is spelled out."""
    allowed = tuple(allowed)
    # An array would be compared element by element.
    if not (value is None or isinstance(value, str)) or value not in allowed:
        options = ", ".join(map(repr, allowed))
        raise ValueError(f"{function}: `{name}`: {describe(value)}, expected one of {options}.")


def boolean(function: str, name: str, value: object) -> None:
    """True or False, and nothing that is only true or false in a condition."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: `{name}`: {describe(value)}, expected True or False.")


def flag(function: str, name: str, x: object) -> None:
    """None, or one bool, which may be traced."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    if not (x is None or isinstance(x, bool) or (dtype == jnp.bool_ and shape == ())):
        raise TypeError(f"{function}: `{name}`: {describe(x)}, expected None or one bool.")


def axis_names(function: str, name: str, value: object) -> tuple[str, ...]:
    """The name of a mesh axis, or a tuple of different ones, as a tuple."""
    names = value if isinstance(value, tuple) else (value,)
    if not (names and all(isinstance(axis, str) for axis in names)):
        came = value if isinstance(value, tuple) else describe(value)
        expected = "an axis name or a tuple of names"
        raise TypeError(f"{function}: `{name}`: {came}, expected {expected}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{function}: `{name}`: {value}, expected different names.")
    return names
