"""Lion: the sign of an average, so that every weight moves by the learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import apply
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import functional, kinds
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import of_one_leaf
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._trees.annotations import (
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Mw,
    Number,
    Weights,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree


@of_one_leaf
def lion_of_leaf(g: jax.Array, mw: Moments, beta1: BetaForms, beta2: BetaForms) -> jax.Array:
    """The direction of one leaf, of the moment before this gradient is in it."""
    direction = numerics.sign(rules.average(g, mw.old, beta1.value, beta1.complement))
    mw.write(rules.average, g, mw.old, beta2.value, beta2.complement)
    return direction


@functional.update(
    {"w": None, "mw_tm1": ("dcdw", "beta2")},
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    mw_tm1=Role.FIRST_MOMENT,
    lr=Role.RATE,
    beta1=kinds.Beta,
    beta2=kinds.Beta,
)
def lion_update(
    w: Weights,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: Mw,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.99,
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[Weights, Mw]:
    """Updates weights and the moment by one step of Lion.

        w'  = w - lr sign(beta1 mw_tm1 + (1 - beta1) dcdw)
        mw' = beta2 mw_tm1 + (1 - beta2) dcdw

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      mw_tm1: moment from the previous step, of a shape that broadcasts to that of `w`.
      beta1: weight of the moment in the direction, in [0, 1).
      beta2: decay rate of the moment, in [0, 1).
      stop_gradients: apply `jax.lax.stop_gradient` to `w'`, but not to the moments.
      out: None.

    Returns:
      `(w', mw')`, each with the dtypes of the argument it replaces.

    Raises:
      As `adam_step`, and a TypeError if `w` has an integer leaf.

    Example:
      >>> w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = jax.tree.map(jnp.ones_like, w)
      >>> w, mw = jgrad.lion_update(w, grads, 0.1, jax.tree.map(jnp.zeros_like, w))
      >>> float(w["b"][0])
      -0.10000000149011612

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
    """
    direction, mw = lion_of_leaf(dcdw, mw_tm1, beta1, beta2)
    return functional.returned(apply(rules.descent, direction, lr), mw)


class _Options(NamedTuple):
    beta1: kinds.Beta
    beta2: kinds.Beta


def _lion(
    name: str,
    options: _Options,
    moments: MomentOptions,
    descent: kinds.DescentOptions | None = None,
) -> Transformation[OptState]:
    if descent is not None:
        descent.check(name)
    options.beta1.check(name)
    options.beta2.check(name)

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        betas = options.beta1.read(inputs, step), options.beta2.read(inputs, step)
        descent_now = None if descent is None else descent.read(inputs, step)
        args = inputs.g, step.moments["mw"], *betas
        return lion_of_leaf.update(inputs, *args, descent=descent_now)

    return transformation(name, compute, has=("mw",), moments=moments)


@explained
def lion(
    learning_rate: LearningRate,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Lion, which moves each weight along the sign of an average of gradients.

        direction = sign(beta1 m + (1 - beta1) g)
        m'        = beta2 m + (1 - beta2) g
        w'        = w - learning_rate (direction + weight_decay w)

    Every weight moves by the full learning rate, so use a learning rate three to ten times smaller
    than Adam's, and a weight decay that is larger by the same factor. Lion keeps one moment instead
    of Adam's two. The defaults are those of the paper and of `optax.lion`, except that the latter
    has a weight decay of 1e-3.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      beta1: weight of the moment in the direction, in [0, 1): a number, a schedule, or a tree of
        these.
      beta2: decay rate of the moment, in [0, 1): a number, a schedule, or a tree of these.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It does not enter the
        moment; see `weight_decay_rule`.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: how weight decay is applied. "decoupled" as above. "cautious" decays only
        the weights that the step moves towards zero, as in `adam`. "independent": w' = w -
        learning_rate direction - weight_decay w, with a weight decay in [0, 1) that acts even when
        the learning rate is 0.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Stochastically rounded moments need
        PartitionSpecs: inside `shard_map` for the random bits of a single device, and on a TPU,
        under `jit` on a mesh with automatic axes, to update an 8-bit leaf with one kernel (see
        `leaf_programs`).
      moment_dtype: dtype of the moment; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, None)`.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.lion(1e-4, weight_decay=0.1)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> int(state.step), state.mw["w"].shape, state.vw
      (1, (3, 2), None)

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2. The
      sign of a complex number is x / |x|.
    """
    options = _Options(beta1=kinds.Beta("beta1", beta1), beta2=kinds.Beta("beta2", beta2))
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _lion("lion", options, moments, descent)


@explained
def scale_by_lion(
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Lion's direction for `optax.chain`, without learning rate, minus sign or weight decay.

        updates = sign(beta1 m + (1 - beta1) g)

    Args:
      beta1: weight of the moment in the direction, in [0, 1), as in `lion`.
      beta2: decay rate of the moment, in [0, 1), as in `lion`.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Stochastically rounded moments need
        PartitionSpecs: inside `shard_map` for the random bits of a single device, and on a TPU,
        under `jit` on a mesh with automatic axes, to update an 8-bit leaf with one kernel (see
        `leaf_programs`).
      moment_dtype: dtype of the moment; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, None)`.

    Raises:
      As `lion`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(jgrad.scale_by_lion(), optax.scale(-1e-4))
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state)
      >>> int(state[0].step), float(updates["w"][0, 0])
      (1, -9.999999747378752e-05)

    Source: as `lion`.
    """
    options = _Options(beta1=kinds.Beta("beta1", beta1), beta2=kinds.Beta("beta2", beta2))
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _lion("scale_by_lion", options, moments)
