"""The inputs of a wrapper's update, and the call of the transformation inside.

`WrapperInputs` is for wrappers that change gradients, parameters or updates; `RejectingInputs` is
for those that reject updates: they choose between new and old arrays after the update.
"""

import functools

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
Results = tuple[PyTree, PyTree]  # updates, and the new state

# Whether a part of a state is that of a wrapper which leaves gradients out.
is_window = functools.partial(inside.says, attribute=inside.REJECTED)


class WrapperInputs(Inputs):
    """The inputs of one update of a wrapper, and the call of the transformation inside.

    Args:
      function: the name of the wrapper, for messages.
      updates: gradients, or updates of a transformation before.
      params: parameters, or None.
      extra_args: the other arguments of the call; all are handed on.

    Attributes:
      extra_args: see above.
    """

    def __init__(
        self, function: str, updates: PyTree, params: PyTree, extra_args: dict[str, PyTree]
    ) -> None:
        self._around = told()
        record = self._around._replace(notes=None, undecayed=None)  # which are for what is inside
        super().__init__(function, updates, params, record)
        self.extra_args = extra_args

    def hand_over(
        self,
        tx: optax.GradientTransformationExtraArgs,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        **told_beside: object,
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state of the transformation inside.

        Args:
          tx: the transformation.
          gradients: what it is to see.
          state: its state.
          params: what it is to optimize.
          told_beside: what it is told in addition to what this wrapper is told.
        """
        with telling(**told_beside):
            return tx.update(gradients, state, params, **self.extra_args)


# ---- rejected updates ----------------------------------------------------------------------------


class RejectingInputs(WrapperInputs):
    """The inputs of an update that may be rejected, with the state inside.

    Attributes:
      params: parameters, or None.
      state: of what is inside; once the update was tried, with zeros for sums that it made.
      leaves_out: whether something inside leaves out gradients by itself, so that its window goes
        on. Then the decision is told to that alone.
      outer: the decision of a wrapper around, about windows where something leaves out gradients.
      finite: whether the gradients are finite, for what leaves them out, if somebody says so.
    """

    def __init__(
        self,
        function: str,
        updates: PyTree,
        params: PyTree,
        state: PyTree,
        extra_args: dict[str, PyTree],
    ) -> None:
        super().__init__(function, updates, params, extra_args)
        self.commit, self.state, self.params = None, state, params
        self.leaves_out = bool(inside.states_with(state, inside.REJECTED))
        self.outer: Commit | None = self._around.commit
        self.finite: Flag | None = None
        if self.leaves_out:
            self.outer = self._around.windows
            argument = extra_args.get("finite")
            checks.flag(function, "finite", argument)
            self.finite = self._around.finite_with(argument)

    def tried(
        self,
        tx: optax.GradientTransformationExtraArgs,
        gradients: PyTree,
        flag: jax.Array,
        *,
        clips: bool,
        judged_on: tuple[str, ...] | None = None,
    ) -> tuple[Commit, Results]:
        """The update of what is inside, which is told the decision.

        Args:
          tx: the transformation.
          gradients: what it is to see.
          flag: whether the update is committed, as far as this wrapper decides it.
          clips: whether what overflows then becomes the largest number.
          judged_on: if the flag says whether the gradients are finite, the mesh axes along which
            devices agree about it.

        Returns:
          The decision, as it was told inwards; and the updates, with zeros where there are none,
          and the new state inside, before they are chosen.
        """
        judged = None if judged_on is None else gradients
        agreed = functools.partial(decisions.agreed, mesh_axes=judged_on or ())
        commit = Commit(flag, self.outer, clips=clips, judged=judged, agreed=agreed)
        finite = self.finite if judged_on is None else flag
        decision = {"windows": commit, "finite": finite} if self.leaves_out else {"commit": commit}
        steps, new = self.hand_over(tx, gradients, self.state, self.params, **decision)
        if self.leaves_out:
            self.state = _with_sums(self.state, new)
        return commit, (self.directions(trees.flatten(steps)[0]), new)

    def accepted(
        self, tx: optax.GradientTransformationExtraArgs, gradients: PyTree, flag: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Updates and the state inside if the flag is True, else zeros and the old state.

        If something inside leaves out gradients by itself, it does so where the flag is False, and
        what it returns is taken as it is.
        """
        commit, new = self.tried(tx, gradients, flag, clips=False)
        use: Flag = commit.flag if commit.left_out is None else True
        return decisions.decided(use, new, (self.zeros(), self.state), commit, clips=False)

    def counted(self, new: Arrays, old: Arrays) -> Arrays:
        """The wrapper's own counters, which stay if a wrapper around leaves the gradients out."""
        if self.outer is None or not self.leaves_out:
            return new
        return tuple(jnp.where(self.outer.flag, n, o) for n, o in zip(new, old, strict=True))


def rejected(old: PyTree, new: PyTree, finite: jax.Array) -> PyTree:
    """What is kept if an update is rejected: the old state, or what its parts say."""

    def kept(o: PyTree, n: PyTree) -> PyTree:
        return o.__jgrad_rejected__(n, None if o is old else finite) if is_window(o) else o

    return jax.tree.map(kept, old, new, is_leaf=is_window)


def _with_sums(old: PyTree, new: PyTree) -> PyTree:
    """The old state with zeros for each sum of gradients that an update has made for its window."""

    def with_zeros(o: PyTree, n: PyTree) -> PyTree:
        if not is_window(o) or o.total is not None or n.total is None:
            return o
        return o._replace(total=jax.tree.map(numerics.zeros_like, n.total))

    return jax.tree.map(with_zeros, old, new, is_leaf=is_window)
