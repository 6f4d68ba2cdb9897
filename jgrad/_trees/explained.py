"""The transformations that users get, and functions whose errors say what a call should have been.

What is known of names, here and in other libraries, is in `known_names.py`, which is entered here.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Generic, ParamSpec, TypeAlias, TypeVar

import jax
import optax

from jgrad._trees.annotations import Init, Inner, Pair, State, Update
from jgrad._trees.checks import in_short
from jgrad._trees.protocols import Leaf

_LONGEST = 80  # characters of one argument


# To mypy optax has no types, and a class on top of one of its own would be of every type. Of two
# definitions mypy reads the first; pyright, which reads optax, knows that 0 is false.
if 0:
    from jgrad._trees.annotations import TypedPair as _Pair
else:
    from optax import GradientTransformationExtraArgs as _Pair  # type: ignore[no-redef]


class Transformation(_Pair, Generic[State]):
    """What a factory of this library returns: a transformation that knows how it was called.

    In annotations, `Transformation[jgrad.OptState]` is one with this state. `Transformation` alone
    has any state, for a variable that holds an optimizer and then a wrapper around it.

    Attributes:
      init: `init(params)` returns the state before the first update.
      update: `update(updates, state, params=None, **extra_args)` returns new updates and the new
        state.

    Example:
      >>> tx: jgrad.Transformation = jgrad.adam(1e-3)
      >>> tx = jgrad.accumulate(tx, 4)
      >>> tx
      accumulate(adam(0.001), 4)
    """

    # According to optax's types, a state is an array or a tree of arrays, which no NamedTuple is.
    init: Init[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Update[State]  # pyright: ignore[reportIncompatibleVariableOverride]
    call: tuple[str, tuple[object, ...], Mapping[str, object]] | None = None

    def __repr__(self) -> str:
        if self.call is None:
            return super().__repr__()
        name, args, kwargs = self.call
        shown = [_short(x) for x in args] + [f"{key}={_short(x)}" for key, x in kwargs.items()]
        return f"{name}({', '.join(shown)})"


Transformation.__module__ = "jgrad"  # where users import it from

# What wrappers take; they don't know the states of other libraries.
if 0:
    AnyTransformation: TypeAlias = Pair[Inner]
else:
    AnyTransformation: TypeAlias = Transformation[Inner] | Pair  # type: ignore[misc,no-redef]


def _short(x: object) -> str:
    if _is_transformation(x):
        return repr(_Leaf(x))  # in full length, because readers look for what is inside
    text = repr(jax.tree.map(_Leaf, x, is_leaf=_is_transformation))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _is_transformation(x: object) -> bool:
    return isinstance(x, optax.GradientTransformation)


class _Leaf:
    """An argument, or a leaf of one: arrays by dtype and shape, functions by name."""

    def __init__(self, x: Leaf) -> None:
        self._x = x

    def __repr__(self) -> str:
        x = self._x
        if isinstance(x, Transformation):
            return repr(x)
        if _is_transformation(x):
            return f"{x.update.__qualname__.partition('.')[0]}(...)"
        is_function = callable(x) and hasattr(x, "__name__")
        return x.__name__ if is_function else in_short(x)


# ---- what is known of names --------------------------------------------------------------------


_KNOWN: list[ModuleType] = []  # or nothing yet
OPTIONS_OF: dict[str, tuple[str, ...]] = {}  # of each factory, as they are defined


def explains_by(names: ModuleType) -> None:
    """Enters what is known of names."""
    _KNOWN[:] = [names]


def known_names() -> ModuleType:
    """What was entered."""
    return _KNOWN[0]


# ---- functions of users ------------------------------------------------------------------------

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def explained(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function, whose errors explain arguments that it does not have, or cannot use.

    The signature stays, and so do Python's own errors where nothing is known to be meant. A
    transformation that it returns knows the call.
    """
    name, parameters = function.__name__, list(inspect.signature(function).parameters.values())
    defaults = {x.name: x.default for x in parameters}
    most = sum(x.kind is not x.KEYWORD_ONLY for x in parameters)
    OPTIONS_OF[name] = tuple(defaults)

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if len(args) > most or not kwargs.keys() <= defaults.keys():
            known_names().refuse_arguments(name, len(args), kwargs, parameters)
        result = function(*args, **kwargs)  # which has checked each value by itself
        known_names().check_needs(name, kwargs, defaults)
        if isinstance(result, Transformation):
            result.call = name, args, kwargs
        return result

    return checked


def keywords_of(update: Callable[..., object], handed_on: Sequence[str] = ()) -> tuple[str, ...]:
    """The keywords that an `update` takes itself; `handed_on` are those of its extra arguments."""
    parameters = inspect.signature(update).parameters.values()
    return (*(x.name for x in parameters if x.kind is x.KEYWORD_ONLY), *handed_on)
