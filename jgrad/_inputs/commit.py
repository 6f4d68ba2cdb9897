"""Whether an update is committed, as a wrapper tells it to the transformations inside.

`skip_nonfinite` could compute an update and choose between new and old arrays afterwards. Each new
moment would then be read by the choice and by the step, and XLA would write it out for both. So the
wrapper passes a `Commit` inwards, as the extra argument `commit`, and every transformation of this
library makes the choice itself, before anything reads its new moments. `optax.chain` and the like
hand extra arguments on; a transformation that does not know `commit` ignores it.

A `Commit` exists while a program is traced. It remembers arrays by identity, of two kinds. *Finite*
are the gradients, and what is computed from such arrays alone by a transformation that makes
nothing non-finite. *Settled* are updates and parts of a state that are right whatever the decision
is. The wrapper looks at all updates and states that are not settled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees import checks
from jgrad._trees.trees import PyTree

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX 0.7
    from jax.core import get_opaque_trace_state


@jax.tree_util.register_pytree_node_class
class Commit:
    """The decision about one update, and what is known of its arrays.

    Handed through `jax.jit` or `jax.vmap`, where arrays have other identities, it knows of none.
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
        self._finite = dict(self._gradients)
        self._settled: dict[int, Any] = {}

    @property
    def flag(self) -> jax.Array:
        """Whether the update is committed, a bool scalar."""
        self._is_read = True
        return self._flag

    def is_finite(self, tree: PyTree) -> bool:
        """Whether each inexact array of the tree is finite if the update is committed."""
        return _arrays(tree).keys() <= self._finite.keys() | self._settled.keys()

    def add_finite(self, tree: PyTree) -> None:
        """Says that the arrays are finite if the update is committed."""
        self._finite |= _arrays(tree)

    def is_settled(self, tree: PyTree) -> bool:
        """Whether each inexact array is finite, and if the update is not committed, zero or old."""
        return _arrays(tree).keys() <= self._settled.keys()

    def settle(self, tree: PyTree) -> None:
        """Says that the arrays are settled."""
        self._settled |= _arrays(tree)

    def offer(self, finite: jax.Array, tree: PyTree) -> None:
        """Says whether the arrays are finite, for a transformation that has their norm anyway.

        Taken if all gradients are among them and nobody read the flag; then what computed the flag
        before is not in the compiled program. Not from inside a branch or a loop.
        """
        same_trace = get_opaque_trace_state() == self._trace
        if same_trace and not self._is_read and _arrays(tree).keys() >= self._gradients.keys():
            self._flag = self._agreed(finite)

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[()]) -> "Commit":
        return cls((), jnp.asarray(True))


def inward(commit: Commit | None) -> dict[str, Commit]:
    """The extra argument for a transformation inside."""
    return {} if commit is None else {"commit": commit}


def _arrays(tree: PyTree) -> dict[int, Any]:
    """By identity. The arrays are kept, so that no other gets the identity of one."""
    return {id(x): x for x in jax.tree.leaves(tree) if checks.is_inexact(x)}
