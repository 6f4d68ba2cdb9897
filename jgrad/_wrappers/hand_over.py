"""The inputs of a wrapper's update, and the call of the transformation inside.

`WrapperInputs` is for wrappers that change gradients, parameters or updates; `RejectingInputs` is
for those that reject updates, and passes a `Commit` to the transformations inside. Whatever comes
back unsettled is chosen afterwards, and an outer wrapper with its own decision learns that nothing
is left to choose.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.around import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._trees import checks, trees
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import telling, told
from jgrad._wrappers import decisions, inside
from jgrad._wrappers.decisions import Flag

Arrays = tuple[jax.Array, ...]


class WrapperInputs(Inputs):
    """The inputs of one update of a wrapper, and the call of the transformation inside.

    Args:
      function: the name of the wrapper, for messages.
      updates: gradients, or updates of a transformation before.
      params: parameters, or None.
      extra_args: the other arguments of the call; all are handed on.

    Attributes:
      outer: the decision of an outer wrapper, or None.
      extra_args: see above.
    """

    def __init__(
        self, function: str, updates: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> None:
        around = told()
        own = around._replace(notes=None, undecayed=None)  # which are for what is inside
        super().__init__(function, updates, params, own)
        self.outer: Commit | None = around.commit
        self.extra_args, self._updates, self._around = extra_args, updates, around

    def hand_over(
        self,
        tx: optax.GradientTransformationExtraArgs,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        stay_finite: bool = False,
        **said: Any,
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state of the transformation inside; see `follow`.

        Args:
          tx: the transformation.
          gradients: what it is to see.
          state: its state.
          params: what it is to optimize.
          stay_finite: True where nothing non-finite is made of finite gradients on the way to
            these; without it `skip_nonfinite` around both looks at all results.
          said: what it is told in addition to what this wrapper is told.
        """
        for commit in self._around.commits if stay_finite else ():
            commit.add_finite(gradients, of=self._updates)
        with telling(**said):
            steps, new = tx.update(gradients, state, params, **self.extra_args)
        self.follow(steps)
        return steps, new

    def follow(self, steps: PyTree) -> None:
        """What is made from here on, by `kept` and `directions`, is made of these updates.

        In an update that is not committed they are zero, or somebody looks at all results.
        """
        outer = self.outer
        self.commit = outer if outer is not None and outer.has_settled(steps) else None

    def moved(self, new: PyTree, of: PyTree) -> PyTree:
        """Updates that have the elements of others in other shapes: zero, where these are."""
        for commit in self._around.commits:
            commit.settle_moved(new, of)
        return new


# ---- rejected updates ----------------------------------------------------------------------------


class RejectingInputs(WrapperInputs):
    """The inputs of an update that may be rejected, with the state inside.

    Attributes:
      params: parameters, or None.
      state: of what is inside; once the update was handed over, with zeros for sums that it made.
      leaves_out: whether something inside leaves out gradients by itself, so that its window goes
        on. Then `outer` is the decision about these.
      finite: whether the gradients are finite, for what leaves them out, if somebody says so.
    """

    def __init__(
        self,
        function: str,
        updates: PyTree,
        params: PyTree,
        state: PyTree,
        extra_args: dict[str, Any],
    ) -> None:
        super().__init__(function, updates, params, extra_args)
        self.commit, self.state, self.params = None, state, params
        self.leaves_out = bool(inside.states_with(state, inside.REJECTED))
        self.finite: Flag | None = None
        if self.leaves_out:
            self.outer = self._around.windows
            given = extra_args.get("finite")
            checks.flag(function, "finite", given)
            self.finite = self._around.finite_with(given)

    def try_it(
        self,
        tx: optax.GradientTransformationExtraArgs,
        commit: Commit,
        gradients: PyTree,
        finite: Flag | None,
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state from inside, where the decision and `finite` are told."""
        of_all, windows = (None, commit) if self.leaves_out else (commit, None)
        with telling(commit=of_all, windows=windows, finite=finite):
            steps, new = tx.update(gradients, self.state, self.params, **self.extra_args)
        if self.leaves_out:
            self.state = _with_sums(self.state, new)
        if not commit.has_settled(steps):
            steps = self.directions(trees.flatten(steps)[0])
        return steps, new

    def chosen(
        self, commit: Commit, use: Flag, new: tuple[PyTree, PyTree], old: PyTree, *, settles: bool
    ) -> tuple[PyTree, PyTree]:
        """Updates and state if `use` is True, else zeros and the old state.

        Args:
          commit: the decision, as it was handed inwards.
          use: one bool, which may be traced.
          new: updates and state, as they came from inside.
          old: the old state.
          settles: whether what is settled by `commit` needs no choice.
        """

        def is_settled(u: jax.Array, zero: jax.Array) -> bool:
            is_kept = commit.is_old_or_new(u, zero)
            return is_kept or (checks.is_inexact(u) and commit.has_settled(u))

        return (
            decisions.choose(use, new[0], self.zeros(), is_settled if settles else None),
            decisions.choose(use, new[1], old, commit.is_old_or_new if settles else None),
        )

    def counted(self, new: Arrays, old: Arrays) -> Arrays:
        """The wrapper's own counters, which stay if an outer wrapper rejects the update."""
        if self.outer is None:
            return new
        return tuple(jnp.where(self.outer.flag, n, o) for n, o in zip(new, old, strict=True))

    def tell(
        self, updates: PyTree, new: PyTree, old: PyTree, *, of: Commit | None, are_finite: bool
    ) -> None:
        """Tells an outer wrapper what is right whatever it decides.

        That is all, or what `of` has settled. `old` is the wrapper's state. Where nobody knows
        `are_finite` of what comes from finite gradients, one that decides about these looks itself.
        """
        if self.outer is None or (self.outer.clips and not are_finite):
            return
        self.outer.settle([u for u in jax.tree.leaves(updates) if of is None or of.has_settled(u)])
        old = old._replace(inner=self.state)
        for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            # Whatever does not leave out gradients has chosen; integers need nothing more.
            if of is None or (of.is_old_or_new if self.leaves_out else of.has_kept)(n, o):
                self.outer.keep([n], [o])


def rejected(old: PyTree, new: PyTree, finite: jax.Array) -> PyTree:
    """What is kept if an update is rejected: the old state, or what its parts say."""

    def of_part(o: PyTree, n: PyTree) -> PyTree:
        return o.__jgrad_rejected__(n, None if o is old else finite) if _is_window(o) else o

    return jax.tree.map(of_part, old, new, is_leaf=_is_window)


def _with_sums(old: PyTree, new: PyTree) -> PyTree:
    """The old state with zeros for each sum of gradients that an update has made for its window."""

    def of_part(o: PyTree, n: PyTree) -> PyTree:
        if not _is_window(o) or o.total is not None or n.total is None:
            return o
        return o._replace(total=jax.tree.map(numerics.zeros_like, n.total))

    return jax.tree.map(of_part, old, new, is_leaf=_is_window)


def _is_window(x: PyTree) -> bool:
    """Whether a part of a state is that of a wrapper which leaves gradients out."""
    return inside.says(x, inside.REJECTED)
