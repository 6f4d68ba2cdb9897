"""The input of a wrapper's update, and the hand-over to the transformation inside."""

import types
from collections.abc import Mapping
from typing import Any

import optax

from jgrad._inputs.commit import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._trees.trees import PyTree


class WrapperInputs(Inputs):
    """The input of one update of a wrapper, and the hand-over to the transformation inside.

    Args:
      function: the name of the wrapper, for messages.
      updates: gradients, or updates of a transformation before.
      params: parameters, or None.
      extra_args: the other arguments of the call; all are handed on.
    """

    def __init__(
        self, function: str, updates: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> None:
        self._extra_args, self._updates = extra_args, updates
        self._outer: Commit | None = extra_args.get("commit")
        super().__init__(function, updates, params, self._outer)

    def hand_over(
        self,
        tx: optax.GradientTransformationExtraArgs,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        stay_finite: bool = False,
        extra: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> tuple[PyTree, PyTree]:
        """Updates and the new state of the transformation inside; see `follow`.

        Args:
          tx: the transformation.
          gradients: what it is to see.
          state: its state.
          params: what it is to optimize.
          stay_finite: True where nothing non-finite is made of finite gradients on the way to
            these; without it `skip_nonfinite` around both looks at all results.
          extra: more arguments for it.
        """
        if stay_finite and self._outer is not None:
            self._outer.add_finite(gradients, of=self._updates)
        steps, new = tx.update(gradients, state, params, **self._extra_args, **extra)
        self.follow(steps)
        return steps, new

    def follow(self, steps: PyTree) -> None:
        """What is made from here on, by `kept` and `directions`, is made of these updates.

        In an update that is not committed they are zero, or somebody looks at all results.
        """
        outer = self._outer
        self.commit = outer if outer is not None and outer.has_settled(steps) else None

    def moved(self, new: PyTree, of: PyTree) -> PyTree:
        """Updates that have the elements of others in other shapes: zero, where these are."""
        if self._outer is not None:
            self._outer.settle_moved(new, of)
        return new
