"""An exponential moving average of the parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import rules
from jgrad._inputs import methods, options
from jgrad._inputs.options import Scalar
from jgrad._inputs.state import counter
from jgrad._inputs.update import Leaves
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping

_NAME = "ema"


class EmaState(NamedTuple):
    """State of `ema`. The field names are a file format: checkpoints hold them.

    Attributes:
      done: number of updates, an int32 scalar; it saturates.
      average: a tree like the parameters, float32 for half-precision ones.
    """

    done: jax.Array
    average: PyTree


def ema(
    decay: Scalar | Callable[[jax.Array], Any],
) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average of the parameters; updates pass as they are.

        average' = decay average + (1 - decay) (w + updates)

    It starts at the first parameters, so that no correction of its start is needed. Put it last in
    `optax.chain`, where the updates are those that will be applied, and the chain inside of
    `accumulate`, `skip_nonfinite` and `master_weights`: there it averages once per update, and the
    float32 copies. `optax.tree.get(state, "average")` reads it. Integer leaves are copied.

    Args:
      decay: in [0, 1), or a function of the number of updates done (0 at the first), such as
        `lambda done: jnp.minimum(0.999, (1 + done) / (10 + done))`.

    Returns:
      A transformation with state `EmaState(done, average)`. Its update needs the parameters.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), in
      the exponential form of Tarvainen and Valpola (2017), section 2.
    """
    if not callable(decay):
        options.beta(_NAME, "decay", decay)

    def init(params: PyTree) -> EmaState:
        row = checks.Row.of(_NAME, "params", params).with_arrays()
        # Copies, so that parameters and state can be donated together.
        leaves = [
            None if p is None else jnp.array(wrapping.wide(p), copy=True)
            for p in checks.parameters(row)
        ]
        return EmaState(counter(params), trees.flatten(params)[1].unflatten(leaves))

    def update(
        updates: PyTree, state: EmaState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, EmaState]:
        wrapping.check_state(_NAME, state, EmaState)
        leaves = Leaves(_NAME, updates, params)
        leaves.require_params("the average")
        old = leaves.row("state.average", state.average)
        checks.same_shapes(old, leaves.reference)
        new = trees.flatten(wrapping.applied(params, updates))[0]
        beta = options.beta(_NAME, "decay", decay(state.done) if callable(decay) else decay)
        floating = [x is not None and jnp.issubdtype(x.dtype, jnp.inexact) for x in old.leaves]
        averaged = methods.apply(
            rules.average,
            [x if f else None for x, f in zip(new, floating, strict=True)],
            [x if f else None for x, f in zip(old.leaves, floating, strict=True)],
            beta.value,
            beta.complement,
        )
        kept = [
            a.astype(x.dtype) if f else n
            for a, x, n, f in zip(averaged, old.leaves, new, floating, strict=True)
        ]
        average = trees.flatten(params)[1].unflatten(kept)
        return updates, EmaState(optax.safe_increment(state.done), average)

    return optax.GradientTransformationExtraArgs(init, update)
