"""The update of one share, as a function of arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.interpreters import partial_eval  # may change, checked in JAX 0.7 to 0.12
from jax.sharding import PartitionSpec

from jgrad._backward.model import Owned
from jgrad._backward.portions import Portion, alone
from jgrad._trees import shares
from jgrad._trees.shares import Combine, Key, Numbers, Share
from jgrad._trees.trees import PyTree, Structure
from jgrad._wrappers.apply_gradients import apply_gradients

Arrays = list[jax.Array]


class Given(NamedTuple):
    """What the update of a share starts from.

    Attributes:
      layer: its number; None of what is in no stack.
      gradients: of the leaves of the share; None for a leaf that has none.
      weights: these leaves.
      state: the arrays of its state.
    """

    layer: jax.Array | int | None
    gradients: list[jax.Array | None]
    weights: Arrays
    state: Arrays


class Made(NamedTuple):
    """What it makes.

    Attributes:
      weights: new ones.
      state: the new arrays of its state.
      parts: what it has to say of each number of all shares.
    """

    weights: Arrays
    state: Arrays
    parts: Numbers


class ShareUpdate:
    """A transformation, of the leaves of one share.

    Attributes:
      portion: what the share has.
      combines: how the numbers of two shares become one; known once it was traced.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        portion: Portion,
        structure: Structure,
        mesh_axes: Sequence[PartitionSpec | None] | None,
        extra: Mapping[str, Any],
        *,
        elementwise: bool,
    ) -> None:
        """Of one step.

        Args:
          tx: see above.
          portion: see above.
          structure: of all parameters.
          mesh_axes: how each leaf of the share is sharded, if the user says it.
          extra: other arguments of an update.
          elementwise: whether the transformations of other libraries are.
        """
        self.portion, self.combines = portion, dict[Key, Combine]()
        self._tx, self._structure, self._extra = tx, structure, extra
        self._elementwise, self._mesh_axes = elementwise, mesh_axes

    def __call__(self, given: Given, known: Numbers, others: Numbers | None = None) -> Made:
        """One update.

        Args:
          given: see there.
          known: numbers of all shares.
          others: of those that are not known, what all other shares have to say.
        """

        def tree(leaves: Sequence[object]) -> PyTree:
            return alone(self._structure, self.portion.positions, leaves)

        with shares.within(Share(given.layer, known, others, trusts=self._elementwise)) as share:
            params, state = apply_gradients(
                self._tx,
                tree(given.gradients),
                self.portion.structure.unflatten(given.state),
                tree(given.weights),
                mesh_axes=None if self._mesh_axes is None else tree(self._mesh_axes),
                **self._extra,
            )
        self.combines |= {key: combine for key, (combine, _) in share.parts.items()}
        parts = {key: part for key, (_, part) in share.parts.items()}
        return Made(jax.tree.leaves(params), jax.tree.leaves(state), parts)

    def owned(self, made: Made) -> Owned:
        """What takes the place of its own arrays."""
        pairs = zip(made.state, self.portion.owned, strict=True)
        return Owned(made.weights, [x for x, use in pairs if use])

    def parts(self, given: Given) -> Numbers:
        """The form of what it has to say."""
        forms: Numbers = jax.eval_shape(lambda given: self(given, {}).parts, given)
        return forms

    def numbers_read(self, given: Given) -> dict[Key | None, set[Key]]:
        """Which numbers of all shares its own arrays need, by None; and which each number needs."""
        forms = self.parts(given)

        def outputs(known: Numbers, given: Given) -> tuple[Owned, Numbers]:
            made = self(given, known)
            return self.owned(made), made.parts

        closed, (own, parts) = jax.make_jaxpr(outputs, return_shape=True)(forms, given)
        of_inputs = _key_of_leaves(forms)
        of_results = [*[None] * len(jax.tree.leaves(own)), *_key_of_leaves(parts)]

        def read_for(key: Key | None) -> set[Key]:
            used = [own == key for own in of_results]
            _, read = partial_eval.dce_jaxpr(closed.jaxpr, used)
            # Then come those of what was given.
            return {own for own, use in zip(of_inputs, read, strict=False) if use}

        return {key: read_for(key) for key in (None, *forms)}


def _key_of_leaves(numbers: Numbers) -> list[Key]:
    """For each array of numbers, whose it is."""
    return [key for key in sorted(numbers) for _ in jax.tree.leaves(numbers[key])]


def pruned(f: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`f(*args)`, without operations whose results nobody reads.

    In a loop JAX leaves them in, and a kernel would write results that are not used.
    """
    closed, form = jax.make_jaxpr(f, return_shape=True)(*args)
    program, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    leaves = [x for x, use in zip(jax.tree.leaves(args), used, strict=True) if use]
    results = jax.core.eval_jaxpr(program, closed.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(form), results)
