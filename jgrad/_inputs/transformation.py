"""The plumbing of an `init`/`update` pair, so that a method writes only its arithmetic."""

from collections.abc import Callable
from typing import Any

import optax

from jgrad._inputs.commit import Commit
from jgrad._inputs.moment import Moment, MomentShapes, NewMoments, Step
from jgrad._inputs.moments import MomentOptions
from jgrad._inputs.pair import pair
from jgrad._inputs.parameters import Parameters
from jgrad._inputs.state import OptState
from jgrad._inputs.update import Update
from jgrad._trees.trees import PyTree

# (inputs, step) -> (updates, new first moments, new second moments). Updates are added to the
# parameters. Moments are what `step.mw.write` and `step.vw.write` returned, or None where the
# method has no such moment.
Compute = Callable[[Update, Step], tuple[list[Any], NewMoments | None, NewMoments | None]]

# (parameters) -> the shapes of the moments.
ShapesOf = Callable[[Parameters], MomentShapes]

_AS_PARAMETERS = MomentOptions(None)


def transformation(
    name: str,
    compute: Compute,
    *,
    mw: bool = False,
    vw: bool = False,
    shapes_of: ShapesOf | None = None,
    moments: MomentOptions = _AS_PARAMETERS,
    params_for: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with the state `OptState(step, mw, vw)`.

    Args:
      name: what users call it, for messages.
      compute: the method. It returns updates, which are added to the parameters.
      mw: whether the method has a first moment, of the shapes of the parameters.
      vw: whether it has such a second moment.
      shapes_of: in the place of both, of a method whose moments have other shapes.
      moments: in which form they are stored.
      params_for: what in the method needs the parameters, for the error without them.
    """
    moments.check(name)

    def shapes(inputs: Parameters) -> MomentShapes:
        if shapes_of is not None:
            return shapes_of(inputs)
        return MomentShapes(inputs.tree if mw else None, inputs.tree if vw else None)

    def init(params: PyTree) -> OptState:
        inputs = Parameters(name, params)
        return moments.init(inputs, shapes(inputs))

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        commit: Commit | None = None,
        **numbers: Any,
    ) -> tuple[PyTree, OptState]:
        inputs = Update(name, updates, params, commit)
        if params_for is not None:
            inputs.require_params(params_for)
        step = moments.read(inputs, state, shapes(inputs))._replace(numbers=numbers)
        values, new_mw, new_vw = compute(inputs, step)
        new = OptState(
            step.number,
            _in_state(name, "mw", step.mw, new_mw, state.mw),
            _in_state(name, "vw", step.vw, new_vw, state.vw),
        )
        return inputs.directions(values), new

    return pair(init, update)


def _in_state(
    name: str, field: str, moment: Moment, new: NewMoments | None, state: PyTree
) -> PyTree:
    """The new part of the state, which has to come from the door."""
    if state is None and (new is None or not any(x is not None for x in new.stored)):
        return None
    if state is None or not isinstance(new, NewMoments):
        expected = f"what `step.{field}.write(calls(rule, ...))` returns"
        if state is None:
            expected = f"None, since the method has no `{field}`"
        came = type(new).__name__
        raise TypeError(f"{name}: new moments `{field}`: {came}, expected {expected}.")
    return moment.in_tree(new, state)
