"""How a functional update is declared: the role of each argument, and what the results replace.

A method writes one by `@functional.update(w=Role.WEIGHTS, dcdw=Role.GRADIENT, ...)`. It is run by
`aligned.py`, which is entered here; a transformation needs none of that.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from jgrad._trees.protocols import PyTree


class Role(enum.Enum):
    """The role of an argument of a functional update or of a factory."""

    # of a functional update
    WEIGHTS = enum.auto()
    GRADIENT = enum.auto()
    FIRST_MOMENT = enum.auto()
    SECOND_MOMENT = enum.auto()
    OPTIONAL_NUMBER = enum.auto()  # in [0, inf), one element per leaf; None compiles to nothing
    # of both
    RATE = enum.auto()  # of any shape that broadcasts; in a functional update of any sign
    NUMBER = enum.auto()  # in [0, inf), one element per leaf
    BETA = enum.auto()  # in [0, 1), one element per leaf
    # of a factory
    DECAY = enum.auto()  # a number, whose range is that of `weight_decay_rule`
    MOMENTUM = enum.auto()  # a beta, or None where there is no buffer
    SCALAR = enum.auto()  # in [0, inf), one for the model
    MASK = enum.auto()  # a prefix tree of bools, or a function of shapes; None for all
    FLAG = enum.auto()  # a bool


Roles = Mapping[str, Role]
# For each argument that is replaced, the others that its new value is computed from; None for all.
Replaced = Mapping[str, Sequence[str] | None]
Arguments = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any])


class Declared(NamedTuple):
    """A functional update.

    Attributes:
      body: computes on lists with an entry per leaf.
      replaced: what the results replace, in order.
      before: looks at all arguments, before anything is traced, and may replace some; or None.
      roles: of arguments.
    """

    body: Callable[..., Any]
    replaced: Replaced
    before: Callable[[Arguments], Arguments] | None
    roles: Roles


_RUN: list[Callable[[Declared], Callable[..., Any]]] = []


def runs_by(run: Callable[[Declared], Callable[..., Any]]) -> None:
    """Enters what makes a function of a declared update."""
    _RUN[:] = [run]


def update(
    replaced: Replaced, before: Callable[[Arguments], Arguments] | None = None, /, **roles: Role
) -> Callable[[F], F]:
    """Makes a functional update from a body that computes on lists with an entry per leaf.

    The signature and the docstring are those of the body, and so are the static options. The body
    gets for an argument with a role what `AlignedArguments` makes of it, for a moment a `Moment`,
    and for `layer_axes` the layers of each leaf. It returns what is added to the weights, new
    gradients, and new moments. Everything is compiled as one program.

    Args:
      replaced: what the results replace, in order.
      before: looks at all arguments, before anything is traced, and may replace some.
      **roles: the role of each argument, arrays before numbers. Messages report the first that is
        wrong.
    """

    def decorate(body: F) -> F:
        declared = Declared(body, replaced, before, roles)
        made = functools.cache(lambda: _RUN[0](declared))

        @functools.wraps(body)
        def call(*args: Any, **kwargs: Any) -> Any:
            return made()(*args, **kwargs)

        return cast(F, call)

    return decorate


def returned(*entries: PyTree) -> PyTree:
    """What a body returns: lists, where its annotations tell callers of trees."""
    return entries if len(entries) > 1 else entries[0]
