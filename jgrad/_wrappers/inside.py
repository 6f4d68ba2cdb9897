"""The transformation inside a wrapper: whether it may be there, and what its state can tell.

Between two wrappers there may be transformations of other libraries, which hold the inner state as
a part of their own. A wrapper therefore never checks which transformation is inside. It passes on
what it knows (see `told`), and is right even if nothing inside uses it. What it needs to know, it
asks the state, whose parts may answer by attributes of their types; `jgrad/_trees/protocols.py`
lists these.

The order of wrappers is checked while their `init` runs: each wrapper is known to everything
inside, so it is found around chains and transformations of other libraries, too. A table lists the
orders that would train nothing, or something else. Likewise `init` finds a `scale_by_*` where a
step is needed: by its state, which is the last of a chain.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
import optax

from jgrad._trees import checks, trees
from jgrad._trees.explained import Transformation
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import during, telling, told

_OFFLOADED = "__jgrad_offloaded__"
LOSS_SCALE = "skip_nonfinite(loss_scale=)"  # distinguished from one without loss scaling

_around: ContextVar[tuple[str, ...]] = ContextVar("_around", default=())

_ROUNDING = ("master_weights", "stochastic_rounding")
_MOVING = ("hyperball", "schedule_free")  # weights by other updates than those inside
_COUNTING = ("average_params", *_MOVING)  # each call as an update
_IS_WIDE = "what is inside sees float32 weights, and has nothing to round"
_IS_OTHER = "the updates inside are not those that move the weights"
_EACH_CALL = "it takes each call for an update"
_ONE_WINDOW = (
    "one `accumulate`, whose `every` is the product of both",
    "each would count windows of the other",
)
# Wrappers that do not update in every call, and how each is applied; optax's are known by states.
_OF_CALLS = {
    "accumulate": "accumulate({}, every)",
    "skip_nonfinite": "skip_nonfinite({})",
    LOSS_SCALE: "skip_nonfinite({}, loss_scale=...)",
    "skip_spikes": "skip_spikes({})",
    "optax.MultiSteps": "optax.MultiSteps({}, every_k_schedule)",
    "optax.apply_if_finite": "optax.apply_if_finite({}, max_consecutive_errors)",
    "optax.conditionally_mask": "optax.conditionally_mask({}, should_transform_fn)",
}
_OF_OPTAX = {
    optax.MultiStepsState: "optax.MultiSteps",
    optax.ApplyIfFiniteState: "optax.apply_if_finite",
    optax.ConditionallyMaskState: "optax.conditionally_mask",
}


def _shown(wrapper: str, tx: str) -> str:
    return f"{wrapper}({tx}{', decay' * (wrapper == 'average_params')})"


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
    ("accumulate", "accumulate"): _ONE_WINDOW,
    ("accumulate", "optax.MultiSteps"): _ONE_WINDOW,
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
        (x, "average_params"): (f"it outside: `{_shown('average_params', f'{x}(tx)')}`", _IS_OTHER)
        for x in _MOVING
    },
    **{
        (x, y): (f"it outside: `{around.format(_shown(x, 'tx'))}`", _EACH_CALL)
        for x in _COUNTING
        for y, around in _OF_CALLS.items()
    },
}

# What sets weights, or averages them: its updates are right as they are alone.
_OF_WEIGHTS = (*_COUNTING, *_ROUNDING)
# The states of optax's `scale_by_*` that set the size of updates themselves. The others may follow
# a learning rate, as schedules, searches of a line and what is linear do.
_DIRECTIONS = re.compile(
    "ScaleBy(?!Schedule|DistanceOver|Optimistic|Backtracking|Zoom).*|FactoredState|MuonState"
)
_HELD = ("inner", "inner_state", "inner_opt_state")  # fields with the state of what is inside


def check_order(name: str) -> None:
    """An error where a wrapper may not stand inside of one that is around."""
    for outer in _around.get():
        expected, reason = _REFUSED.get((outer, name), ("", ""))
        if expected:
            function = outer.partition("(")[0]
            raise ValueError(
                f"{function}: `tx`: `{name}` inside, expected {expected}, since {reason}."
            )


def check_others(state: PyTree) -> None:
    """The same for wrappers of optax, in the state of what is inside."""
    for x in jax.tree.leaves(state, is_leaf=lambda x: type(x) in _OF_OPTAX):
        if name := _OF_OPTAX.get(type(x)):
            check_order(name)
            check_others(tuple(x))


def _check_step(function: str, state: PyTree, directions: list[tuple[str, PyTree]]) -> None:
    """An error where what is inside makes no step: a learning rate behind it came too late."""
    for end in _ends(state):
        names = [name for name, x in directions if x is end]
        kind = type(end)
        if kind.__module__.startswith("optax.") and _DIRECTIONS.fullmatch(kind.__name__):
            names.append(f"optax.{kind.__name__}")
        if names:
            right = _shown(function, "optax.chain(tx, optax.scale_by_learning_rate(rate))")
            raise ValueError(
                f"{function}: `tx`: `{names[0]}` inside, expected a learning rate after it, inside "
                f"too: `{right}`, since nothing may change updates after `{function}`."
            )


def _ends(state: PyTree) -> Iterator[PyTree]:
    """The states of what makes the updates: the last of a chain, and of each group."""
    fields = getattr(state, "_fields", ())
    held = [getattr(state, x) for x in _HELD if x in fields]
    if isinstance(state, (tuple, dict)) and not fields:
        held = list(state.values() if isinstance(state, dict) else state)[-1:]
    if "inner_states" in fields:
        held = list(state.inner_states.values())
    for x in held:
        yield from _ends(x)
    if not held:
        yield state


def check_not_in_multi_steps(function: str) -> None:
    """An error in an `init` that `optax.MultiSteps` calls, which computes with the state."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is optax.MultiSteps.init.__code__:
            right = f"{function}({_OF_CALLS['optax.MultiSteps'].format('tx')})"
            came = f"`{function}` inside, expected it outside everything: `{right}`"
            raise ValueError(f"optax.MultiSteps: `opt`: {came}.")
        frame = frame.f_back


