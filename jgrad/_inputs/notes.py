"""What transformations know of an update anyway, for a wrapper that reports it.

`watch` tells `Notes` to what is inside (see `told`), which adds numbers that it computes in any
case: a learning rate, a factor, ratios. Nothing is computed where no `Notes` came.

A note belongs to the trace in which its `Notes` was made. One from inside a branch or a loop that
knows nothing of notes is left out, so that no traced value leaves it. A wrapper of this library
that runs what is inside in a branch hands out the notes as results: `decisions.noted_branch`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees.traces import trace_state


class Notes:
    """Numbers of one update, by name.

    Attributes:
      old: the numbers of the update before; None where only the form of the new ones is asked for,
        from `init`, before there is an update.
      new: what was added, in float32.
    """

    def __init__(self, old: Mapping[str, jax.Array] | None, taken: Iterable[str] = ()) -> None:
        """`taken` are names that are given already."""
        self.old, self.new = old, dict[str, jax.Array]()
        self._taken = set(taken)
        self._trace = trace_state()

    @property
    def is_dry(self) -> bool:
        """Whether gradients stand for those to come, and arguments of `update` may be missing."""
        return self.old is None

    @property
    def is_here(self) -> bool:
        """Whether it was made in this trace; elsewhere nothing may be added."""
        return bool(trace_state() == self._trace)

    @property
    def names(self) -> set[str]:
        """All that are given."""
        return {*self._taken, *self.new}

    def add(self, name: str, value: Any) -> None:
        """Notes an array or a number; the second of a name is called `name#1`."""
        if self.is_here:
            self.new[unique(name, self.names)] = jnp.asarray(value).astype(jnp.float32)

    def add_leaves(self, name: str, paths: Sequence[str], values: Sequence[Any]) -> None:
        """One number if all leaves share the object, else `name/path` of each; None for no number.

        In the form that the first update had: of leaves that do not share it any more, one number
        is NaN. Of an array, the mean of its elements.
        """
        noted = [(path, x) for path, x in zip(paths, values, strict=True) if x is not None]
        if not noted:
            return
        first = noted[0][1]
        is_shared = all(x is first for _, x in noted)
        known: Iterable[str] = () if self.old is None else self.old
        one = unique(name, self.names) in known  # not given to a transformation before this one
        has_each = unique(f"{name}/{noted[0][0]}", self.names) in known
        if is_shared and not (has_each and not one):
            self.add(name, jnp.mean(jnp.asarray(first)))
        elif one and not has_each:
            self.add(name, jnp.nan)
        else:
            for path, x in noted:
                self.add(f"{name}/{path}", jnp.mean(jnp.asarray(x)))


def unique(name: str, taken: Iterable[str]) -> str:
    """The name, or with the first number behind it that makes it another than those taken."""
    key, i = name, 0
    while key in taken:
        i += 1
        key = f"{name}#{i}"
    return key
