"""The states of `accumulate`, and how many mini-batches make a window."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._trees import checks, trees, values
from jgrad._trees.protocols import state_of
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inside


@state_of("accumulate", total="sum")
class AccumulateState(NamedTuple):
    """State of `accumulate`. The field names are a file format: checkpoints hold them.

    `gradient_step` and `has_updated` are those of `optax.MultiSteps`, read from the state inside.

    Attributes:
      mini_step: calls since the last window was closed, an int32 scalar.
      count: those among them whose gradients were finite.
      skipped: mini-batches left out since the start; it saturates.
      total: sum of the gradients of this window; a tree like the parameters, in float32 or wider.
        None where each window is one mini-batch: `every=1`.
      inner: state of the transformation inside.

    Example:
      >>> state = jgrad.accumulate(jgrad.adam(1e-3), every=4).init({"w": jnp.ones((3, 2))})
      >>> int(state.mini_step), int(state.skipped), state.total["w"].shape
      (0, 0, (3, 2))
      >>> int(state.inner.step), int(state.gradient_step), bool(state.has_updated)
      (0, 0, False)
    """

    mini_step: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`
    skipped: jax.Array
    total: PyTree
    inner: PyTree

    @property
    def gradient_step(self) -> jax.Array:
        """Updates done, by optax's name: as the transformation inside counts them."""
        done: jax.Array | None = inside.updates_done(self.inner)
        if done is None:
            came = f"{type(self).__name__}: `gradient_step`: no state inside counts its updates"
            raise AttributeError(f"{came}, expected one of a method of jgrad, or of a schedule.")
        return done

    @property
    def has_updated(self) -> jax.Array:
        """Whether no window is open after a first update: `optax.MultiSteps.has_updated(state)`.

        Also after a window that updated nothing, since no mini-batch of it was finite.
        """
        return (self.mini_step == 0) & (self.gradient_step > 0)

    def __jgrad_report__(self) -> dict[str, jax.Array]:
        """What `report` reads."""
        return {"skipped_mini_batches": self.skipped}

    def __jgrad_rejected__(self, new: Any, finite: jax.Array | None) -> Any:
        return without_window(self, new, finite)


@state_of("accumulate", total="sum")
class WeightedAccumulateState(NamedTuple):
    """State of `accumulate(..., weighted=True)`. The field names are a file format.

    Attributes:
      mini_step: as in `AccumulateState`, like all but the last.
      count: likewise.
      skipped: likewise.
      total: sum of weight times gradient, of this window.
      inner: state of the transformation inside.
      weight: sum of the weights of those in `count`, a float32 scalar.

    Example:
      >>> tx = jgrad.accumulate(jgrad.adam(1e-3), every=4, weighted=True)
      >>> float(tx.init({"w": jnp.ones((3, 2))}).weight)
      0.0
    """

    mini_step: jax.Array
    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`
    skipped: jax.Array
    total: PyTree
    inner: PyTree
    weight: jax.Array


for _name in ("gradient_step", "has_updated", inside.REPORT, inside.REJECTED):
    # A `NamedTuple` inherits from no other.
    setattr(WeightedAccumulateState, _name, vars(AccumulateState)[_name])


def without_window(old: Any, new: Any, finite: jax.Array | None) -> Any:
    """A state without the window, if its update was rejected: kept, it would make the next so."""
    zero = jnp.zeros_like(old.count)
    nothing = trees.map_leaves(numerics.zeros_like, old.total)
    weight = map(jnp.zeros_like, old[5:])
    state = type(old)(zero, zero, new.skipped, nothing, old.inner, *weight)
    if finite is None:
        return state
    closed = finite & (new.mini_step == 0)
    old = old._replace(skipped=new.skipped)
    return jax.tree.map(lambda x, o: x if x is o else jnp.where(closed, x, o), state, old)


def length(function: str, every: int | Callable[[jax.Array], Any], state: PyTree) -> Any:
    """The mini-batches of the window that is open, by the number of updates that a state counts."""
    if not callable(every):
        return int(every)
    done = inside.updates_done(state)
    if done is None:
        expected = "an int where no state inside counts its updates, as those of jgrad's methods do"
        raise ValueError(f"{function}: `every`: a function, expected {expected}.")
    x = every(done)
    if isinstance(x, (jax.Array, np.ndarray)) and x.shape == () and x.dtype.kind in "iu":
        return x.astype(jnp.int32)
    if checks.is_array(x) and not isinstance(x, np.integer):
        came = checks.describe(x)
        raise TypeError(f"{function}: `every`: a function that returns {came}, expected an int.")
    values.count(function, "every", x)
    return int(x)