# ---- what is inside ----------------------------------------------------------------------------


def marked_as_offload(tx: Transformation) -> Transformation:
    """The same, whose `update` says so, because JAX rebuilds tuples without their attributes."""
    setattr(tx.update, _OFFLOADED, True)
    return tx


def check_outside() -> None:
    """An error where an `offload` is inside of a wrapper, which computes with the state."""
    if _around.get():
        _refuse_offload(_around.get()[-1].partition("(")[0])


def _refuse_offload(function: str) -> NoReturn:
    remedy = f"expected it outside everything: `offload({function}(...))`"
    raise ValueError(f"{function}: `tx`: an `offload` inside, {remedy}.")


def transformation(
    function: str, tx: Any, *, may_be_offloaded: bool = False, name_in_order: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """`tx` as a transformation whose update takes extra arguments.

    No `offload`, nor one inside: a wrapper computes with the state.

    Args:
      function: the wrapper.
      tx: what is inside.
      may_be_offloaded: whether the wrapper leaves the state alone.
      name_in_order: by which `order` knows the wrapper, if not by that of the function.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        expected = "a transformation with `init` and `update`"
        raise TypeError(f"{function}: `tx`: {checks.describe(tx)}, expected {expected}.")
    if hasattr(tx.update, _OFFLOADED) and not may_be_offloaded:
        _refuse_offload(function)
    tx, name = optax.with_extra_args_support(tx), name_in_order or function

    def init(params: PyTree) -> PyTree:
        check_order(name)
        directions = told().directions
        directions = [] if directions is None else directions
        with during(_around, (*_around.get(), name)), telling(directions=directions):
            state = tx.init(params)
            check_others(state)
        if function in _OF_WEIGHTS:
            _check_step(function, state, directions)
        return state

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        share = told().share
        if share is None:
            return tx.update(updates, state, params, **extra_args)
        with share.within(is_own=False):  # a share marks operations as those of another library
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init if may_be_offloaded else init, update)


UNROUNDED, REJECTED = "__jgrad_unrounded__", "__jgrad_rejected__"
REPORT, FIELDS = "__jgrad_report__", "__jgrad_fields__"


def states_with(state: PyTree, attribute: str) -> list[PyTree]:
    """States within a state, however deep, whose types have an attribute; none inside another."""
    has_it = functools.partial(says, attribute=attribute)
    return list(filter(has_it, jax.tree.leaves(state, is_leaf=has_it)))


def says(x: PyTree, attribute: str) -> bool:
    """Whether the type of a part of a state has an attribute."""
    return hasattr(type(x), attribute)


def reports(state: PyTree) -> list[dict[str, jax.Array]]:
    """What the parts of a state report, from outside to inside."""
    numbers = []
    for part in states_with(state, REPORT):
        numbers.append(part.__jgrad_report__())
        for _, child in trees.children(part) or ():
            numbers += reports(child)
    return numbers


def updates_done(state: PyTree) -> jax.Array | None:
    """How many updates a state counts, as its schedules are told; None where it counts none.

    The first `step` of jgrad's methods; without one, `gradient_step` of `optax.MultiSteps`, or the
    first `count` of optax's. Types decide, since fields of parameters may have these names.
    """
    for field, has_it in _COUNTERS.items():
        for part in filter(has_it, jax.tree.leaves(state, is_leaf=has_it)):
            return getattr(part, field)
    return None


def _counts_updates(x: PyTree) -> bool:
    """Whether a state is one of optax that counts updates: `reduce_on_plateau` counts losses."""
    fields = getattr(x, "_fields", ())
    is_plateau = "plateau_count" in fields
    return "count" in fields and not is_plateau and type(x).__module__.startswith("optax.")


_COUNTERS: dict[str, Callable[[PyTree], bool]] = {
    "step": lambda x: says(x, FIELDS) and x.__jgrad_fields__.roles.get("step") == "step",
    "gradient_step": lambda x: isinstance(x, optax.MultiStepsState),
    "count": _counts_updates,
}
