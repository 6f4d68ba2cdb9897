"""Adan: Adam's division, of an average of gradients that looks ahead along their differences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import PerLeaf, apply, on_leaf
from jgrad._arithmetic.numerics import BetaForms, scaled
from jgrad._inputs import functional, kinds
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import of_one_leaf
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions, transformation
from jgrad._optimizers import adam
from jgrad._trees.annotations import (
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Mw,
    Number,
    Vw,
    Weights,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import FIRST, MomentField, PyTree, state_of


@state_of(
    "moments",
    step="step",
    mw=FIRST,
    vw=MomentField(True, "averages of squares of gradients that look ahead, as in `adan`"),
    dw=MomentField(False, "averages of differences of gradients, as in `adan`"),
    gw=MomentField(False, "the gradients of the last step, as in `adan`"),
)
class AdanState(NamedTuple):
    """State of `adan`.

    Attributes:
      step: number of completed updates, an int32 scalar; it saturates.
      mw: average of gradients, as in `OptState`.
      vw: average of squares of gradients that look ahead, real: a tree like `mw`.
      dw: average of differences of gradients: a tree like `mw`.
      gw: gradients of the last update: a tree like `mw`.

    Example:
      >>> state = jgrad.adan(1e-3, moment_dtype="8bit").init({"w": jnp.ones((16, 256))})
      >>> state.dw["w"].codes.dtype.name, state.gw["w"].shape
      ('int8', (16, 256))
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree
    dw: PyTree
    gw: PyTree

    @property
    def count(self) -> jax.Array:  # type: ignore[override]  # hides `tuple.count`
        """optax's name for `step`."""
        return self.step

    @property
    def mu(self) -> PyTree:
        """optax's name for `mw`."""
        return self.mw

    @property
    def nu(self) -> PyTree:
        """optax's name for `vw`."""
        return self.vw


_MOMENTS = ("mw", "vw", "dw", "gw")

# ---- the method, on the arrays of one leaf -----------------------------------------------------


def _difference(g: jax.Array, old: jax.Array, has_old: jax.Array) -> jax.Array:
    """g - g_old, of numbers that count in moments; 0 in the first step, which has no old ones."""
    difference = numerics.squarable(g) - numerics.squarable(old)
    return jnp.where(has_old > 0, difference, jnp.zeros_like(g))


@on_leaf(arrays=3)
def _average_difference(
    g: jax.Array,
    dw: jax.Array,
    gw: jax.Array,
    has_old: jax.Array,
    beta: jax.Array,
    complement: jax.Array,
) -> jax.Array:
    """d' = beta d + (1 - beta) (g - g_old)"""
    return scaled(dw, beta) + scaled(_difference(g, gw, has_old), complement)


@on_leaf(arrays=3)
def _average_square(
    g: jax.Array,
    vw: jax.Array,
    gw: jax.Array,
    has_old: jax.Array,
    beta2: jax.Array,
    beta: jax.Array,
    complement: jax.Array,
) -> jax.Array:
    """v' = beta v + (1 - beta) |g + beta2 (g - g_old)|^2, finite as Adam's

    The clip keeps product and sum two roundings on every CPU, see `rules.add_scaled`.
    """
    term = numerics.addable(scaled(_difference(g, gw, has_old), beta2))
    ahead = numerics.squarable(g) + term
    return beta * vw + complement * numerics.bounded_square(ahead)


@on_leaf(arrays=1)
def _gradient(g: jax.Array) -> jax.Array:
    """g, which the next step compares with its own"""
    return numerics.strong(g)


