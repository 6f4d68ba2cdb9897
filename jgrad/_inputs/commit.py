"""Whether an update is committed, as a wrapper tells it to the transformations inside.

`skip_nonfinite` could compute an update and choose between new and old arrays afterwards. Each new
moment would then be read by the choice and by the step, and XLA would write it out for both. So the
wrapper tells a `Commit` to what is inside (see `told`), and every transformation of this library
makes the choice itself, before anything reads its new moments. Others know nothing of it.

A `Commit` exists while a program is traced. It remembers arrays by identity. *Finite* are the
gradients, and what is computed from such arrays alone by a transformation that makes nothing
non-finite. *Settled* are updates and arrays of a state that are right whatever the decision is:
zero, or the old array, if the update is not committed. The wrapper looks at all others. So whatever
stands between both transformations, and makes other arrays or another trace, costs time and no
more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees import checks
from jgrad._trees.contexts import trace_state
from jgrad._trees.trees import PyTree


class Commit:
    """The decision about one update, and what is known of its arrays.

    Attributes:
      clips: whether what overflows in a committed update is to become the largest number; False
        where the gradients may be infinite, which nobody would see then.
      is_left_out: whether gradients that are not committed are left out by what is inside.
    """

    def __init__(
        self,
        gradients: PyTree,
        finite: jax.Array,
        agreed: Callable[[jax.Array], jax.Array] = lambda flag: flag,
        outer: "Commit | None" = None,
    ) -> None:
        """Of gradients that are finite where this update is committed.

        Args:
          gradients: see above.
          finite: whether they are.
          agreed: makes all devices decide alike.
          outer: the decision of a wrapper around; the update is committed if both say so.
        """
        self.clips = True
        self.is_left_out = False
        self._flag = finite
        self._agreed = agreed
        self._outer = outer
        self._is_joined = outer is None
        self._is_read = False
        self._trace = trace_state()
        self._gradients = _arrays(gradients)
        self._finite = dict(self._gradients)
        self._updates: dict[int, Any] = {}
        self._states: dict[int, tuple[Any, Any]] = {}
        self._of_windows: Commit | None = None
        self._is_always = False  # and no reference to itself, which would keep tracers alive

    @classmethod
    def always(cls, gradients: PyTree) -> "Commit":
        """Of gradients that are finite: the update is committed."""
        commit = cls(gradients, jnp.asarray(True))
        commit._is_always = True
        return commit

    @classmethod
    def by_loss(cls, gradients: PyTree, accepted: jax.Array, outer: "Commit | None") -> "Commit":
        """Of a decision that says nothing of the gradients; finite is what `outer` knows to be.

        No norm of the gradients is taken in the place of this flag.
        """
        is_known = outer is not None and outer.is_finite(gradients)
        commit = cls(gradients if is_known else (), accepted, outer=outer)
        commit.clips, commit._is_read = is_known, True
        return commit

    def for_windows(self) -> "Commit":
        """Knows of no array, and hands this one to transformations that leave gradients out.

        What precedes them or follows them then computes as if every update were committed: it sees
        updates in calls whose gradients are left out, too.
        """
        commit = Commit((), jnp.asarray(True))
        commit._of_windows = self
        return commit

    def leave_out(self) -> None:
        """Says that gradients which are not committed are left out of a window, here."""
        self.is_left_out = True
        if self._outer is not None:
            self._outer.leave_out()

    @property
    def of_windows(self) -> "Commit | None":
        """The same for a transformation that leaves out gradients which are not finite by itself.

        It goes on without them. Its results are settled if they are right whatever these gradients
        are. None where nothing was seen of such a transformation.
        """
        return self if self._is_always else self._of_windows

    @property
    def flag(self) -> jax.Array:
        """Whether the update is committed, a bool scalar."""
        self._is_read = True
        if self._is_joined or self._outer is None:
            return self._flag
        flag = self._flag & self._outer.flag
        if trace_state() == self._trace:  # else it is a tracer of a branch
            self._flag, self._is_joined = flag, True
        return flag

    def is_finite(self, tree: PyTree) -> bool:
        """Whether each inexact array of the tree is finite if the update is committed."""
        return _arrays(tree).keys() <= self._finite.keys() | self._updates.keys()

    def add_finite(self, new: PyTree, of: PyTree) -> None:
        """Says that new arrays are finite if those are of which they are computed."""
        for commit in filter(None, (self, self.of_windows)):
            if commit.is_finite(of):
                commit._finite |= _arrays(new)

    def has_settled(self, updates: PyTree) -> bool:
        """Whether each inexact array is finite, and zero if the update is not committed."""
        return _arrays(updates).keys() <= self._updates.keys()

    def settle(self, updates: PyTree) -> None:
        """Says that the updates are settled."""
        self._updates |= _arrays(updates)

    def settle_moved(self, new: PyTree, of: PyTree) -> None:
        """Says that new arrays are settled if others are, whose elements they have."""
        for commit in filter(None, (self, self.of_windows)):
            if commit.has_settled(of):
                commit.settle(new)

    def has_kept(self, new: Any, old: Any) -> bool:
        """Whether an array is no inexact one, or finite, and the old one if not committed."""
        return not checks.is_inexact(new) or self.is_old_or_new(new, old)

    def is_old_or_new(self, new: Any, old: Any) -> bool:
        """Whether an array is the old one if the update is not committed, of any dtype."""
        return new is old or self._states.get(id(new), (None, None))[1] is old

    def keep(self, new: Sequence[Any], old: Sequence[Any]) -> None:
        """Says that leaves of a state are settled, each in the place of its old one alone."""
        for pair in zip(new, old, strict=True):
            if pair[0] is not None:
                arrays = zip(*map(jax.tree.leaves, pair), strict=True)
                self._states |= {id(n): (n, o) for n, o in arrays}

    def take_finite(self, finite: jax.Array, tree: PyTree) -> None:
        """Says whether the arrays are finite, for a transformation that has their norm anyway.

        Taken if all gradients are among them and nobody read the flag; then what computed the flag
        before is not in the compiled program.
        """
        if self._outer is not None:
            self._outer.take_finite(finite, tree)
        if not self._is_read and _arrays(tree).keys() >= self._gradients.keys():
            self._flag = self._agreed(finite)


def _arrays(tree: PyTree) -> dict[int, Any]:
    """By identity. The arrays are kept, so that no other gets the identity of one."""
    return {id(x): x for x in jax.tree.leaves(tree) if checks.is_inexact(x)}
