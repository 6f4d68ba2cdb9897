"""How a functional update is declared: what each argument is, and what the results replace.

A method writes one by `@functional.update(w=Role.WEIGHTS, beta1=kinds.Beta, ...)`. It is run by
`aligned.py`, which is entered here; a transformation needs none of that.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from jgrad._inputs.kinds import Option
from jgrad._trees.protocols import PyTree


class Role(enum.Enum):
    """The role of an array."""

    WEIGHTS = enum.auto()
    GRADIENT = enum.auto()
    FIRST_MOMENT = enum.auto()
    SECOND_MOMENT = enum.auto()
    RATE = enum.auto()  # of any shape that broadcasts, and of any sign


# Of an array its role, of a number with one element per leaf its kind.
Kind = Role | type[Option[Any]]
Kinds = Mapping[str, Kind]
# For each argument that is replaced, the others that its new value is computed from; None for all.
Replaced = Mapping[str, Sequence[str] | None]
Arguments = dict[str, PyTree]

F = TypeVar("F", bound=Callable[..., Any])


class Declared(NamedTuple):
    """A functional update.

    Attributes:
      body: computes on lists with an entry per leaf.
      replaced: what the results replace, in order.
      before: looks at all arguments, before anything is traced, and may replace some; or None.
      kinds: of arguments.
    """

    body: Callable[..., PyTree]
    replaced: Replaced
    before: Callable[[Arguments], Arguments] | None
    kinds: Kinds


_RUN: list[Callable[[Declared], Callable[..., PyTree]]] = []


def runs_by(run: Callable[[Declared], Callable[..., PyTree]]) -> None:
    """Enters what makes a function of a declared update."""
    _RUN[:] = [run]


def update(
    replaced: Replaced, before: Callable[[Arguments], Arguments] | None = None, /, **kinds: Kind
) -> Callable[[F], F]:
    """Makes a functional update from a body that computes on lists with an entry per leaf.

    The signature and the docstring are those of the body, and so are the static options. The body
    gets for an argument of a kind what `AlignedArguments` makes of it, for a moment a `Moment`,
    and for `layer_axes` the layers of each leaf. It returns what is added to the weights, new
    gradients, and new moments. Everything is compiled as one program.

    Args:
      replaced: what the results replace, in order.
      before: looks at all arguments, before anything is traced, and may replace some.
      **kinds: what each argument is, arrays before numbers. Messages report the first that is
        wrong.
    """

    def decorate(body: F) -> F:
        declared = Declared(body, replaced, before, kinds)
        decorated = functools.cache(lambda: _RUN[0](declared))

        @functools.wraps(body)
        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return decorated()(*args, **kwargs)

        return cast(F, call)

    return decorate


def returned(*entries: PyTree) -> PyTree:
    """What a body returns: lists, where its annotations tell callers of trees."""
    return entries if len(entries) > 1 else entries[0]
