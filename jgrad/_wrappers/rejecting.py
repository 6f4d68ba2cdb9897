"""What wrappers share that reject updates: `skip_nonfinite` and `skip_spikes`.

A decision goes inwards as a `Commit`. What comes back unsettled is chosen afterwards, and a wrapper
around, which has a decision of its own, is told that nothing is left to choose.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Rejecting(NamedTuple):
    """What is around the update of a wrapper that may reject it, and inside.

    Attributes:
      inputs: of this update.
      extra_args: the arguments of the call, without the decision of a wrapper around.
      leaves_out: whether something inside leaves out gradients by itself, so that its window goes
        on.
      outer: the decision of a wrapper around; None without one. Where something inside leaves
        gradients out, it is the decision about these.
      finite: `finite` of the call, where it is for what leaves gradients out; else None.
    """

    inputs: Inputs
    extra_args: dict[str, Any]
    leaves_out: bool
    outer: Commit | None
    finite: Flag | None

    @classmethod
    def of(cls, inputs: Inputs, inner: PyTree, extra_args: dict[str, Any]) -> "Rejecting":
        """From the arguments of a call, and the state inside."""
        outer: Commit | None = extra_args.pop("commit", None)
        if not inside.parts(inner, inside.REJECTED):
            return cls(inputs, extra_args, False, outer, None)
        finite = extra_args.get("finite")
        values.flag(inputs.function, "finite", finite)
        outer = None if outer is None else outer.of_windows
        return cls(inputs, extra_args, True, outer, finite)

    def hand_over(
        self,
        tx: optax.GradientTransformationExtraArgs,
        commit: Commit,
        gradients: PyTree,
        inner: PyTree,
        params: PyTree,
        **extra: Any,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Updates and the new state from inside, and the old state beside it.

        Args:
          tx: the transformation inside.
          commit: the decision.
          gradients: what it is to see.
          inner: its state.
          params: parameters.
          extra: arguments in the place of those of the call.
        """
        known = {"commit": commit.for_windows() if self.leaves_out else commit}
        steps, new = tx.update(gradients, inner, params, **self.extra_args | known | extra)
        if self.leaves_out:
            inner = _of_windows(_with_sum, inner, new)
        if not commit.has_settled(steps):
            steps = self.inputs.directions(trees.flatten(steps)[0])
        return steps, new, inner

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
        zeros = self.inputs.zeros()
        if not settles:
            chosen: tuple[PyTree, PyTree] = decisions.choose(use, new, (zeros, old))
            return chosen

        def is_settled(u: Any, zero: Any) -> bool:
            is_kept = commit.is_old_or_new(u, zero)
            return is_kept or (checks.is_inexact(u) and commit.has_settled(u))

        return (
            decisions.choose(use, new[0], zeros, is_settled),
            decisions.choose(use, new[1], old, commit.is_old_or_new),
        )

    def counted(self, new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
        """The wrapper's own counters, which stay where a wrapper around rejects the update."""
        if self.outer is None:
            return new
        return tuple(jnp.where(self.outer.flag, n, o) for n, o in zip(new, old, strict=True))

    def tell(self, updates: PyTree, new: PyTree, old: PyTree, of: Commit | None = None) -> None:
        """Says to a wrapper around what is right whatever it decides: all, or what `of` settled."""
        if self.outer is None:
            return
        self.outer.settle([u for u in jax.tree.leaves(updates) if of is None or of.has_settled(u)])
        for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            if of is None or of.is_old_or_new(n, o):
                self.outer.keep([n], [o])


def rejected(old: PyTree, new: PyTree, finite: jax.Array) -> PyTree:
    """What stays of an update that is rejected: the old state, or what its parts say."""
    return _of_windows(lambda o, n: o.__jgrad_rejected__(n, None if o is old else finite), old, new)


def _with_sum(old: Any, new: Any) -> Any:
    """The state of a window with zeros for a sum of gradients that an update has made for it."""
    if old.total is not None or new.total is None:
        return old
    return old._replace(total=jax.tree.map(numerics.zeros_like, new.total))


def _of_windows(f: Callable[[Any, Any], Any], old: PyTree, new: PyTree) -> PyTree:
    """The old state, but what `f` makes of the old and the new one where gradients are left out."""
    is_window = functools.partial(inside.says, attribute=inside.REJECTED)
    return jax.tree.map(lambda o, n: f(o, n) if is_window(o) else o, old, new, is_leaf=is_window)
