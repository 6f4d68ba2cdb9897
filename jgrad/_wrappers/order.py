"""Which wrapper stands around which: `init` refuses orders that train nothing or something else.

A wrapper is known to all that is inside while its `init` runs theirs, so it is found around a chain
and around transformations of other libraries, too. The orders that are refused are a table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import optax

from jgrad._trees.told import during
from jgrad._trees.trees import PyTree

LOSS_SCALE = "skip_nonfinite(loss_scale=)"  # told apart from one that scales no loss

_around: ContextVar[tuple[str, ...]] = ContextVar("_around", default=())

_ROUNDING = ("master_weights", "stochastic_rounding")
_MOVING = ("hyperball", "schedule_free")  # weights by other updates than those inside
_IS_WIDE = "what is inside sees float32 weights, and has nothing to round"
_IS_OTHER = "the updates inside are not those that move the weights"
_EACH_CALL = "the average would move in each call, and not in each update"
# Wrappers that do not update in each call, and how each goes around; optax's are known by states.
_OF_CALLS = {
    "accumulate": "accumulate({}, every)",
    "skip_nonfinite": "skip_nonfinite({})",
    LOSS_SCALE: "skip_nonfinite({}, loss_scale=...)",
    "skip_spikes": "skip_spikes({})",
    "optax.MultiSteps": "optax.MultiSteps({}, every_k_schedule)",
    "optax.apply_if_finite": "optax.apply_if_finite({}, max_consecutive_errors)",
}
_OF_OPTAX = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
}

# By (around, inside): what is expected, and why.
_REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("accumulate", LOSS_SCALE): (
        "it outside: `skip_nonfinite(accumulate(tx, every), loss_scale=...)`",
        "mini-batches that overflow are left out before it sees them, so the scale never halves",
    ),
    ("skip_nonfinite", LOSS_SCALE): (
        "one `skip_nonfinite`, with the `loss_scale`",
        "the outer one skips what overflows, so the scale never halves",
    ),
    (LOSS_SCALE, LOSS_SCALE): ("one `loss_scale`", "gradients would be divided by both"),
    ("accumulate", "accumulate"): (
        "one `accumulate`, whose `every` is the product of both",
        "each would count windows of the other",
    ),
    ("schedule_free", "accumulate"): (
        "it outside: `accumulate(schedule_free(tx), every)`",
        _EACH_CALL,
    ),
    ("hyperball", "hyperball"): (
        "one `hyperball`, whose `leaves`, `learning_rate` and `radius` may be trees",
        _IS_OTHER,
    ),
    ("schedule_free", "schedule_free"): ("one `schedule_free`", _IS_OTHER),
    ("hyperball", "schedule_free"): ("one of the two", _IS_OTHER),
    ("schedule_free", "hyperball"): ("one of the two", "an average leaves the sphere"),
    **{(x, y): ("one of the two", _IS_WIDE) for x in _ROUNDING for y in _ROUNDING},
    **{
        (x, y): (f"it outside: `{y}({x}(tx))`", reason)
        for x, reason in (("schedule_free", _IS_WIDE), ("hyperball", _IS_OTHER))
        for y in _ROUNDING
    },
    **{
        (x, "average_params"): (f"it outside: `average_params({x}(tx), decay)`", _IS_OTHER)
        for x in _MOVING
    },
    **{
        ("average_params", x): (
            f"it outside: `{y.format('average_params(tx, decay)')}`",
            _EACH_CALL,
        )
        for x, y in _OF_CALLS.items()
    },
}


def check_order(name: str) -> None:
    """An error where a wrapper may not stand inside of one that is around."""
    for outer in _around.get():
        expected, reason = _REFUSED.get((outer, name), ("", ""))
        if expected:
            function = outer.partition("(")[0]
            raise ValueError(
                f"{function}: `tx`: `{name}` inside, expected {expected}, since {reason}."
            )


@contextmanager
def standing_around(name: str) -> Iterator[None]:
    """Checks a wrapper, and stands it around what is inside, while the `init` of that runs."""
    check_order(name)
    with during(_around, (*_around.get(), name)):
        yield


def check_others(state: PyTree) -> None:
    """The same for wrappers of optax, in the state of what is inside."""
    kinds = tuple(_OF_OPTAX)
    for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(x, kinds):
            check_order(_OF_OPTAX[type(x)])
