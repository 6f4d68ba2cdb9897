"""The transformation inside a wrapper, and its state."""

from typing import Any

import optax

from jgrad._trees import checks, host_memory
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
