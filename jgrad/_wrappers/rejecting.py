"""What wrappers share that reject updates: `skip_nonfinite` and `skip_spikes`.

A decision goes inwards as a `Commit`. What comes back unsettled is chosen afterwards, and a wrapper
around, which has a decision of its own, is told that nothing is left to choose.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jgrad._inputs.commit import Commit
from jgrad._trees import checks
from jgrad._trees.trees import PyTree
from jgrad._wrappers import choices, inside


def leaves_out(state: PyTree) -> bool:
    """Whether something inside leaves out gradients by itself, so that its window goes on."""
    return inside.any_says(state, inside.REJECTED)


def outer_commit(extra_args: dict[str, Any], state: PyTree) -> Commit | None:
    """The decision of a wrapper around, taken from the arguments; None without one.

    Where something inside leaves gradients out, it is the decision about these.
    """
    outer: Commit | None = extra_args.pop("commit", None)
    return outer.of_windows if outer is not None and leaves_out(state) else outer


def chosen(
    commit: Commit, use: Any, new: tuple[PyTree, PyTree], old: tuple[PyTree, PyTree], settles: bool
) -> tuple[PyTree, PyTree]:
    """Updates and state where `use` is True, else zeros and the old state.

    Args:
      commit: the decision, as it was handed inwards.
      use: one bool, which may be traced.
      new: updates and state, as they came from inside.
      old: zeros and the old state.
      settles: whether what is settled by `commit` needs no choice.
    """

    def is_kept(n: Any, o: Any) -> bool:
        return settles and commit.is_old_or_new(n, o)

    def is_settled(u: Any, zero: Any) -> bool:
        return is_kept(u, zero) or (settles and checks.is_inexact(u) and commit.has_settled(u))

    return (
        choices.choose(use, new[0], old[0], is_settled),
        choices.choose(use, new[1], old[1], is_kept),
    )


def counted(outer: Commit | None, new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
    """The wrapper's own counters, which stay where a wrapper around rejects the update."""
    if outer is None:
        return new
    return tuple(jnp.where(outer.flag, n, o) for n, o in zip(new, old, strict=True))


def tell(
    outer: Commit | None, updates: PyTree, new: PyTree, old: PyTree, of: Commit | None = None
) -> None:
    """Says to a wrapper around what is right whatever it decides: all, or what `of` has settled."""
    if outer is None:
        return
    outer.settle([u for u in jax.tree.leaves(updates) if of is None or of.has_settled(u)])
    for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        if of is None or of.is_old_or_new(n, o):
            outer.keep([n], [o])
