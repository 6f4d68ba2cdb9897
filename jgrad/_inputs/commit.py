"""Whether an update is committed, as a wrapper tells it to the transformations inside.

`skip_nonfinite` could compute an update and choose between new and old arrays afterwards. Each new
moment would then be read by the choice and by the step, and XLA would write it out for both. So the
wrapper passes a `Commit` inwards, as the extra argument `commit`, and every transformation of this
library makes the choice itself, before anything reads its new moments. `optax.chain` and the like
hand extra arguments on; a transformation that does not know `commit` ignores it.

A `Commit` exists while a program is traced. It remembers by identity which arrays need no further
look: the gradients, and what is computed from such arrays alone by transformations that know how.
The wrapper looks at the others itself.
"""

from collections.abc import Callable
from typing import Any

import jax

from jgrad._trees import checks
from jgrad._trees.trees import PyTree

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX 0.7
    from jax.core import get_opaque_trace_state


class Commit:
    """The decision about one update, and the arrays that it covers.

    A covered array is finite if the update is committed. If it is an update or a part of a state,
    it is zero or the old array if the update is not committed. Counters are left to the wrapper.
    """

    def __init__(
        self,
        gradients: PyTree,
        finite: jax.Array,
        agreed: Callable[[jax.Array], jax.Array] = lambda flag: flag,
    ) -> None:
        """`finite` says whether the gradients are; `agreed` makes all devices decide alike."""
        self._flag = finite
        self._agreed = agreed
        self._is_read = False
        self._trace = get_opaque_trace_state()
        self._gradients = _arrays(gradients)
        self._covered = dict(self._gradients)

    @property
    def flag(self) -> jax.Array:
        """Whether the update is committed, a bool scalar."""
        self._is_read = True
        return self._flag

    def covers(self, tree: PyTree) -> bool:
        """Whether each inexact array of the tree is covered."""
        return _arrays(tree).keys() <= self._covered.keys()

    def cover(self, tree: PyTree) -> None:
        """Says that the arrays are covered."""
        self._covered |= _arrays(tree)

    def offer(self, finite: jax.Array, tree: PyTree) -> None:
        """Says whether the arrays are finite, for a transformation that has their norm anyway.

        Taken if all gradients are among them and nobody read the flag; then what computed the flag
        before is not in the compiled program. Not from inside a branch or a loop.
        """
        same_trace = get_opaque_trace_state() == self._trace
        if same_trace and not self._is_read and _arrays(tree).keys() >= self._gradients.keys():
            self._flag = self._agreed(finite)


def inward(commit: Commit | None) -> dict[str, Commit]:
    """The extra argument for a transformation inside."""
    return {} if commit is None else {"commit": commit}


def _arrays(tree: PyTree) -> dict[int, Any]:
    """By identity. The arrays are kept, so that no other gets the identity of one."""
    return {id(x): x for x in jax.tree.leaves(tree) if checks.is_inexact(x)}
