"""A share of an update: one layer of a stack, or all leaves that no stack has.

`step_in_backward` updates a layer as soon as its gradient is known, so a transformation is called
with the leaves of one share, and None for all others. While it is, a `Share` is `current`. What an
update computes of all leaves together asks it for the number of all shares (`of_all`), what rounds
at random for the place of a layer in its stack, and what needs the gradients of the whole model
at once is refused (`refuse`).
"""

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._trees.traces import trace_state

_STEP = "step_in_backward"

# A function of the library, and which of its numbers it is.
Key = tuple[str, int]


class Combine(NamedTuple):
    """How the numbers of two shares become one.

    Attributes:
      two: of both.
      neutral: changes nothing: each array has the shape and the dtype of a number.
    """

    two: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]


def _like(value: float) -> Callable[[Any], Any]:
    return lambda x: jax.tree.map(lambda a: jnp.full(a.shape, value, a.dtype), x)


EVERY = Combine(jnp.logical_and, _like(True))
SUM = Combine(lambda a, b: a + b, _like(0))


class Share:
    """One share, while its update is traced.

    Attributes:
      layer: the number of the layer, which may be traced; None for what is in no stack.
      parts: of each number of all shares, what this one has to say.
    """

    def __init__(
        self,
        layer: Any = None,
        known: Mapping[Key, Any] | None = None,
        others: Mapping[Key, Any] | None = None,
        *,
        trusts: bool = False,
        begins: bool = False,
    ) -> None:
        """Of one update.

        Args:
          layer: see above.
          known: the numbers of all shares, where they are.
          others: those of all other shares; the number is then that of both.
          trusts: whether all transformations of other libraries are elementwise, as a user says.
          begins: whether it is an `init`, which has no gradients.
        """
        self.layer = layer
        self.parts: dict[Key, tuple[Combine, Any]] = {}
        self._known, self._others = known or {}, others or {}
        self._trusts, self._begins, self._trace = trusts or begins, begins, trace_state()
        self._seen: dict[int, Any] = {}  # arrays by identity, which are kept for it

    def number(self, function: str, combine: Combine, part: Any) -> Any:
        """The number of all shares."""
        if self._begins:
            return part
        if trace_state() != self._trace:
            expected = "expected it outside of branches, loops and `jax.jit`"
            raise ValueError(
                f"{_STEP}: `{function}` computes a number of all gradients in a trace of its own, "
                f"{expected}: `branch=False` in `skip_nonfinite`, `every=1` in `watch`."
            )
        index = sum(name == function for name, _ in self.parts)
        key = (function, index)
        self.parts[key] = combine, part
        if key in self._known:
            return self._known[key]
        return combine.two(self._others[key], part) if key in self._others else part

    def add(self, tree: Any) -> None:
        """Says that arrays are made of gradients of this share, by this library."""
        self._seen |= {id(x): x for x in jax.tree.leaves(tree)}

    def check(self, function: str, tree: Any) -> None:
        """No arrays that another library has made: it may have looked at all gradients."""
        if not self._trusts and any(id(x) not in self._seen for x in jax.tree.leaves(tree)):
            raise ValueError(
                f"{_STEP}: `tx`: a transformation of another library, before `{function}` or inside "
                "of it, is given one layer at a time; say `elementwise=True` if it computes each "
                "element by itself, or take the ordinary step."
            )


_current: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share", default=None)


def current() -> Share | None:
    """The share whose update is traced, if any."""
    return _current.get()


@contextmanager
def within(share: Share) -> Iterator[Share]:
    """Makes a share the current one."""
    token = _current.set(share)
    try:
        yield share
    finally:
        _current.reset(token)


def of_all(function: str, combine: Combine, part: Any) -> Any:
    """What all shares together say; `part` itself outside of `step_in_backward`.

    Args:
      function: whose number it is, for messages.
      combine: how two of them become one.
      part: a tree of arrays, that of the leaves at hand.
    """
    share = current()
    return part if share is None else share.number(function, combine, part)


def in_stack(keys: Any, size: int) -> Any:
    """The keys of an array's random bits, where it is a layer of so many elements.

    Its elements then have the bits that they have in the stack: the hash is one of the first key
    and the number of an element, added.
    """
    share = current()
    if share is None or share.layer is None:
        return keys
    before = jnp.asarray(share.layer).astype(jnp.uint32) * jnp.uint32(size % 2**32)
    return jnp.stack([jnp.asarray(keys[0]) + before, jnp.asarray(keys[1])])


def refuse(function: str, remedy: str) -> None:
    """An error where a share is updated: the function needs all gradients at once."""
    if current() is not None:
        raise ValueError(f"{_STEP}: `{function}` needs the gradients of all layers: {remedy}.")
