"""Float32 copies of half-precision parameters, kept in the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leaf_moment import kept
from jgrad._forms.places import places_of
from jgrad._inputs.around import Rest, Then, finishing, rest as rest_of
from jgrad._inputs.inputs import Finished, Inputs
from jgrad._inputs.pair import pair
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Inner
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "master_weights"


@state_of("master_weights", master="weights")
class MasterState(NamedTuple, Generic[Inner]):
    """State of `master_weights`. Field names are part of the checkpoint format.

    Attributes:
      master: float32 copies of the half-precision parameters; None for others.
      inner: state of the transformation inside.

    Example:
      >>> params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
      >>> state = jgrad.master_weights(jgrad.adam(1e-3)).init(params)
      >>> state.master["w"].dtype.name, state.master["b"]
      ('float32', None)
      >>> int(state.inner.step)
      0
    """

    master: PyTree
    inner: Inner

    @property
    def __jgrad_unrounded__(self) -> bool:
        """Asks `accumulate` to pass on means in float32."""
        return True


@explained
def master_weights(tx: AnyTransformation[Inner]) -> Transformation[MasterState[Inner]]:
    """Trains float32 copies of half-precision parameters, and rounds the copies at each step.

        master' = master + tx(float32 g, master)
        updates = round(master') - w

    Just below 1, bfloat16 numbers are 2^-8 apart, so steps smaller than half of that are lost to
    rounding. The float32 copies keep such steps. `w + updates` is `master'` rounded to the dtype of
    w. If a step changes a weight by more than a factor of two, it may be off by one unit in the
    last place, which the next step corrects. Parameters of other dtypes are optimized directly.
    Each half-precision parameter costs 4 more bytes, and its state in `tx` is that of a float32
    parameter.

    Args:
      tx: any transformation. It gets half-precision gradients and parameters in float32.

    Returns:
      A transformation with state `MasterState(master, inner)`. `update` needs the parameters.

    Raises:
      TypeError: `tx` is not a transformation.
      ValueError: from `init`, another wrapper that rounds weights is inside, or a `scale_by_*`
        without a learning rate after it.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
      >>> tx = jgrad.master_weights(jgrad.gradient_descent(1e-4))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> bool((state.master["w"] < 1).all()), bool((updates["w"] == 0).all())
      (True, True)

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    """
    tx = inside.transformation(_NAME, tx)

    def init(params: PyTree) -> MasterState:
        parameters.checked(_NAME, params)
        master = trees.map_leaves(lambda p: numerics.wide(p) if _is_half(p) else None, params)
        return MasterState(master, tx.init(_optimized(master, params)))

    def update(
        updates: PyTree, state: MasterState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, MasterState]:
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        inputs.require_params("the master copy")
        copies = inputs.like_reference("state.master", state.master)
        _check_copies(copies, inputs)
        master = _optimized(state.master, params)
        wide = parameters.wide_gradients(inputs, _is_half)

        def rest(i: int) -> Rest | None:
            after, p = rest_of(inputs, i), inputs.reference.leaves[i]
            if not _is_half(p):
                return after
            commit, clips = inputs.commit, None
            arrays: tuple[Leaf, ...] = p, copies.leaves[i]
            if commit is not None:
                arrays, clips = (*arrays, commit.flag), commit.clips
            follows = Rest(_followed(clips), arrays, (copies.leaves[i], None))
            return follows.followed_by(finishing(inputs, i), after)

        weights = trees.flatten(master)[0]
        then = Then(weights, rest, places_of(inputs, None), inputs.then)
        steps, inner = inputs.hand_over(tx, wide, state.inner, master, then=then)
        copied = list(copies.leaves)
        after: list[Leaf] = trees.flatten(parameters.applied(master, steps))[0]
        directions: list[Leaf] = trees.flatten(steps)[0]
        old = {i: x for i, x in enumerate(copies.leaves) if x is not None}
        for i, u in enumerate(directions):
            if i not in old:
                directions[i] = u if then.results(u, 0) is None else Finished(u)
            elif results := then.results(u, 2):
                after[i], directions[i] = map(Finished, results)
        new = inputs.kept([after[i] for i in old], list(old.values()))
        for i, copy in zip(old, new, strict=True):
            copied[i] = copy
            if not isinstance(directions[i], Finished):
                directions[i] = _to_follow(copy, inputs.reference.leaves[i])
        master = inputs.moments(copied, copies.leaves)
        return inputs.directions(directions), MasterState(master, inner)

    return pair(init, update, _NAME, MasterState)


def _to_follow(copy: jax.Array, p: jax.Array) -> jax.Array:
    """What takes a parameter to its copy, rounded."""
    # From -60000 to 60000 is more than the largest float16: the next step adds the rest.
    rounded = numerics.wide(copy.astype(p.dtype))
    far, largest = rounded - numerics.wide(p), float(jnp.finfo(p.dtype).max)
    near = jnp.clip(far, -largest, largest)
    # If the copy overflows float16, the update is infinite, and `skip_nonfinite` detects it.
    return jnp.where(jnp.isinf(rounded), far, near)


@functools.cache  # one function object for each choice, so that JAX's caches find it again
def _followed(clips: bool | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The new copy and the update of one leaf, if they follow the update in one kernel."""

    def followed(
        u: jax.Array, p: jax.Array, copy: jax.Array, *flag: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        new = numerics.wide(copy) + numerics.wide(u)
        new = new if clips is None else kept(copy.dtype, clips)(new, copy, *flag)
        return new, _to_follow(new, p)

    return followed


def _check_copies(copies: ArgLeaves, inputs: Inputs) -> None:
    """A copy of each half-precision parameter that is updated, and of no float32 one."""
    for i, (copy, p) in enumerate(zip(copies.leaves, inputs.reference.leaves, strict=True)):
        is_real = checks.is_array(copy) and jnp.issubdtype(copy.dtype, jnp.floating)
        fits, expected = copy is None, "None for a parameter that needs no copy"
        if _is_half(p):
            fits = is_real or (copy is None and not inputs.is_updated[i])
            expected = f"a float32 copy of a parameter of {p.dtype}"
        if not fits:
            remedy = "call `init` with parameters of the dtypes that `update` gets"
            copies.fail(i, ValueError, f"{checks.describe(copy)}, expected {expected}; {remedy}")
    checks.same_shapes(copies, inputs.reference)


def _is_half(p: Leaf) -> bool:
    dtype = jnp.result_type(float if p is None else p)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _optimized(master: PyTree, params: PyTree) -> PyTree:
    """What the transformation inside gets: the copy if there is one, else the parameter."""
    return jax.tree.map(lambda m, p: m if _is_half(p) else p, master, params, is_leaf=trees.is_none)
