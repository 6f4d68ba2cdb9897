"""Options of transformations: checked by the factory, and read per leaf in each update."""

import inspect
import types
from collections.abc import Callable

import jax
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import PerLeaf
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.moment import Step
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Mask
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.told import told

# ---- what a factory can check ------------------------------------------------------------------


def check(function: str, read: Callable[[str, str, PyTree], object], **numbers: PyTree) -> None:
    """What `read` says of numbers; a schedule is called in each update only."""
    for name, x in numbers.items():
        _check_called(function, name, x)
        if not trees.may_be_function(x):
            read(function, name, x if checks.is_number(x) else _without_schedules(x))


def _without_schedules(tree: PyTree) -> PyTree:
    # A number that is in the range of every option.
    return trees.map_leaves(lambda x: 0.5 if trees.may_be_function(x) else x, trees.opened(tree))


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


def _check_called(function: str, name: str, x: object) -> None:
    """No function of jgrad in the place of what it returns: `hidden_matrices` without the call."""
    if isinstance(x, types.FunctionType) and (x.__module__ or "").startswith("jgrad."):
        public = f"jgrad.{x.__name__}"
        expected = f"what it returns: call it, `{name}={public}(...)`"
        raise TypeError(f"{function}: `{name}`: the function `{public}`, expected {expected}.")


# ---- an entry per leaf -------------------------------------------------------------------------


def called(inputs: Parameters, name: str, x: PyTree, argument: Callable[[], object]) -> PyTree:
    """`x(argument)` if the option is a function, else `x`."""
    if not callable(x) or not trees.is_function(x, inputs.shapes):
        return x
    value = argument()
    what = NUMBER_OF_UPDATES if checks.is_array(value) else SHAPES
    if not jax.tree_util.all_leaves([x]):
        what += f", since its structure is not a prefix of that of `{inputs.reference.name}`"
    return result_of(inputs.function, name, what, x, value)


NUMBER_OF_UPDATES, SHAPES = "the number of updates", "the whole tree of shapes"


def result_of(
    function: str, name: str, what: str, x: Callable[..., PyTree], *args: object
) -> PyTree:
    """`x(*args)` of an option that is a function; its error says of which option it is.

    `what` are the arguments, in words.
    """
    try:
        return x(*args)
    except Exception as error:
        error.add_note(f"{function}: `{name}` was called with {what}.")
        raise


def with_results(inputs: Inputs, step: Step, name: str, x: PyTree) -> PyTree:
    """Numbers with what schedules return in the place of these."""
    option = trees.opened(x)
    if checks.is_number(option):
        return option
    value = called(inputs, name, option, lambda: step.done)
    if value is not option:
        return trees.map_leaves(_scheduled, value)
    results: dict[int, Leaf] = {}  # leaves with the same schedule share a number in the program

    def result(leaf: Leaf) -> Leaf:
        if not trees.may_be_function(leaf):
            return leaf
        if id(leaf) not in results:
            at_step = result_of(inputs.function, name, NUMBER_OF_UPDATES, leaf, step.done)
            results[id(leaf)] = _scheduled(at_step)
        return results[id(leaf)]

    return trees.map_leaves(result, option)


def _scheduled(x: PyTree) -> PyTree:
    return numerics.once(x) if checks.is_inexact(x) else x


def per_array(inputs: Inputs, name: str, x: PyTree) -> PerLeaf:
    """A number, or for a tree of them one for each array."""
    if jax.tree_util.all_leaves([x]):
        return x
    return inputs.per_array(inputs.option(name, x).leaves)


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
