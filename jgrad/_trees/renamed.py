"""Names as they were before: they work for one release, and a warning says what they are now."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The user's line is the first above them: `optax.inject_hyperparams` stands between both.
_NOT_THE_USER = ("jgrad", "optax")


def renamed(
    **names: str | tuple[str, ...],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """The same function, which takes keyword arguments under their old names too.

    Its signature has the new names alone, so that `help` and type checkers know no others.

    Args:
      names: the new name of each old one; several, of an option that served several methods. The
        outermost decorator.

    Example:
      >>> @renamed(cut_over="shard_over")
      ... def state_shardings(tx, params, *, shard_over=None): ...
    """

    def decorator(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        positional = list(inspect.signature(function).parameters)

        def new_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
            """The keyword arguments under their new names."""
            if names.keys().isdisjoint(kwargs):
                return kwargs
            taken = {*positional[: len(args)], *kwargs}
            renamed_kwargs = {name: x for name, x in kwargs.items() if name not in names}
            for old in filter(names.__contains__, kwargs):
                renamed_to = names[old]
                new_ones = renamed_to if isinstance(renamed_to, tuple) else (renamed_to,)
                for new in new_ones:
                    if new in taken:
                        problem = f"expected `{new}` alone, which is its new name"
                        raise TypeError(f"{function.__name__}: `{old}`: beside `{new}`, {problem}.")
                    taken.add(new)
                    renamed_kwargs[new] = kwargs[old]
                expected = " and ".join(map("`{}`".format, new_ones))
                _warn(f"{function.__name__}: `{old}`: an old name", expected)
            return renamed_kwargs

        return with_arguments(function, new_names)

    return decorator


def with_arguments(
    function: Callable[_Arguments, _Result],
    read: Callable[[tuple[Any, ...], Mapping[str, Any]], Mapping[str, Any]],
) -> Callable[_Arguments, _Result]:
    """The same function, with the keyword arguments that `read` makes of those that were given.

    Its signature stays, and binds what a call takes: `optax.inject_hyperparams` calls by that.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **read(args, kwargs))

    class Signature(type(signature)):  # type: ignore[misc]  # of a decorator below this one
        """Binds by `read`, too."""

        def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
            return super().bind(*args, **read(args, kwargs))

        def bind_partial(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
            return super().bind_partial(*args, **read(args, kwargs))

    parameters = list(signature.parameters.values())
    what_binds = Signature(parameters, return_annotation=signature.return_annotation)
    call.__signature__ = what_binds  # type: ignore[attr-defined]  # what `inspect` reads
    return call


def renamed_attribute(old: str, new: str) -> Any:
    """What an attribute was before, for reading: `step = renamed_attribute("step", "done")`."""
    return property(lambda self: by_old_name(self, old, new), doc=f"The old name of `{new}`.")


def by_old_name(x: Any, old: str, new: str) -> Any:
    """An attribute that was asked for by its old name; for a property of a NamedTuple."""
    _warn(f"{type(x).__name__}: `{old}`: an old name", f"`{new}`")
    return getattr(x, new)


def warn_of_name(old: str, new: str) -> None:
    """Says that a function is called by its old name."""
    _warn(f"{old}: an old name", f"`{new}`")


def _warn(what: str, expected: str) -> None:
    # Not a DeprecationWarning, which Python hides unless the call is in a script itself.
    text = f"{what}, expected {expected}; the next release does not know it."
    warnings.warn(text, FutureWarning, stacklevel=_level_of_the_user())


def _level_of_the_user() -> int:
    """Which frame above `_warn` is that of the user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and _package(frame.f_globals) in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    return level


def _package(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