@on_leaf(arrays=4)
def _ahead(
    t: jax.Array, log_beta1: jax.Array, log_beta2: jax.Array, beta2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Whether there is an old gradient, and how far to look ahead, with c_k = 1 - beta_k^t:

    m / c1 + beta2 d / c2 = (m + c1 (beta2 / c2) d) / c1

    The quotient is one of a single beta: XLA divides an array by a scalar with another rounding.
    """
    c1, c2 = (numerics.one_minus_power(log, t) for log in (log_beta1, log_beta2))
    has_old = jnp.where(t > 1, jnp.ones_like(t), jnp.zeros_like(t))
    return has_old, numerics.once(c1 * numerics.safe_divide(beta2, c2))


class _Numbers(NamedTuple):
    """What the direction of one leaf depends on beside arrays; or of all leaves, as lists.

    Attributes:
      as_adam: of Adam, whose beta2 is beta3 here.
      beta2: the decay rate of differences.
      has_old: whether there is an old gradient.
      ahead: how many averages of differences to look ahead.
    """

    as_adam: adam.Numbers
    beta2: BetaForms
    has_old: PerLeaf
    ahead: PerLeaf


def _numbers_of(
    beta1: BetaForms, beta2: BetaForms, beta3: BetaForms, epsilon: PerLeaf, step: PerLeaf
) -> _Numbers:
    as_adam = adam.numbers_of(beta1, beta3, epsilon, "moments", step)
    args = step, beta1.log, beta2.log, beta2.value
    if list not in map(type, args):
        return _Numbers(as_adam, beta2, *_ahead(*args))
    ahead = apply(_ahead, *args)
    return _Numbers(as_adam, beta2, *([x[k] for x in ahead] for k in range(2)))


@of_one_leaf
def adan_of_leaf(
    g: jax.Array, mw: Moments, vw: Moments, dw: Moments, gw: Moments, n: _Numbers
) -> tuple[jax.Array, jax.Array]:
    """The direction of one leaf, and an array that has its signs."""
    (beta1, beta3, alpha, epsilon), old = n.as_adam, (gw.old, n.has_old)
    m = mw.write(adam.first_moment, g, mw.old, beta1.value, beta1.complement)
    v = vw.write(_average_square, g, vw.old, *old, n.beta2.value, beta3.value, beta3.complement)
    d = dw.write(_average_difference, g, dw.old, *old, n.beta2.value, n.beta2.complement)
    gw.write(_gradient, g)
    ahead = rules.add_scaled(m, d, n.ahead)
    return adam.delta(ahead, v, alpha, epsilon), ahead


# ---- functional update -------------------------------------------------------------------------


@functional.update(
    {
        "w": None,
        "mw_tm1": ("dcdw", "beta1"),
        "vw_tm1": ("dcdw", "gw_tm1", "step", "beta2", "beta3"),
        "dw_tm1": ("dcdw", "gw_tm1", "step", "beta2"),
        "gw_tm1": ("dcdw",),
    },
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    mw_tm1=Role.FIRST_MOMENT,
    vw_tm1=Role.SECOND_MOMENT,
    dw_tm1=Role.FIRST_MOMENT,
    gw_tm1=Role.FIRST_MOMENT,
    lr=Role.RATE,
    step=kinds.Number,
    beta1=kinds.Beta,
    beta2=kinds.Beta,
    beta3=kinds.Beta,
    epsilon=kinds.Number,
)
def adan_update(
    w: Weights,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: Mw,
    vw_tm1: Vw,
    dw_tm1: PyTree,
    gw_tm1: PyTree,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.98,
    beta2: PyTree = 0.92,
    beta3: PyTree = 0.99,
    epsilon: PyTree = 1e-8,
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[Weights, Mw, Vw, PyTree, PyTree]:
    """Updates weights and moments by one step of Adan.

        mw'   = beta1 mw_tm1 + (1 - beta1) dcdw
        dw'   = beta2 dw_tm1 + (1 - beta2) (dcdw - gw_tm1)
        vw'   = beta3 vw_tm1 + (1 - beta3) |dcdw + beta2 (dcdw - gw_tm1)|^2
        ahead = mw' / (1 - beta1^step) + beta2 dw' / (1 - beta2^step)
        w'    = w - lr ahead / (sqrt(vw' / (1 - beta3^step)) + epsilon)
        gw'   = dcdw

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      mw_tm1: average of gradients from the previous step, of a shape that broadcasts to that of
        `w`.
      vw_tm1: average of squares from the previous step, real, of a shape that broadcasts to that of
        `w`.
      dw_tm1: average of differences from the previous step, of a shape that broadcasts to that of
        `w`.
      gw_tm1: gradient of the previous step, of a shape that broadcasts to that of `w`. In step 1,
        the difference counts as 0.
      step: number of this update, counting from 1; may be fractional or traced.
      beta1: decay rate of the average of gradients, in [0, 1).
      beta2: decay rate of the average of differences, and their weight, in [0, 1).
      beta3: decay rate of the average of squares, in [0, 1).
      epsilon: added to the root of the average of squares, in [0, inf).
      stop_gradients: apply `jax.lax.stop_gradient` to `w'`, but not to the moments.
      out: None.

    Returns:
      `(w', mw', vw', dw', gw')`, each with the dtypes of the argument it replaces.

    Raises:
      As `adam_step`, and a TypeError if `w` has an integer leaf.

    Example:
      >>> w = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> mw = vw = dw = gw = jax.tree.map(jnp.zeros_like, w)
      >>> w, mw, vw, dw, gw = jgrad.adan_update(w, grads, 1e-3, mw, vw, dw, gw, 1)
      >>> bool((gw["w"] == grads["w"]).all()), bool(dw["w"].any())
      (True, False)

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
      Models" (2022), algorithm 1.
    """
    n = _numbers_of(beta1, beta2, beta3, epsilon, step)
    directions, *moments = adan_of_leaf(dcdw, mw_tm1, vw_tm1, dw_tm1, gw_tm1, n)
    new = apply(rules.descent, [x[0] for x in directions], lr)
    return functional.returned(new, *moments)


# ---- transformations ---------------------------------------------------------------------------


def _adan(
    name: str,
    beta1: Number,
    beta2: Number,
    beta3: Number,
    epsilon: Number,
    moments: MomentOptions,
    descent: kinds.DescentOptions | None = None,
) -> Transformation[AdanState]:
    betas = kinds.Beta("beta1", beta1), kinds.Beta("beta2", beta2), kinds.Beta("beta3", beta3)
    added = kinds.Number("epsilon", epsilon)
    if descent is not None:
        descent.check(name)
    for option in (*betas, added):
        option.check(name)

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        first, second, third = (x.read(inputs, step) for x in betas)
        numbers = _numbers_of(first, second, third, added.read(inputs, step), step.as_float)
        descent_now = None if descent is None else descent.read(inputs, step)
        old = step.moments.values()
        return adan_of_leaf.update(inputs, inputs.g, *old, numbers, descent=descent_now)

    return transformation(name, compute, has=_MOMENTS, moments=moments, state_type=AdanState)


@explained
def adan(
    learning_rate: LearningRate,
    *,
    beta1: Number = 0.98,
    beta2: Number = 0.92,
    beta3: Number = 0.99,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[AdanState]:
    """Adan, which looks ahead along an average of differences of gradients.

        m'    = beta1 m + (1 - beta1) g
        d'    = beta2 d + (1 - beta2) (g - g_old)
        v'    = beta3 v + (1 - beta3) |g + beta2 (g - g_old)|^2
        ahead = m' / (1 - beta1^t) + beta2 d' / (1 - beta2^t)
        delta = ahead / (sqrt(v' / (1 - beta3^t)) + epsilon)
        w'    = w - learning_rate (delta + weight_decay w)

    In the first step, which has no old gradient, the difference is 0. The state has four arrays for
    each parameter; `moment_dtype` is the form of all four.

    The betas are decay rates, as in the authors' code; the paper calls 1 - beta what is beta here.
    `optax.adan` weighs the differences by 1 - beta2 instead of beta2, so it is the same method at
    `b2=0.5` and `eps_root=0` only. In the paper, w' = (w - learning_rate delta) / (1 +
    learning_rate weight_decay), which is the decoupled rule with its learning rate divided by
    `1 + learning_rate * weight_decay`.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      beta1: decay rate of the average of gradients, in [0, 1): a number, a schedule, or a tree of
        these.
      beta2: decay rate of the average of differences, and their weight, in [0, 1): a number, a
        schedule, or a tree of these.
      beta3: decay rate of the average of squares, in [0, 1): a number, a schedule, or a tree of
        these.
      epsilon: added to the root of the average of squares, in [0, inf): a number, a schedule, or a
        tree of these.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It does not enter the
        moments; see `weight_decay_rule`.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: how weight decay is applied. "decoupled" as above. "cautious" decays only
        the weights that the step moves towards zero, as in `adam`. "independent": w' = w -
        learning_rate delta - weight_decay w, with a weight decay in [0, 1) that acts even when the
        learning rate is 0.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Stochastically rounded moments need
        PartitionSpecs: inside `shard_map` for the random bits of a single device, and on a TPU,
        under `jit` on a mesh with automatic axes, to update an 8-bit leaf with one kernel (see
        `leaf_programs`).
      moment_dtype: dtype of the moments; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `AdanState(step, mw, vw, dw, gw)`. `carry_over` takes `mw` from
      Adam's state, and needs `reset` for the others, which measure other things.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.adan(1e-3, weight_decay=0.02)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> int(state.step), state.dw["w"].shape
      (1, (3, 2))

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
      Models" (2022, arXiv 2208.06677), algorithm 1; bias corrections and the first step follow
      `adan.py` of sail-sg/Adan.
    """
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _adan("adan", beta1, beta2, beta3, epsilon, moments, descent)


@explained
def scale_by_adan(
    *,
    beta1: Number = 0.98,
    beta2: Number = 0.92,
    beta3: Number = 0.99,
    epsilon: Number = 1e-8,
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[AdanState]:
    """Adan's direction for `optax.chain`, without learning rate, minus sign or weight decay.

        updates = delta

    Args:
      beta1: decay rate of the average of gradients, in [0, 1), as in `adan`.
      beta2: decay rate of the average of differences, and their weight, in [0, 1), as in `adan`.
      beta3: decay rate of the average of squares, in [0, 1), as in `adan`.
      epsilon: added to the root of the average of squares, in [0, inf), as in `adan`.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Stochastically rounded moments need
        PartitionSpecs: inside `shard_map` for the random bits of a single device, and on a TPU,
        under `jit` on a mesh with automatic axes, to update an 8-bit leaf with one kernel (see
        `leaf_programs`).
      moment_dtype: dtype of the moments; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `AdanState(step, mw, vw, dw, gw)`.

    Raises:
      As `adan`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(jgrad.scale_by_adan(), optax.scale(-1e-3))
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state)
      >>> int(state[0].step), updates["w"].shape
      (1, (3, 2))

    Source: as `adan`.
    """
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _adan("scale_by_adan", beta1, beta2, beta3, epsilon, moments)
