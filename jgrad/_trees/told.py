"""What wrappers tell the transformations inside: one record, current while these are called.

A wrapper calls the transformation inside within `with telling(...)`. Code that is called there gets
the record by `told`, whatever comes in between, so the keywords of `update` remain free for users.
After the call, the record is gone.

Arrays are recognized by identity, and belong to a trace. In another trace, such as that of a branch
of another library, of `jax.jit` or of `jax.vmap`, the record is empty: transformations inside
compute as if they were alone, and the wrapper does its part afterwards.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jgrad._trees import unpromised
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._trees.trees import is_leaf

T = TypeVar("T")


@contextmanager
def during(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Sets a variable for the duration of a `with`."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def trace_state() -> Hashable:
    """A value that is equal within one trace, and differs in any other, such as that of a branch.

    Where JAX does not say it, each is another one: what wrappers tell each other is then forgotten,
    and they compute it again.
    """
    state = unpromised.find("get_opaque_trace_state")
    return object() if state is None else state()


class Stack(NamedTuple):
    """Where the layers of a leaf are that `step_in_backward` updates one by one.

    Attributes:
      axis: of the leaf.
      layers: how many there are.
      length: of each along the axis.
    """

    axis: int
    layers: int
    length: int = 1


class Told(NamedTuple):
    """What the wrappers around a transformation tell it.

    Attributes:
      commit: a `Commit`, whether the update is committed, if a wrapper decides it; None where it
        always is.
      windows: one that is told to what leaves out gradients by itself, as `accumulate` does, and to
        nobody else: what precedes that or follows it sees updates in each call.
      finite: whether gradients are finite, for what leaves them out by itself; None if unknown.
      notes: by name, numbers of the last update, if a wrapper reports them; see `note`.
      is_dry: whether gradients stand for those to come, and arguments of `update` may be missing.
      trace: in which those before are told, by `told`; the others look at it themselves.
      then: a `Then`, what a wrapper does with the updates, if it says so.
      undecayed: checks weight decays, if a wrapper keeps the norms of leaves.
      share: the `Share` whose update is traced, in `step_in_backward`.
      stacks: by path, those of the model, in either form of that step.
      directions: the names and states of each `scale_by_*` whose `init` runs, if a wrapper asks.
    """

    commit: Any = None
    windows: Any = None
    finite: bool | jax.Array | None = None
    notes: dict[str, jax.Array] | None = None
    is_dry: bool = False
    trace: Hashable = None
    then: Any = None
    undecayed: Any = None
    share: Any = None
    stacks: Mapping[KeyPath, Stack] = MappingProxyType({})
    directions: list[tuple[str, object]] | None = None

    def finite_with(self, argument: bool | jax.Array | None) -> bool | jax.Array | None:
        """`finite`, and what a call says of it by an argument."""
        if self.finite is None or argument is None:
            return argument if self.finite is None else self.finite
        return self.finite & argument


NOTHING = Told()
_told: ContextVar[Told] = ContextVar("told", default=NOTHING)


def told() -> Told:
    """The record that is valid in this trace; `jax.jit` caches its program for later calls."""
    record = _told.get()
    if record is NOTHING or record.trace == trace_state():
        return record
    return record._replace(
        commit=None, windows=None, finite=None, notes=None, is_dry=False, directions=None
    )


def note(notes: dict[str, jax.Array] | None, name: str, value: jax.typing.ArrayLike) -> None:
    """Notes a number that is known anyway, if a wrapper reports it."""
    if notes is not None:
        notes[name] = jnp.asarray(value).astype(jnp.float32)


def telling(**changes: Any) -> AbstractContextManager[Told]:
    """Adds to the record for everything that is called meanwhile."""
    return during(_told, told()._replace(**changes, trace=trace_state()))


# ---- in `step_in_backward` ---------------------------------------------------------------------

STEP = "step_in_backward"
IN_PARTS = "a larger batch, as micro-batches by `jax.lax.map` of a `jax.checkpoint` in `block`"


class Combine(NamedTuple):
    """How the numbers of two shares become one.

    Attributes:
      two: of both.
      neutral: changes nothing: each array has the shape and the dtype of a number.
    """

    two: Callable[[PyTree, PyTree], PyTree]
    neutral: Callable[[PyTree], PyTree]


def _like(value: float) -> Callable[[PyTree], PyTree]:
    return lambda x: jax.tree.map(lambda a: jnp.full(a.shape, value, a.dtype), x)


EVERY = Combine(jnp.logical_and, _like(True))
SUM = Combine(lambda a, b: a + b, _like(0))


def over_shares(function: str, combine: Combine, part: PyTree) -> PyTree:
    """What all shares together say; `part` itself outside of `step_in_backward`.

    Args:
      function: whose number it is, for messages.
      combine: how two of them become one.
      part: a tree of arrays, that of the leaves at hand.
    """
    share = told().share
    return part if share is None else share.number(function, combine, part)


def stacked_leaves(shapes: PyTree) -> Iterator[tuple[int, Leaf, Stack]]:
    """(number, leaf, where its layers are) of each leaf of a stack of `step_in_backward`."""
    stacks = told().stacks
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf)
    for i, (path, x) in enumerate(leaves):
        if x is not None and path in stacks:
            yield i, x, stacks[path]


def refuse(function: str, remedy: str) -> None:
    """An error where a share is updated: the function works with all of them.

    Asked by `init`, which is called for each share before there is an update.
    """
    if told().share is not None:
        reason = "which needs the gradients of all layers at once"
        raise ValueError(f"{STEP}: `tx`: `{function}`, {reason}; {remedy}.")
