"""The plumbing of an `init`/`update` pair, so that a method writes only its arithmetic.

`pair` is for trees as users have them: whole models, and variables for arrays. Behind it the leaves
of parameters that are not `None` are arrays, or are numbers with a gradient, or are wrong; so that
methods and wrappers see no model, only a tree of arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import rules
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.moment import Moment, Shapes, Step, check_form
from jgrad._inputs.numbers import OfCall
from jgrad._inputs.state import AS_PARAMETERS, MomentOptions, OptState
from jgrad._trees import checks, trees, variables
from jgrad._trees.explained import Transformation, check_keywords, keywords_of
from jgrad._trees.told import told
from jgrad._trees.trees import PyTree

# (inputs, step) -> (updates, new first moments, new second moments), as a function of one leaf
# returns them that was given `step.mw` and `step.vw`; or None where the method has no such moment.
# Updates are added to the parameters. What else a state has comes behind them, field by field.
Compute = Callable[[Inputs, Step], tuple[Any, ...]]

# (parameters) -> the shapes of the moments.
ShapesOf = Callable[[Parameters], Shapes]


class MoreFields(NamedTuple):
    """What a state has beside step and moments, in the fields behind those of `OptState`.

    Attributes:
      init: the other fields before the first update.
      read: what an update starts from, checked: `step.more`.
    """

    init: Callable[[Parameters, Shapes], tuple[PyTree, ...]]
    read: Callable[[Inputs, Shapes, Any], Any]


def transformation(
    name: str,
    compute: Compute,
    *,
    mw: bool = False,
    vw: bool = False,
    shapes_of: ShapesOf | None = None,
    moments: MomentOptions = AS_PARAMETERS,
    params_for: str | None = None,
    more: MoreFields | None = None,
    state_type: Any = OptState,
    stays_finite: bool = True,
) -> Transformation:
    """An optimizer with the state `OptState(step, mw, vw)`, or with one that has more fields.

    Args:
      name: what users call it, for messages.
      compute: the method. It returns updates, which are added to the parameters.
      mw: whether the method has a first moment, of the shapes of the parameters.
      vw: whether it has such a second moment.
      shapes_of: in the place of both, of a method whose moments have other shapes.
      moments: in which form they are stored.
      params_for: what in the method needs the parameters, for the error without them.
      more: what the state has beside.
      state_type: of the state; an `OptState` is taken, too, where it has nothing beside.
      stays_finite: whether it makes nothing non-finite of finite gradients; else wrappers that skip
        steps look at its results, as they do at those of other libraries.
    """
    moments = moments.checked(name)
    kind = OptState if more is None else state_type

    def shapes(inputs: Parameters) -> Shapes:
        if shapes_of is not None:
            return shapes_of(inputs)
        return Shapes(inputs.tree if mw else None, inputs.tree if vw else None)

    def init(params: PyTree) -> Any:
        inputs = Parameters(name, params)
        of_moments = shapes(inputs)
        others = () if more is None else more.init(inputs, of_moments)
        return state_type(*moments.init(inputs, of_moments), *others)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **numbers: Any
    ) -> tuple[PyTree, Any]:
        around = told()
        inputs = Inputs(
            name, updates, params, around if stays_finite else around._replace(commit=None)
        )
        if params_for is not None:
            inputs.require_params(params_for)
        of_moments = shapes(inputs)
        of_call = OfCall(numbers) if numbers else None
        step = moments.read(inputs, state, of_moments, of_call or {}, kind)
        if more is not None:
            step = step._replace(more=more.read(inputs, of_moments, state))
        values, new_mw, new_vw, *others = compute(inputs, step)
        if of_call is not None:
            of_call.check_names(name)
        new = type(state)(
            step.number,
            _in_state(name, "mw", step.mw, new_mw, state.mw),
            _in_state(name, "vw", step.vw, new_vw, state.vw),
            *others,
        )
        return inputs.directions(values), new

    return pair(init, update, name, checks_options=True)


def _in_state(
    name: str, field: str, moment: Moment, new: list[Any] | None, state: PyTree
) -> PyTree:
    """The new part of the state, which has to be what `write` stored."""
    if isinstance(new, list):
        fits = state is not None or all(x is None for x in new)
    else:
        fits = state is None and new is None
    if not fits:
        expected = f"what a function of one leaf wrote into `step.{field}`"
        if state is None:
            expected = f"None, since the method has no `{field}`"
        came = type(new).__name__
        raise TypeError(f"{name}: new moments `{field}`: {came}, expected {expected}.")
    if new is None or state is None:
        return None
    check_form(name, new, moment.old)
    # The old moments stay where there is no new one.
    return trees.flatten(state)[1].unflatten(rules.cast_back(new, moment.old))


# ---- trees as users have them ------------------------------------------------------------------


def pair(
    init: Callable[[PyTree], Any],
    update: Callable[..., tuple[PyTree, Any]],
    name: str,
    *,
    handed_on: Sequence[str] = (),
    checks_options: bool = False,
) -> Transformation:
    """The transformation of that name, of functions that see arrays alone.

    Args:
      init: of the parameters.
      update: of one call.
      name: for messages.
      handed_on: which extra arguments `update` reads itself, too.
      checks_options: whether `update` itself knows which of the options a call may change.
    """
    taken = keywords_of(update, handed_on)

    def init_of_model(params: PyTree) -> Any:
        return variables.blocks_of_variables(init(arrays_of(params)))

    def update_of_model(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        if extra_args:
            check_keywords(name, extra_args, taken, checks_options=checks_options)
        updates, before = checks.values_of(updates), checks.values_of(state)
        params, state = arrays_of(params, updates), variables.variables_of_blocks(before)
        share = told().share
        if share is None:
            steps, new = update(updates, state, params, **extra_args)
        else:
            share.check(name, updates)
            with share.within(own=True):
                steps, new = update(updates, state, params, **extra_args)
            share.add(steps)
        if state is before:
            return steps, new
        structure: Any = jax.tree.structure(state)
        if structure == jax.tree.structure(new):
            return steps, variables.in_form_of(before, new)
        return steps, variables.blocks_of_variables(new)  # as where a sum begins

    return Transformation(init_of_model, update_of_model)


def arrays_of(params: PyTree, updates: PyTree = None) -> PyTree:
    """`None` for leaves of a model that are no arrays and have no gradient: functions, strings.

    A number of Python stays, since `jax.grad` differentiates it, unless its gradient is None.
    """
    params = checks.values_of(params)
    leaves, structure = trees.flatten(params)
    if jax.tree_util.treedef_is_leaf(structure) or all(map(checks.is_inexact, leaves)):
        return params  # the same object, in most calls: `None`, one parameter, or arrays alone
    gradients, of_gradients = trees.flatten(updates)
    known = of_gradients == structure
    if not known:
        gradients = [None] * len(leaves)

    def is_left_out(p: Any, g: Any) -> bool:
        return g is None and (checks.is_no_parameter(p) or (known and checks.is_number(p)))

    left_out = list(map(is_left_out, leaves, gradients))
    if not any(left_out):
        return params
    return structure.unflatten([None if x else p for p, x in zip(leaves, left_out, strict=True)])
