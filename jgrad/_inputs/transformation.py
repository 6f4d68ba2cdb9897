"""The plumbing of an `init`/`update` pair, so that a method writes only its arithmetic."""

from collections.abc import Callable
from typing import Any

import optax

from jgrad._inputs import options
from jgrad._inputs.commit import Commit
from jgrad._inputs.moments import MomentOptions
from jgrad._inputs.options import LearningRate
from jgrad._inputs.pair import pair
from jgrad._inputs.state import OptState
from jgrad._inputs.update import Update
from jgrad._trees.trees import PyTree

# (update, state, learning rates) -> (updates, new first moments, new second moments). Updates are
# added to the parameters. Moments are lists with an entry per leaf, or None where the method has no
# such moment. `state.step` is the number of this update, counted from 1.
Compute = Callable[[Update, OptState, list[Any]], tuple[list[Any], Any, Any]]

# (parameters, as the gradients of an update of them) -> the shape of each second moment, or None: a
# tree like the parameters, of a method that has second moments for some elements alone.
SecondShapes = Callable[[Update], PyTree]

# (update, learning rate of this call or None, updates done, extra arguments) -> learning rates.
RatesOf = Callable[[Update, PyTree, Any, dict[str, Any]], list[Any]]

# In place of a learning rate: the method has none, and its direction is the update.
UNSCALED: Any = object()

_AS_PARAMETERS = MomentOptions(None)


def transformation(
    name: str,
    compute: Compute,
    *,
    learning_rate: LearningRate,
    mw: bool = False,
    vw: bool | SecondShapes = False,
    moments: MomentOptions = _AS_PARAMETERS,
    params_for: str | None = None,
    rates_of: RatesOf | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with the state `OptState(step, mw, vw)`.

    Args:
      name: what users call it, for messages.
      compute: the method. It returns updates, which are added to the parameters.
      learning_rate: what the user gave; `UNSCALED` where the method has none, as `scale_by_adam`.
      mw: whether the method has a first moment.
      vw: whether the method has a second moment, or the shapes of those that it has.
      moments: in which form they are stored.
      params_for: what in the method needs the parameters, for the error without them.
      rates_of: how the rates of an update are read, of a method with several.
    """
    if learning_rate is not UNSCALED:
        options.check_learning_rate(name, learning_rate)
    moments.check(name)
    default_rate = learning_rate

    def init(params: PyTree) -> OptState:
        used = vw(Update(name, params, params)) if callable(vw) else vw
        return moments.init(name, params, mw=mw, vw=used)

    def update(
        updates: PyTree,
        state: OptState,
        params: PyTree = None,
        *,
        learning_rate: PyTree = None,
        commit: Commit | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OptState]:
        inputs = Update(name, updates, params, commit)
        if params_for is not None:
            inputs.require_params(params_for)
        used = vw(inputs) if callable(vw) else vw
        old = inputs.read(state, mw=mw, vw=used)
        moments.check_state(inputs, old, vw=used)
        rates: list[Any] = []
        if rates_of is not None:
            rates = rates_of(inputs, learning_rate, state.step, extra_args)
        elif default_rate is not UNSCALED:
            rates = options.learning_rates(inputs, default_rate, learning_rate, state.step)
        values, new_mw, new_vw = compute(inputs, old, rates)
        new = OptState(
            old.step,
            inputs.moments(new_mw, old.mw) if mw else None,
            inputs.moments(new_vw, old.vw, like=state.vw) if vw else None,
        )
        return inputs.directions(values), new

    return pair(init, update)
