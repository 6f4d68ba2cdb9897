"""Options of transformations: checked by the factory, and read per leaf in each update."""

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leafwise import PerLeaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.moment import Step
from jgrad._trees import checks, trees
from jgrad._trees.annotations import DecayRule, LearningRate, Mask
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import note, told

DECAY_RULES: tuple[DecayRule, ...] = ("decoupled", "cautious", "independent")


# ---- what a factory can check ------------------------------------------------------------------


def check(function: str, read: Callable[[str, str, PyTree], Any], **given: PyTree) -> None:
    """What `read` says of numbers; a schedule is called in each update only."""
    for name, x in given.items():
        _check_called(function, name, x)
        if not trees.may_be_function(x):
            read(function, name, x if checks.is_number(x) else _without_schedules(x))


def _without_schedules(tree: PyTree) -> PyTree:
    # A number that is in the range of every option.
    return trees.map_leaves(lambda x: 0.5 if trees.may_be_function(x) else x, trees.opened(tree))


def check_decays(function: str, rule: str, **decays: PyTree) -> None:
    """Decays in the range of a rule."""
    check(function, functools.partial(numbers.scalars, high=_limit(rule)), **decays)


def _limit(rule: str) -> float:
    """Below which the decays of a rule are: where no rate multiplies them, 1 takes all."""
    return 1.0 if rule == "independent" else math.inf


INJECTED = (
    "`optax.inject_hyperparams` calls functions as schedules: name this one in `static_args`, or "
    "wrap the factory in a function of the numbers alone; where a bool is meant, give a tree of it"
)


def check_masks(function: str, **masks: Mask | None) -> None:
    """Refuses a function of jgrad itself, an array, and a bool that optax made of a function.

    `optax.inject_hyperparams` calls functions with a count, as if they were schedules. A mask that
    is a function of the parameters is then lost, and its bool says nothing of them.
    """
    for name, mask in masks.items():
        _check_called(function, name, mask)
        is_array = isinstance(mask, jax.Array)
        is_of_optax = (is_array or isinstance(mask, (bool, np.bool_))) and _caller() == "optax"
        if is_array or is_of_optax:
            expected = "a tree of bools, or a function of the parameters' shapes"
            remedy = INJECTED if is_of_optax else "masks are read while tracing"
            came = checks.describe(mask)
            raise TypeError(f"{function}: `{name}`: {came}, expected {expected}; {remedy}.")


def _caller() -> str:
    """The package that called jgrad."""
    frame, package = inspect.currentframe(), "jgrad"
    while frame is not None and package == "jgrad":
        package, frame = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_back
    return package


def _check_called(function: str, name: str, x: Any) -> None:
    """No function of jgrad in the place of what it returns: `hidden_matrices` without the call."""
    if isinstance(x, types.FunctionType) and (x.__module__ or "").startswith("jgrad."):
        public = f"jgrad.{x.__name__}"
        expected = f"what it returns: call it, `{name}={public}(...)`"
        raise TypeError(f"{function}: `{name}`: the function `{public}`, expected {expected}.")


# ---- an entry per leaf -------------------------------------------------------------------------


def called(inputs: Parameters, name: str, x: Any, argument: Callable[[], Any]) -> Any:
    """`x(argument)` if the option is a function, else `x`."""
    if not callable(x) or not trees.is_function(x, inputs.shapes):
        return x
    value = argument()
    what = NUMBER_OF_UPDATES if checks.is_array(value) else SHAPES
    if not jax.tree_util.all_leaves([x]):
        what += f", since its structure is not a prefix of that of `{inputs.reference.name}`"
    return result_of(inputs.function, name, what, x, value)


NUMBER_OF_UPDATES, SHAPES = "the number of updates", "the whole tree of shapes"


def result_of(function: str, name: str, what: str, x: Callable[..., Any], *args: Any) -> Any:
    """`x(*args)` of an option that is a function; its error says of which option it is.

    `what` are the arguments, in words.
    """
    try:
        return x(*args)
    except Exception as error:
        error.add_note(f"{function}: `{name}` was called with {what}.")
        raise


