"""Parameters and a state as lists of arrays, of which a share reads some and replaces its own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from jgrad._backward.portions import FIRST, SAME, Portion
from jgrad._trees.trees import PyTree, Structure


class Owned(NamedTuple):
    """The arrays that a share replaces, or those of one of its layers.

    Attributes:
      weights: its leaves of the parameters.
      state: its own arrays of the state.
    """

    weights: list[jax.Array]
    state: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """See above.

    Attributes:
      leaves: of the parameters.
      state: the arrays of the state.
      structures: of both trees.
    """

    leaves: Sequence[jax.Array]
    state: Sequence[jax.Array]
    structures: tuple[Structure, Structure]

    @classmethod
    def of_trees(cls, params: PyTree, state: PyTree) -> "Model":
        """Of parameters and a state."""
        both = jax.tree.flatten(params), jax.tree.flatten(state)
        return cls(both[0][0], both[1][0], (both[0][1], both[1][1]))

    def trees(self) -> tuple[PyTree, PyTree]:
        """Parameters and state."""
        of_params, of_state = self.structures
        return of_params.unflatten(self.leaves), of_state.unflatten(self.state)

    def weights_of(self, portion: Portion, layer: jax.Array | int | None) -> list[jax.Array]:
        """The leaves of a share, in one of its layers if it has some."""
        leaves = [self.leaves[i] for i in portion.positions]
        return leaves if layer is None else [FIRST.out_of(x, layer) for x in leaves]

    def state_of(self, portion: Portion, layer: jax.Array | int | None) -> list[jax.Array]:
        """The arrays of the state of a share, likewise."""
        return [
            self.state[i] if cut is None or layer is None else cut.out_of(self.state[i], layer)
            for i, cut in portion.cuts
        ]

    def owned(self, portion: Portion) -> Owned:
        """What a share replaces."""
        weights = [self.leaves[i] for i in portion.positions]
        return Owned(weights, [self.state[i] for i, _ in portion.owned_cuts])

    def replaced(self, portion: Portion, new: Owned, *, in_loop: bool = False) -> "Model":
        """The same, with other arrays of a share; in a loop, numbers of the stack are still old."""
        cuts = zip(portion.owned_cuts, new.state, strict=True)
        state = {i: x for (i, cut), x in cuts if not (in_loop and cut is SAME)}
        return dataclasses.replace(
            self,
            leaves=_replaced(self.leaves, dict(zip(portion.positions, new.weights, strict=True))),
            state=_replaced(self.state, state),
        )


def with_layer(portion: Portion, owned: Owned, layer: Owned, i: jax.Array | int) -> Owned:
    """The arrays of a stack, with those of layer `i`."""
    weights = zip(owned.weights, layer.weights, strict=True)
    state = zip(portion.owned_cuts, owned.state, layer.state, strict=True)
    return Owned(
        [FIRST.put(x, new, i) for x, new in weights],
        [x if cut is None else cut.put(x, new, i) for (_, cut), x, new in state],
    )


def _replaced(arrays: Sequence[jax.Array], new: Mapping[int, jax.Array]) -> list[jax.Array]:
    return [new.get(i, x) for i, x in enumerate(arrays)]
