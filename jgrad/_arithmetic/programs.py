"""Types of JAX's programs: what is asked of a jaxpr, of its operations and of its variables.

JAX promises no classes of these, so none is imported, and none is tested.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

T = TypeVar("T")


class ArrayType(Protocol):
    """The type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    ndim: int
    sharding: jax.sharding.NamedSharding


class Atom(Protocol):
    """A variable of a program, or a literal, which alone has a value."""

    aval: ArrayType
    val: np.ndarray

    def __hash__(self) -> int: ...


class Primitive(Protocol):
    """What an operation does."""

    name: str
    multiple_results: bool

    def bind(self, *args: object, **params: object) -> Any:
        """Does it."""


class Context(Protocol):
    """In which an operation was traced."""

    manager: AbstractContextManager[object]


class Equation(Protocol):
    """An operation: what it does, reads and makes."""

    primitive: Primitive
    invars: list[Atom]
    outvars: list[Atom]
    params: dict[str, Any]
    effects: frozenset[object]
    source_info: Any
    ctx: Context

    def replace(self, **changes: object) -> "Equation":
        """The same with other fields."""


class Program(Protocol):
    """A jaxpr."""

    eqns: list[Equation]
    constvars: list[Atom]
    invars: list[Atom]
    outvars: list[Atom]
    debug_info: Any

    def replace(self, **changes: object) -> "Program":
        """The same with other fields."""


class ClosedProgram(Protocol):
    """A jaxpr with its constants."""

    jaxpr: Program
    consts: Sequence[jax.Array]

    @property
    def out_avals(self) -> Sequence[ArrayType]:
        """The types of its results."""


def traced(f: Callable[..., T], *args: object) -> tuple[ClosedProgram, T]:
    """The program of `f(*args)`, and its result with a shape in place of each array."""
    make: Any = jax.make_jaxpr(f, return_shape=True)  # from JAX 0.12 on its types are classes
    program, result = make(*args)
    return program, result
