"""What wrappers tell the transformations inside: one record, current while they call these.

A wrapper calls what is inside of it in a `with telling(...)`. What is called there asks for the
record by `told`, whatever stands between, and an `update` keeps its keywords for users. After the
call nobody is told anything.

Arrays are known by identity, and belong to a trace. In another one, as that of a branch of another
library, of `jax.jit` or of `jax.vmap`, there is no decision, nothing is noted, and no wrapper says
what follows: what is inside computes as if it were alone, and the wrapper does its part afterwards.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from jgrad._inputs.around import Then
from jgrad._inputs.commit import Commit
from jgrad._inputs.notes import Notes
from jgrad._trees.contexts import during
from jgrad._trees.traces import trace_state
from jgrad._trees.trees import PyTree


class Told(NamedTuple):
    """What the wrappers around say.

    Attributes:
      commit: whether the update is committed, if a wrapper decides it; None where it always is.
      finite: whether gradients are finite, for what leaves them out by itself; None if nobody says.
      notes: where numbers of this update are noted, if a wrapper reports them; else None.
      then: what a wrapper does with the updates, if it says so.
      undecayed: names of leaves whose norm a wrapper keeps: decay would act against it.
      trace: in which `commit` and `finite` are read, by `here`; the others look at it themselves.
    """

    commit: Commit | None = None
    finite: bool | jax.Array | None = None
    notes: Notes | None = None
    then: Then | None = None
    undecayed: frozenset[str] = frozenset()
    trace: Hashable = None

    @property
    def here(self) -> "Told":
        """What holds in this trace."""
        if self is NOTHING or self.trace == trace_state():
            return self
        return self._replace(commit=None, finite=None)

    def commit_of(self, gradients: PyTree) -> Commit | None:
        """The decision, if it is one about these gradients. One that clips has to know them."""
        commit = self.here.commit
        is_known = commit is None or not commit.clips or commit.is_finite(gradients)
        return commit if is_known else None

    def finite_with(self, given: bool | jax.Array | None) -> bool | jax.Array | None:
        """`finite`, and what a call says of it by an argument."""
        if self.finite is None or given is None:
            return given if self.finite is None else self.finite
        return self.finite & given

    @property
    def is_dry(self) -> bool:
        """Whether gradients stand for those to come, and arguments of `update` may be missing.

        Not inside of a `jax.jit`, which keeps its program for the calls to come.
        """
        return self.notes is not None and self.notes.is_dry and self.notes.is_here


NOTHING = Told()
_told: ContextVar[Told] = ContextVar("told", default=NOTHING)

# The record of the wrappers around.
told: Callable[[], Told] = _told.get


def telling(**said: Any) -> AbstractContextManager[Told]:
    """Tells this to what is called meanwhile, beside what was told before."""
    return during(_told, told().here._replace(**said, trace=trace_state()))
