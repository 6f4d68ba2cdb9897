"""An exponential moving average of the parameters after each step."""

from __future__ import annotations

from typing import Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import apply
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.pair import counter, pair
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Inner, Scalar, Schedule
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree, state_of
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "average_params"


@state_of("average_params", average="weights")
class EmaState(NamedTuple, Generic[Inner]):
    """State of `average_params`. Field names are part of the checkpoint format.

    Attributes:
      done: number of completed updates, an int32 scalar; it saturates.
      average: a tree like the parameters, in float32 for half-precision ones.
      inner: state of the transformation inside; missing in pickles from 1.1.

    Example:
      >>> tx = jgrad.average_params(jgrad.adam(1e-3), 0.999)
      >>> state = tx.init({"w": jnp.ones((3, 2), jnp.bfloat16)})
      >>> int(state.done), state.average["w"].shape, state.average["w"].dtype.name
      (0, (3, 2), 'float32')
    """

    done: jax.Array
    average: PyTree
    inner: Inner = None  # type: ignore[assignment]  # in pickles from 1.1


@explained
def average_params(
    tx: AnyTransformation[Inner],
    decay: Scalar | Schedule,
    *,
    start: Scalar = 0,
    debias: bool = False,
) -> Transformation[EmaState[Inner]]:
    """Keeps an exponential moving average of the parameters after each step of `tx`.

        updates = tx(g, w)
        average' = decay average + (1 - decay) (w + updates)

    The average starts from the initial parameters, or from those after `start` updates; until then,
    it is a copy of the current ones. With `debias`, these starting parameters get no weight: after
    n updates, the n parameters since then have the weights `(1 - decay) decay^i / (1 - decay^n)`,
    where i = 0 is the newest. The average in the state is already debiased. Neither option changes
    the structure of the state, so you can change both in the middle of a run.

    Put it around the whole chain but inside `accumulate` and `skip_nonfinite`, so that it averages
    once per update. Inside `master_weights`, it averages the float32 copies. Read the average by
    `optax.tree.get(state, "average")`. Integer leaves are copied.

    Args:
      tx: any transformation. Its updates have to be applied as they are.
      decay: in [0, 1), or a function of the number of completed updates (0 for the first), such as
        a schedule, a module, or `lambda done: jnp.minimum(0.999, (1 + done) / (10 + done))`.
      start: number of updates before averaging begins, an int in [0, 2^31).
      debias: see above. It cannot be combined with a function for `decay`.

    Returns:
      A transformation with state `EmaState(done, average, inner)`. `update` needs the parameters.

    Raises:
      ValueError: a Python number is out of range; from `init`, a wrapper that belongs outside is
        inside, or a `scale_by_*` without a learning rate after it.
      TypeError: `tx` is not a transformation, or an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.average_params(jgrad.gradient_descent(0.1), 0.999)
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> average = optax.tree.get(state, "average")
      >>> jax.tree.map(jnp.shape, average)
      {'b': (2,), 'w': (3, 2)}

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), in
      the exponential form of Tarvainen and Valpola (2017), section 2.
    """
    tx = inside.transformation(_NAME, tx)
    if not trees.may_be_function(decay):
        numbers.beta(_NAME, "decay", cast(Scalar, decay))
    if checks.is_array(start):  # it may be traced
        numbers.scalar(_NAME, "start", start)
    else:
        checks.count(_NAME, "start", start, low=0)
    checks.boolean(_NAME, "debias", debias)
    if debias and trees.may_be_function(decay):
        expected = "False where `decay` is a function"
        raise ValueError(f"{_NAME}: `debias`: True, expected {expected}.")

    def init(params: PyTree) -> EmaState:
        average = parameters.copied(parameters.checked(_NAME, params))
        return EmaState(counter(params), average, tx.init(params))

    def update(
        updates: PyTree, state: EmaState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, EmaState]:
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        inputs.require_params("the average")
        steps, inner = inputs.hand_over(tx, updates, state.inner, params)
        old = parameters.copies_in_state(inputs, "state.average", state.average)
        after = trees.flatten(parameters.applied(params, steps, inputs.then))[0]
        # Where the average has None, `init` saw no parameter: it may have got only part of a model.
        new = {i: after[i] for i, o in enumerate(old) if o is not None}
        decay_now = options.called(inputs, "decay", decay, lambda: state.done)
        beta = _at(numbers.beta(_NAME, "decay", decay_now), state.done, start, debias=debias)
        rows = [i for i, x in new.items() if checks.is_inexact(x)]  # integers are copied
        pairs = leafwise.at((after, old), rows)
        averaged = apply(rules.average, *pairs, beta.value, beta.complement)
        new |= zip(rows, inputs.kept(averaged, pairs[1]), strict=True)
        average = inputs.moments([new.get(i) for i in range(len(old))], old)
        return steps, EmaState(optax.safe_increment(state.done), average, inner)

    return pair(init, update, _NAME, EmaState)


def _at(beta: BetaForms, done: jax.Array, start: Scalar, *, debias: bool) -> BetaForms:
    """The decay of one update: 0 up to the start, and less than `beta` after it with `debias`."""
    if rules.is_zero(start) and not debias:
        return beta
    start = jnp.asarray(start, done.dtype)
    value, complement = jnp.asarray(beta.value), jnp.asarray(beta.complement)
    if debias:
        # The n-th has the weight (1 - beta) / (1 - beta^n), in the average of n parameters.
        before = jnp.maximum(done - start, 0).astype(complement.dtype)  # n - 1; n may overflow
        rest, whole = (numerics.one_minus_power(beta.log, x) for x in (before, before + 1))
        value, complement = value * (rest / whole), complement / whole
    is_copy = done < start
    return BetaForms(
        jnp.where(is_copy, jnp.zeros_like(value), value),
        jnp.where(is_copy, jnp.ones_like(complement), complement),
        beta.log,
    )
