"""What transformations know of an update anyway, for a wrapper that reports it.

`watch` tells `Notes` to what is inside (see `told`), which adds numbers that it computes in any
case: a learning rate, a factor, ratios. Nothing is computed where no `Notes` came.

A note belongs to the trace in which its `Notes` was made. One from inside a branch or a loop that
knows nothing of notes is left out, so that no traced value leaves it. A wrapper of this library
that runs what is inside in a branch hands out the notes as results: `decisions.noted_branch`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees.traces import trace_state
from jgrad._trees.trees import PyTree


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

    def add_number(
        self, name: str, option: PyTree, *, was_one: bool, leaves: Iterable[tuple[str, Any]]
    ) -> None:
        """One number where the option is one, else `name/path` of each leaf.

        In the form that the first update had: of leaves that have not one number any more, one is
        NaN. Of an array, the mean of its elements. The form is that of the option and not of the
        leaves, of which `step_in_backward` shows some, or none: names are those of all of them.

        Args:
          name: of the option.
          option: of this update; one number, or a tree.
          was_one: whether it is one number in other updates.
          leaves: the path of each leaf that is updated, and its number.
        """
        noted = list(leaves)
        one, has_each = was_one, not was_one
        if noted:  # the state knows it best: it may be that of another recipe
            known: Iterable[str] = () if self.old is None else self.old
            one = unique(name, self.names) in known  # not given to a transformation before this one
            has_each = unique(f"{name}/{noted[0][0]}", self.names) in known
        is_one = jax.tree_util.all_leaves([option])
        if is_one and not (has_each and not one):
            self.add(name, jnp.mean(jnp.asarray(option)))
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
