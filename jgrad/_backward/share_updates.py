"""The update of one share, as a function of arrays."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from jgrad._backward.portions import Portion, alone
from jgrad._trees import shares
from jgrad._trees.shares import Combine, Key, Share
from jgrad._trees.trees import PyTree
from jgrad._wrappers.apply_gradients import apply_gradients

Arrays = list[Any]
Numbers = dict[Key, Any]


class Result(NamedTuple):
    """What the update of a share makes.

    Attributes:
      weights: the new leaves of the share.
      state: the new arrays of its state, in order.
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
        structure: Any,
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

    def __call__(
        self,
        layer: Any,
        gradients: Arrays,
        weights: Arrays,
        state: Arrays,
        known: Numbers,
        others: Numbers | None = None,
    ) -> Result:
        """One update.

        Args:
          layer: its number; None for what no stack has.
          gradients: of the leaves of the share.
          weights: these leaves.
          state: the arrays of its state.
          known: numbers of all shares.
          others: of those that are not known, what all other shares have to say.
        """
        positions, structure = self.portion.positions, self._structure
        mesh_axes = self._mesh_axes
        axes = None if mesh_axes is None else alone(structure, positions, mesh_axes)
        share = Share(layer, known, others, trusts=self._elementwise)
        with shares.within(share):
            params, state = apply_gradients(
                self._tx,
                alone(structure, positions, gradients),
                self.portion.structure.unflatten(state),
                alone(structure, positions, weights),
                mesh_axes=axes,
                **self._extra,
            )
        self.combines |= {key: combine for key, (combine, _) in share.parts.items()}
        parts = {key: part for key, (_, part) in share.parts.items()}
        return Result(jax.tree.leaves(params), jax.tree.leaves(state), parts)

    def numbers(self, *args: Any) -> tuple[set[Key], set[Key]]:
        """Which numbers of all shares its own arrays need, and which numbers these need.

        Args:
          args: the first four of a call.
        """
        forms = jax.eval_shape(lambda args: self(*args, {}).parts, args)
        cut = [where is not None for _, where in self.portion.places]

        def outputs(known: Numbers, args: Any) -> tuple[Arrays, Numbers]:
            new = self(*args, known)
            own = [x for x, use in zip(new.state, cut, strict=True) if use]
            return [*new.weights, *own], new.parts

        closed, (own, parts) = jax.make_jaxpr(outputs, return_shape=True)(forms, args)
        read_keys = _key_of_leaves(forms)
        of_results = [None] * len(jax.tree.leaves(own)) + _key_of_leaves(parts)

        def read_by(wanted: Collection[Key | None]) -> set[Key]:
            used = [key in wanted for key in of_results]
            _, read = partial_eval.dce_jaxpr(closed.jaxpr, used)
            return {key for key, use in zip(read_keys, read, strict=False) if use}

        needed = read_by({None})
        return needed, read_by(needed)


def _key_of_leaves(numbers: Numbers) -> list[Any]:
    """For each array of numbers, whose it is."""
    return [key for key in sorted(numbers) for _ in jax.tree.leaves(numbers[key])]


def pruned(f: Callable[..., PyTree], *args: Any) -> PyTree:
    """`f(*args)`, without operations whose results nobody reads.

    In a loop JAX leaves them in, and a kernel would write results that are not used.
    """
    closed, form = jax.make_jaxpr(f, return_shape=True)(*args)
    program, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    leaves = [x for x, use in zip(jax.tree.leaves(args), used, strict=True) if use]
    results = jax.core.eval_jaxpr(program, closed.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(form), results)
