"""Transformations whose repr is the call that made them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jgrad._trees.forms import in_short

_SHOWN = 80  # characters of one argument


class Transformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax: no types
    """What a factory of this library returns: `init` and `update`, and how it was called."""

    # optax's types say that a state is an array or a tree of arrays, which no NamedTuple is.
    init: Callable[[Any], Any]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Callable[..., tuple[Any, Any]]
    call: tuple[str, tuple[Any, ...], Mapping[str, Any]] | None = None

    def __repr__(self) -> str:
        if self.call is None:
            return super().__repr__()
        name, args, kwargs = self.call
        given = [_short(x) for x in args] + [f"{key}={_short(x)}" for key, x in kwargs.items()]
        return f"{name}({', '.join(given)})"


def _short(x: Any) -> str:
    if _is_transformation(x):
        return repr(_Leaf(x))  # as long as it is: what stands inside is what one looks for
    text = repr(jax.tree.map(_Leaf, x, is_leaf=_is_transformation))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_transformation(x: Any) -> bool:
    return isinstance(x, optax.GradientTransformation)


class _Leaf:
    """An argument, or a leaf of one: arrays by dtype and shape, functions by name."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __repr__(self) -> str:
        x = self._x
        if isinstance(x, Transformation):
            return repr(x)
        if _is_transformation(x):
            return f"{x.update.__qualname__.partition('.')[0]}(...)"
        is_function = callable(x) and hasattr(x, "__name__")
        return x.__name__ if is_function else in_short(x)
