"""The transformation inside a wrapper: what is asked of it, and the hand-over to it.

Between two wrappers there may be transformations of other libraries. They hold the state of what is
inside, as a part of their own, and most of them hand extra arguments on. So a wrapper never asks
which transformation is inside. It tells what it knows in extra arguments, and is right where they
do not arrive. And it asks the state, whose parts may say things by attributes of their types: which
they are, and what they promise, is in `jgrad/_trees/protocols.py`.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.commit import Commit
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.state import OptState
from jgrad._trees import checks, host_memory, trees
from jgrad._trees.trees import PyTree


class Offloaded(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """What `offload` returns. Other wrappers refuse it: they compute with the state inside."""


def transformation(
    function: str, tx: Any, *, may_be_offloaded: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`tx` as a transformation whose update takes extra arguments.

    No `offload`, nor one inside, as far as its state shows it: a wrapper computes with the state.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        expected = "a transformation with `init` and `update`"
        raise TypeError(f"{function}: `tx`: {checks.describe(tx)}, expected {expected}.")
    tx = optax.with_extra_args_support(tx)
    if may_be_offloaded:
        return tx
    remedy = f"expected it outside of everything: `offload({function}(...))`"
    if isinstance(tx, Offloaded):
        raise ValueError(f"{function}: `tx`: an `offload`, {remedy}.")

    def init(params: PyTree) -> Any:
        state = tx.init(params)
        place = host_memory.place_on_host(state)
        if place is not None and host_memory.place_on_host(params) is None:
            came = f"with a state in host memory{checks.at(place)}, of an `offload` inside"
            raise ValueError(f"{function}: `tx`: {came}, {remedy}.")
        return state

    return optax.GradientTransformationExtraArgs(init, tx.update)


def check_state(function: str, state: Any, kind: type) -> None:
    """The state is one that this wrapper made."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{function}: `state`: {type(state).__name__}, expected the {kind.__name__} that this "
            f"`{function}` made with `init`."
        )


UNROUNDED, REJECTED = "__jgrad_unrounded__", "__jgrad_rejected__"
REPORT = "__jgrad_report__"


def any_says(state: PyTree, attribute: str) -> bool:
    """Whether some part of a state, however deep, has an attribute of its type."""
    return any(_says(x, attribute) for x in _parts(state, attribute))


def reports(state: PyTree) -> list[dict[str, Any]]:
    """What the parts of a state report, from outside to inside."""
    found = []
    for part in _parts(state, REPORT):
        if _says(part, REPORT):
            found.append(part.__jgrad_report__())
            for _, child in trees.children(part) or ():
                found += reports(child)
    return found


def updates_done(state: PyTree) -> Any:
    """How many updates a state counts, as its schedules are told; None where it counts none.

    The first `step` of jgrad's methods; without one, `gradient_step` of `optax.MultiSteps`, or the
    first `count` of optax's. Types decide, since fields of parameters may have these names.
    """
    for field, has_it in _COUNTERS.items():
        parts = jax.tree.leaves(state, is_leaf=has_it)
        if (part := next(filter(has_it, parts), None)) is not None:
            return getattr(part, field)
    return None


def _counts_updates(x: Any) -> bool:
    """Whether a state is one of optax that counts updates: `reduce_on_plateau` counts losses."""
    fields = getattr(x, "_fields", ())
    is_plateau = "plateau_count" in fields
    return "count" in fields and not is_plateau and type(x).__module__.startswith("optax.")


_COUNTERS: dict[str, Callable[[Any], bool]] = {
    "step": lambda x: isinstance(x, OptState),
    "gradient_step": lambda x: isinstance(x, optax.MultiStepsState),
    "count": _counts_updates,
}


def rejected(old: PyTree, new: PyTree, finite: jax.Array) -> PyTree:
    """What stays of an update that is rejected: the old state, or what its parts say."""

    def of_part(o: Any, n: Any) -> Any:
        if not _says(o, REJECTED):
            return o
        return o.__jgrad_rejected__(n, None if o is old else finite)

    return jax.tree.map(of_part, old, new, is_leaf=lambda x: _says(x, REJECTED))


def with_sums(old: PyTree, new: PyTree) -> PyTree:
    """The old state with zeros for each sum of gradients that an update has made for its window."""

    def of_part(o: Any, n: Any) -> Any:
        if not _says(o, REJECTED) or o.total is not None or n.total is None:
            return o
        return o._replace(total=jax.tree.map(numerics.zeros_like, n.total))

    return jax.tree.map(of_part, old, new, is_leaf=lambda x: _says(x, REJECTED))


def _parts(state: PyTree, attribute: str) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=lambda x: _says(x, attribute))


def _says(x: Any, attribute: str) -> bool:
    return hasattr(type(x), attribute)


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
