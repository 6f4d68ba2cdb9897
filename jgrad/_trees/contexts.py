"""What holds while something is traced: a context variable, for the time of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def during(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Gives a variable a value; afterwards it has the one that it had."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
