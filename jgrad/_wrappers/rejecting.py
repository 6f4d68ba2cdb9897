"""What wrappers share that reject updates: `skip_nonfinite` and `skip_spikes`.

A decision goes inwards as a `Commit`. What comes back unsettled is chosen afterwards, and a wrapper
around, which has a decision of its own, is told that nothing is left to choose.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.commit import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._trees import checks, trees, values
from jgrad._trees.trees import PyTree
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.decisions import Flag


class RejectingInputs(Inputs):
    """The input of an update that may be rejected, what is around it and what is inside.

    Args:
      function: the name of the wrapper, for messages.
      updates: gradients, or updates of a transformation before.
      params: parameters, or None.
      state: of the transformation inside.
      extra_args: the other arguments of the call.

    Attributes:
      params: see above.
      state: see above; once the update was handed over, with zeros for the sums that it made.
      extra_args: what is handed on.
      leaves_out: whether something inside leaves out gradients by itself, so that its window goes
        on.
      outer: the decision of a wrapper around, or None. Where something inside leaves gradients out,
        it is the decision about these.
      finite: the argument `finite`, which is for what leaves gradients out.
    """

    def __init__(
        self,
        function: str,
        updates: PyTree,
        params: PyTree,
        state: PyTree,
        extra_args: dict[str, Any],
    ) -> None:
        super().__init__(function, updates, params)
        self.state, self.extra_args, self.params = state, extra_args, params
        self.leaves_out = bool(inside.parts(state, inside.REJECTED))
        self.outer: Commit | None = extra_args.pop("commit", None)
        self.finite: Flag | None = None
        if self.leaves_out:
            self.outer = None if self.outer is None else self.outer.of_windows
            self.finite = extra_args.get("finite")
            values.flag(function, "finite", self.finite)

    def hand_over(
        self,
        tx: optax.GradientTransformationExtraArgs,
        commit: Commit,
        gradients: PyTree,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state from inside, where the decision and `extra` are known, too."""
        known = {"commit": commit.for_windows() if self.leaves_out else commit}
        steps, new = tx.update(
            gradients, self.state, self.params, **self.extra_args | known | extra
        )
        if self.leaves_out:
            self.state = _with_sums(self.state, new)
        if not commit.has_settled(steps):
            steps = self.directions(trees.flatten(steps)[0])
        return steps, new

    def chosen(
        self, commit: Commit, use: Flag, new: tuple[PyTree, PyTree], old: PyTree, *, settles: bool
    ) -> tuple[PyTree, PyTree]:
        """Updates and state where `use` is True, else zeros and the old state.

        Args:
          commit: the decision, as it was handed inwards.
          use: one bool, which may be traced.
          new: updates and state, as they came from inside.
          old: the old state.
          settles: whether what is settled by `commit` needs no choice.
        """
        if not settles:
            return decisions.choose(use, new, (self.zeros(), old))

        def is_settled(u: Any, zero: Any) -> bool:
            is_kept = commit.is_old_or_new(u, zero)
            return is_kept or (checks.is_inexact(u) and commit.has_settled(u))

        return (
            decisions.choose(use, new[0], self.zeros(), is_settled),
            decisions.choose(use, new[1], old, commit.is_old_or_new),
        )

    def counted(self, new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
        """The wrapper's own counters, which stay where a wrapper around rejects the update."""
        if self.outer is None:
            return new
        return tuple(jnp.where(self.outer.flag, n, o) for n, o in zip(new, old, strict=True))


def tell(
    outer: Commit, updates: PyTree, new: PyTree, old: PyTree, of: Commit | None = None
) -> None:
    """Says to a wrapper around what is right whatever it decides: all, or what `of` has settled."""
    outer.settle([u for u in jax.tree.leaves(updates) if of is None or of.has_settled(u)])
    for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        if of is None or of.is_old_or_new(n, o):
            outer.keep([n], [o])


def rejected(old: PyTree, new: PyTree, finite: jax.Array) -> PyTree:
    """What stays of an update that is rejected: the old state, or what its parts say."""

    def of_part(o: Any, n: Any) -> Any:
        return o.__jgrad_rejected__(n, None if o is old else finite) if _is_window(o) else o

    return jax.tree.map(of_part, old, new, is_leaf=_is_window)


def _with_sums(old: PyTree, new: PyTree) -> PyTree:
    """The old state with zeros for each sum of gradients that an update has made for its window."""

    def of_part(o: Any, n: Any) -> Any:
        if not _is_window(o) or o.total is not None or n.total is None:
            return o
        return o._replace(total=jax.tree.map(numerics.zeros_like, n.total))

    return jax.tree.map(of_part, old, new, is_leaf=_is_window)


def _is_window(x: Any) -> bool:
    """Whether a part of a state is that of a wrapper which leaves gradients out."""
    return inside.says(x, inside.REJECTED)