def _numbers_of(inputs: Inputs, step: Step, name: str, of_factory: PyTree) -> PyTree:
    """The numbers of this call, or else the factory's, with results for schedules."""
    override = step.numbers.get(name)
    option = trees.opened(of_factory if override is None else override)
    if checks.is_number(option):
        return option
    x = called(inputs, name, option, lambda: step.done)
    if x is not option:
        return trees.map_leaves(_scheduled, x)
    results: dict[int, Any] = {}  # leaves with the same schedule share a number in the program

    def result(leaf: Any) -> Any:
        if not trees.may_be_function(leaf):
            return leaf
        if id(leaf) not in results:
            x = result_of(inputs.function, name, NUMBER_OF_UPDATES, leaf, step.done)
            results[id(leaf)] = _scheduled(x)
        return results[id(leaf)]

    return trees.map_leaves(result, option)


def _scheduled(x: Any) -> Any:
    return numerics.once(x) if checks.is_inexact(x) else x


def number_per_array(inputs: Inputs, step: Step, name: str, of_factory: PyTree) -> PerLeaf:
    """A number of the method: a single scalar if all leaves share it."""
    x = numbers.scalars(inputs.function, name, _numbers_of(inputs, step, name, of_factory))
    return _per_array(inputs, name, x)


def beta_per_array(inputs: Inputs, step: Step, name: str, of_factory: PyTree) -> BetaForms:
    """The same, in the forms of a decay rate."""
    forms = numbers.scalar_betas(inputs.function, name, _numbers_of(inputs, step, name, of_factory))
    return BetaForms(*(_per_array(inputs, name, form) for form in forms))


def _per_array(inputs: Inputs, name: str, x: PyTree) -> PerLeaf:
    if jax.tree_util.all_leaves([x]):
        return x
    return inputs.per_array(inputs.option(name, x).leaves)


def without_momentum(inputs: Inputs, step: Step) -> None:
    """An error where a call has a momentum and the state no buffer."""
    if (came := step.numbers.get("momentum")) is not None:
        expected = "None, since the factory had none, and the state has no buffer"
        begin = f"{inputs.function}: `momentum`"
        raise TypeError(f"{begin}: {checks.describe(came)}, expected {expected}.")


def rate_of_leaves(inputs: Inputs, name: str, learning_rate: LearningRate, step: Step) -> list[Any]:
    """The learning rate of each leaf of the unpacked tree: of this call, or else the factory's."""
    option = numbers.number(inputs.function, name, _numbers_of(inputs, step, name, learning_rate))
    arg = inputs.option(name, option)
    if any(map(np.ndim, arg.leaves)):
        if (share := told().share) is not None:
            arg = share.numbers_of_layer(arg, inputs.shapes)
        checks.broadcastable(arg, inputs.updated_shapes())
    if inputs.notes is not None and jax.tree_util.all_leaves([option]):
        note(inputs.notes, name, jnp.mean(jnp.asarray(option)))
    return list(arg.leaves)


def decay_of_leaves(
    inputs: Inputs, name: str, weight_decay: PyTree, use: Sequence[bool], step: Step, rule: str
) -> list[Any]:
    """The decay of each leaf of the unpacked tree.

    The Python number 0, which compiles to nothing, for none: where it is not used, or given as 0.
    """
    option = _numbers_of(inputs, step, name, weight_decay)
    if rules.is_zero(option):
        return [0.0] * len(use)
    inputs.require_params(f"`{name}`")
    read = numbers.scalars(inputs.function, name, option, _limit(rule))
    decays, structure = trees.flatten(read)
    with_raw = zip(decays, trees.flatten(option)[0], strict=True)
    decays = [0.0 if rules.is_zero(raw) else x for x, raw in with_raw]
    entries = inputs.option(name, structure.unflatten(decays)).leaves
    decays = [x if used and x is not None else 0.0 for x, used in zip(entries, use, strict=True)]
    if inputs.undecayed is not None:
        inputs.undecayed.check(inputs, name, decays)
    return decays


def mask(inputs: Parameters, name: str, tree: Mask | None) -> list[bool]:
    """The bool of each leaf of the unpacked tree; False where nothing is updated."""
    if tree is None:
        return [True] * len(trees.flatten(inputs.shapes)[0])
    tree = called(inputs, name, tree, lambda: _shapes(inputs))
    return checks.bools(inputs.option(name, tree))


def _shapes(inputs: Parameters) -> PyTree:
    """What an option that is a function is called with: no share, but all parameters."""
    shapes, share = trees.map_leaves(checks.shape_and_dtype, inputs.shapes), told().share
    return shapes if share is None else share.whole_shapes(shapes)
