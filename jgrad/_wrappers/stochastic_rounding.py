"""Trains bfloat16 parameters without float32 copies, by stochastic rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call
from jgrad._forms.places import places_of
from jgrad._forms.random_keys import element_keys
from jgrad._inputs.around import Rest, Then, finishing, in_float32, made_of, rest as rest_of
from jgrad._inputs.inputs import Finished
from jgrad._inputs.pair import counter, pair
from jgrad._quantized import bfloat16
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.random_bits import step_keys
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Count, Inner, MeshAxes
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "stochastic_rounding"
_PURPOSE = 2  # weights; moments are rounded with other bits


@state_of("stochastic_rounding")
class StochasticState(NamedTuple, Generic[Inner]):
    """State of `stochastic_rounding`. Field names are part of the checkpoint format.

    Attributes:
      done: number of completed updates, an int32 scalar; it saturates.
      inner: state of the transformation inside.

    Example:
      >>> tx = jgrad.stochastic_rounding(jgrad.adam(1e-3, moment_dtype=jnp.bfloat16))
      >>> state = tx.init({"w": jnp.ones((3, 2), jnp.bfloat16)})
      >>> int(state.done), state.inner.mw["w"].dtype.name
      (0, 'bfloat16')
    """

    done: jax.Array
    inner: Inner

    @property
    def step(self) -> NoReturn:
        """Removed: the name of `done` up to 0.6."""
        raise AttributeError("StochasticState: `step`: gone in 2.0, expected `done`.")

    @property
    def __jgrad_unrounded__(self) -> bool:
        """Asks `accumulate` to pass on means in float32."""
        return True


@explained
def stochastic_rounding(
    tx: AnyTransformation[Inner], *, seed: Count = 0, mesh_axes: MeshAxes = None
) -> Transformation[StochasticState[Inner]]:
    """Trains bfloat16 parameters without float32 copies, by rounding new weights stochastically.

        new     = w + tx(float32 g, w)                                     in float32
        rounded = the bfloat16 above new with probability (new - below) / (above - below), or below
        updates = rounded - w

    The expected value of `rounded` is `new`. On average, a weight therefore moves even by steps
    much smaller than the distance between two bfloat16 numbers, each of which would be lost by
    rounding to nearest. Weight decay is part of the step, so both are rounded only once. If the
    step is 0, the weight stays exactly the same. Infinity and NaN are preserved, and a finite new
    weight never becomes infinite. Parameters of other dtypes are optimized directly. Each bfloat16
    parameter has a state in `tx` like a float32 parameter; `moment_dtype` of `tx` makes it smaller.

    Use it in place of `master_weights`: inside `accumulate` and `skip_nonfinite`, and around
    clipping, the optimizer and `average_params`, which then averages weights before they are
    rounded.

    `w + updates` is exactly `rounded` if the new weight is between half and twice the old one.
    Otherwise, no bfloat16 update may lead there, and `w + updates` is within one unit in the last
    place of the larger of the two weights, as with `master_weights`.

    The random bits are a hash of (seed, step, leaf, element), so the state has no key. They are the
    same on any number of devices, on all replicas, after a restart, and if parameters are packed,
    unless by `layer_axes` along another axis than the first; inside `shard_map`, this needs
    `mesh_axes` or `zero`. They repeat after 2^31 updates, when the step counter saturates. Models
    under `vmap` share their random bits.

    Args:
      tx: any transformation. It gets bfloat16 gradients and parameters in float32.
      seed: an int of at least 0; it determines the random bits.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. PartitionSpecs make the random bits inside
        `shard_map` those of a single device, also of moments in `tx`. With names in a tree, each
        device has its own. Without either, that holds for leaves that JAX knows to be sharded
        (`check_vma=True`); all others have the bits of the first device.

    Returns:
      A transformation with state `StochasticState(done, inner)`. `update` needs the parameters.

    Raises:
      TypeError: `tx` is not a transformation, `seed` is not an int, `mesh_axes` has the wrong type,
        or a parameter is in float16 or 8 bits, for which you can use `master_weights`.
      ValueError: `seed` is below 0; from `init`, another wrapper that rounds weights is inside, or
        a `scale_by_*` without a learning rate after it.

    Example:
      >>> params = grads = {"w": jnp.ones((64, 256), jnp.bfloat16)}
      >>> tx = jgrad.stochastic_rounding(jgrad.gradient_descent(1e-4))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> moved = updates["w"] != 0  # to the nearest, none would
      >>> bool(moved.any()), bool(moved.all())
      (True, False)

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), section 3, for
      the rounding; Zamirai et al., "Revisiting BFloat16 Training" (2020), section 4, for weights.
    """
    tx = inside.transformation(_NAME, tx)
    checks.count(_NAME, "seed", seed, low=0)
    read_mesh_axes(_NAME, mesh_axes)

    def init(params: PyTree) -> StochasticState:
        arg = ArgLeaves.from_tree(_NAME, "params", params).with_arrays()
        checks.parameters(arg)
        _check_dtypes(arg)
        return StochasticState(counter(params), tx.init(_wide(params)))

    def update(
        updates: PyTree, state: StochasticState, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, StochasticState]:
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        inputs.require_params("the rounding of new weights")
        _check_dtypes(inputs.reference)
        step = optax.safe_increment(jnp.asarray(state.done))
        wide = parameters.wide_gradients(inputs, _is_rounded)
        wide_params, keys_of_step = _wide(params), step_keys(step)
        places = places_of(inputs, mesh_axes)

        def arrays(i: int) -> tuple[Leaf, Rounding]:
            p, place = inputs.reference.leaves[i], places[i] if places else None
            return p, Rounding(
                keys_of_step, element_keys(inputs.specs[i], seed, _PURPOSE, p, place)
            )

        def rest(i: int) -> Rest | None:
            after = rest_of(inputs, i)
            if not _is_rounded(inputs.reference.leaves[i]):
                return after
            return Rest(_rounded_update, arrays(i), (None,)).followed_by(
                finishing(inputs, i), after
            )

        weights = trees.flatten(wide_params)[0]
        then = Then(weights, rest, places, inputs.then)
        steps, inner = inputs.hand_over(tx, wide, state.inner, wide_params, then=then)
        new: list[Leaf] = trees.flatten(steps)[0]
        calls: dict[int, Call] = {}
        for i, (u, p) in enumerate(zip(new, inputs.reference.leaves, strict=True)):
            is_here = checks.is_numeric(u) and _is_rounded(p)  # no float0
            results = then.results(u, int(is_here))
            if results is not None:
                new[i] = Finished(*results) if is_here else Finished(u)
            elif is_here:
                u = jnp.broadcast_to(jnp.asarray(u, jnp.float32), p.shape)
                calls[i] = _rounded_update, (u, *arrays(i))
        for i, (u,) in zip(calls, leafwise.run(list(calls.values())), strict=True):
            new[i] = u
        return inputs.directions(new), StochasticState(step, inner)

    return pair(init, update, _NAME, StochasticState)


def _rounded_update(u: jax.Array, p: jax.Array, rounding: Rounding) -> tuple[jax.Array]:
    """What takes a weight to `p + u`, rounded stochastically."""
    return (_difference(rounding.to_bfloat16, p, u, rounding.bits(p)),)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _difference(
    to_bfloat16: Callable[[jax.Array], jax.Array], p: jax.Array, u: jax.Array, random: jax.Array
) -> jax.Array:
    """`rounded - p`. Few operations: on CPUs they decide the time of a step, not the memory."""
    w = p.astype(jnp.float32)
    new = w + u
    # Infinities, NaN, and numbers whose upper neighbour is infinite are truncated.
    up = jnp.where(jnp.abs(new) < bfloat16.LARGEST, random >> 16, jnp.uint32(0))
    bits = (bfloat16.bits_of(new) + up) & jnp.uint32(0xFFFF0000)
    far = jax.lax.bitcast_convert_type(bits, jnp.float32) - w
    # To nearest. With an infinite weight, NaN or overflow: the step, towards zero.
    fits = jnp.abs(far) <= bfloat16.LARGEST
    nearest = bfloat16.bits_of(far) + jnp.uint32(0x8000)
    return to_bfloat16(jnp.where(fits, nearest, bfloat16.bits_of(u)))


@_difference.defjvp
def _difference_jvp(
    to_bfloat16: Callable[[jax.Array], jax.Array],
    primals: tuple[jax.Array, ...],
    tangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """The derivative is that of the step, as if nothing were rounded."""
    return _difference(to_bfloat16, *primals), tangents[1].astype(jnp.bfloat16)


def _check_dtypes(params: ArgLeaves) -> None:
    """Rejects parameters below 32 bits except bfloat16: they would be rounded to nearest."""
    for i, p in enumerate(params.leaves):
        if checks.is_inexact(p) and not _is_rounded(p) and jnp.finfo(p.dtype).bits < 32:
            expected = f"bfloat16, or 32 bits or more; use `master_weights` for {p.dtype}"
            params.fail(i, TypeError, f"{checks.describe(p)}, expected {expected}")


def _is_rounded(p: Leaf) -> bool:
    return bool(getattr(p, "dtype", None) == jnp.bfloat16)


def _wide(params: PyTree) -> PyTree:
    """What the transformation inside gets: float32 for bfloat16 parameters."""

    def wide(p: Leaf) -> Leaf:
        return made_of(numerics.wide(p), in_float32, p) if _is_rounded(p) else p

    return trees.map_leaves(wide, params)
