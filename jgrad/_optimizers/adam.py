"""Adam, and AdamW, because weight decay is decoupled."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import PerLeaf, apply, on_leaf, zip_leaves
from jgrad._arithmetic.numerics import BetaForms, scaled
from jgrad._inputs import functional, kinds
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import of_one_leaf
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._trees import checks
from jgrad._trees.annotations import (
    DecayRule,
    Gradient,
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
from jgrad._trees.protocols import PyTree

BiasCorrection = Literal["step_size", "moments"] | None

# ---- the method, on the arrays of one leaf -----------------------------------------------------


@on_leaf(arrays=2)
def first_moment(g: jax.Array, mw: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """m' = beta m + (1 - beta) g

    In both moments, a gradient whose square overflows counts as the largest one whose square does
    not, because an infinite v would freeze its weight forever.
    """
    return scaled(mw, beta) + scaled(numerics.squarable(g), complement)


@on_leaf(arrays=2)
def second_moment(g: jax.Array, vw: jax.Array, beta: jax.Array, complement: jax.Array) -> jax.Array:
    """v' = beta v + (1 - beta) |g|^2; finite for an infinite g, which m' shows"""
    return beta * vw + complement * numerics.bounded_square(g)


@on_leaf(arrays=2)
def delta(mw: jax.Array, vw: jax.Array, alpha: jax.Array, epsilon: jax.Array) -> jax.Array:
    """alpha m / (sqrt(v) + epsilon)

    A v below the smallest normal number counts as that number. Near 0 the derivative of `sqrt`
    overflows; and without an epsilon the step after gradients that were all zero, 0 / 0, is 0.
    """
    root = jnp.sqrt(numerics.positive(vw))
    return scaled(mw, alpha) / (root + epsilon).astype(mw.dtype)


@on_leaf(arrays=4)
def corrections(
    t: jax.Array,
    log_beta1: jax.Array,
    log_beta2: jax.Array,
    epsilon: jax.Array,
    *,
    bias_correction: BiasCorrection,
) -> tuple[jax.Array, jax.Array]:
    """The step size alpha and the epsilon with which `delta` is each published form.

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t:
      "step_size": sqrt(c2) / (c1 + eps) m / (sqrt(v) + eps)
      "moments":   (m / c1) / (sqrt(v / c2) + eps) = sqrt(c2) / c1 m / (sqrt(v) + sqrt(c2) eps)
      None:        m / (sqrt(v) + eps)
    Step 0 gives alpha = 0, except without correction.
    """
    if bias_correction is None:
        return jnp.ones_like(epsilon), epsilon
    c1 = numerics.one_minus_power(log_beta1, t)
    root = numerics.safe_sqrt(numerics.one_minus_power(log_beta2, t))
    if bias_correction == "moments":
        divisor, epsilon = c1, numerics.once(root * epsilon)
    else:
        divisor = c1 + epsilon
    # The quotient comes last: XLA computes a division once, but what follows it for every leaf.
    return root / jnp.where(divisor == 0, jnp.ones_like(divisor), divisor), epsilon


# ---- the method, on lists of leaves ------------------------------------------------------------


class Numbers(NamedTuple):
    """What Adam's direction of one leaf depends on beside arrays; or of all leaves, as lists."""

    beta1: BetaForms
    beta2: BetaForms
    alpha: PerLeaf
    epsilon: PerLeaf


class AdamOptions(NamedTuple):
    """What a user chose of Adam's direction."""

    beta1: kinds.Beta
    beta2: kinds.Beta
    epsilon: kinds.Number
    bias_correction: BiasCorrection

    @classmethod
    def of(
        cls,
        beta1: PyTree,
        beta2: PyTree,
        epsilon: PyTree,
        bias_correction: BiasCorrection,
        *,
        prefix: str = "",
    ) -> AdamOptions:
        """Of the arguments of a factory, by their usual names behind a prefix."""
        betas = kinds.Beta(f"{prefix}beta1", beta1), kinds.Beta(f"{prefix}beta2", beta2)
        return cls(*betas, kinds.Number(f"{prefix}epsilon", epsilon), bias_correction)

    def check(self, function: str) -> None:
        """What a factory can."""
        for option in (self.beta1, self.beta2, self.epsilon):
            option.check(function)
        check_correction(function, self.bias_correction)

    def read(self, inputs: Inputs, step: Step) -> Numbers:
        """The numbers of one update."""
        beta1, beta2 = self.beta1.read(inputs, step), self.beta2.read(inputs, step)
        epsilon = self.epsilon.read(inputs, step)
        return numbers_of(beta1, beta2, epsilon, self.bias_correction, step.as_float)


def check_correction(function: str, bias_correction: BiasCorrection) -> None:
    """One of those that `corrections` has."""
    allowed = ("step_size", "moments", None)
    checks.one_of(function, "bias_correction", bias_correction, allowed)


def numbers_of(
    beta1: BetaForms, beta2: BetaForms, epsilon: PerLeaf, correction: BiasCorrection, step: PerLeaf
) -> Numbers:
    """With both corrections computed, once for all leaves that share their numbers."""
    correct = functools.partial(corrections, bias_correction=correction)
    args = (step, beta1.log, beta2.log, epsilon)
    if list not in map(type, args):
        return Numbers(beta1, beta2, *correct(*args))
    rows = zip_leaves(*args)
    # Leaves that share their numbers share the result: one scalar in the program, not one per leaf.
    known = {
        tuple(map(id, row)): correct(*row) for row in {tuple(map(id, r)): r for r in rows}.values()
    }
    results = [known[tuple(map(id, row))] for row in rows]
    return Numbers(beta1, beta2, [x for x, _ in results], [x for _, x in results])


# ---- the method, as a function of one leaf -----------------------------------------------------


@of_one_leaf
def adam_of_leaf(g: jax.Array, mw: Moments, vw: Moments, n: Numbers) -> tuple[jax.Array, jax.Array]:
    """The direction of one leaf, and the moment, which has its signs."""
    m = mw.write(first_moment, g, mw.old, n.beta1.value, n.beta1.complement)
    v = vw.write(second_moment, g, vw.old, n.beta2.value, n.beta2.complement)
    return delta(m, v, n.alpha, n.epsilon), m


# ---- functional updates ------------------------------------------------------------------------


@functional.update(
    {"dcdw": None, "mw": ("dcdw", "beta1"), "vw": ("dcdw", "beta2")},
    dcdw=Role.GRADIENT,
    mw=Role.FIRST_MOMENT,
    vw=Role.SECOND_MOMENT,
    step=kinds.Number,
    beta1=kinds.Beta,
    beta2=kinds.Beta,
    epsilon=kinds.Number,
)
def adam_step(
    dcdw: Gradient,
    mw: Mw,
    vw: Vw,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.999,
    epsilon: PyTree = 1e-7,
    bias_correction: BiasCorrection = "step_size",
    out: None = None,
) -> tuple[Gradient, Mw, Vw]:
    """Computes Adam's direction and new moments, without applying a learning rate.

        mw'   = beta1 mw + (1 - beta1) dcdw
        vw'   = beta2 vw + (1 - beta2) |dcdw|^2
        alpha = sqrt(1 - beta2^step) / (1 - beta1^step + epsilon)
        delta = alpha mw' / (sqrt(vw') + epsilon)

    The epsilon inside alpha comes from Ivy, not from the paper. Its default changes the first step
    by one part in a million, but a large one, such as 0.1, matters. For recipes that were tuned
    elsewhere, use `bias_correction="moments"`.

    Args:
      dcdw: gradient.
      mw: first moment, of a shape that broadcasts to the gradient's.
      vw: second moment, real, of a shape that broadcasts to the gradient's.
      step: number of this update, counting from 1; may be fractional or traced. If it is 0, delta
        is 0.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      bias_correction: "step_size" is the equation above, from the end of section 2 of the paper but
        for the epsilon inside alpha; "moments" is `m_hat / (sqrt(v_hat) + epsilon)`, as in the
        paper's algorithm 1, PyTorch and optax; None sets alpha = 1.
      out: None.

    Returns:
      `(delta, mw', vw')`, all in the gradient's shape; with a scalar gradient and one-element
      moments, in the shape of the moments. The moments keep their dtypes, and delta has the
      gradient's.

    Raises:
      ValueError: tree structures or shapes do not match, or a Python number is out of range.
      TypeError: a leaf is not a number or an array of numbers, or is complex where its counterpart
        is real.
      NotImplementedError: `out` is given.

    Example:
      >>> grads = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
      >>> zeros = jax.tree.map(jnp.zeros_like, grads)
      >>> delta, mw, vw = jgrad.adam_step(grads, zeros, zeros, 1, beta2=0.99)
      >>> jax.tree.map(jnp.shape, delta)
      {'b': (2,), 'w': (3, 2)}

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2.
    """
    check_correction("adam_step", bias_correction)
    n = numbers_of(beta1, beta2, epsilon, bias_correction, step)
    directions, *moments = adam_of_leaf(cast(PyTree, dcdw), mw, vw, n)
    return functional.returned([x for x, _ in directions], *moments)


@functional.update(
    {"w": None, "mw_tm1": ("dcdw", "beta1"), "vw_tm1": ("dcdw", "beta2")},
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    mw_tm1=Role.FIRST_MOMENT,
    vw_tm1=Role.SECOND_MOMENT,
    lr=Role.RATE,
    step=kinds.Number,
    beta1=kinds.Beta,
    beta2=kinds.Beta,
    epsilon=kinds.Number,
)
def adam_update(
    w: Weights,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: Mw,
    vw_tm1: Vw,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.999,
    epsilon: PyTree = 1e-7,
    bias_correction: BiasCorrection = "step_size",
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[Weights, Mw, Vw]:
    """Updates weights and moments by one step of Adam.

        (delta, mw, vw) = adam_step(dcdw, mw_tm1, vw_tm1, step)
        w' = w - lr delta

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      mw_tm1: first moment from the previous step, of a shape that broadcasts to that of `w`.
      vw_tm1: second moment from the previous step, real, of a shape that broadcasts to that of `w`.
      step: number of this update, counting from 1; may be fractional or traced.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      bias_correction: see `adam_step`.
      stop_gradients: apply `jax.lax.stop_gradient` to `w'`, but not to the moments.
      out: None.

    Returns:
      `(w', mw, vw)`, each with the dtypes of the argument it replaces.

    Raises:
      As `adam_step`, and a TypeError if `w` has an integer leaf.

    Example:
      >>> w = grads = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
      >>> mw = vw = jax.tree.map(lambda x: jnp.zeros(x.shape), w)
      >>> rates = {"w": 1e-3, "b": 1e-2}
      >>> w, mw, vw = jgrad.adam_update(w, grads, rates, mw, vw, 1)
      >>> w["w"].dtype.name, mw["w"].dtype.name
      ('bfloat16', 'float32')

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2.
    """
    check_correction("adam_update", bias_correction)
    n = numbers_of(beta1, beta2, epsilon, bias_correction, step)
    directions, *moments = adam_of_leaf(dcdw, mw_tm1, vw_tm1, n)
    new = apply(rules.descent, [x for x, _ in directions], lr)
    return functional.returned(new, *moments)


# ---- transformations ---------------------------------------------------------------------------


def _adam(
    name: str,
    options: AdamOptions,
    moments: MomentOptions,
    descent: kinds.DescentOptions | None = None,
) -> Transformation[OptState]:
    if descent is not None:
        descent.check(name)
    options.check(name)

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        n, mw, vw = options.read(inputs, step), step.moments["mw"], step.moments["vw"]
        descent_now = None if descent is None else descent.read(inputs, step)
        return adam_of_leaf.update(inputs, inputs.g, mw, vw, n, descent=descent_now)

    return transformation(name, compute, has=("mw", "vw"), moments=moments)


@explained
def adam(
    learning_rate: LearningRate,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    bias_correction: BiasCorrection = "moments",
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Adam, or AdamW if you set `weight_decay`.

        m'    = beta1 m + (1 - beta1) g
        v'    = beta2 v + (1 - beta2) |g|^2
        delta = m' / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon)
        w'    = w - learning_rate (delta + weight_decay w)

    The defaults match PyTorch's and those of `optax.adam`; note that `optax.adamw` has a default
    weight decay of 1e-4. The functional `adam_update` has Ivy's defaults instead: `epsilon=1e-7,
    bias_correction="step_size"`.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      beta1: decay rate of the first moment, in [0, 1): a number, a schedule, or a tree of these.
      beta2: decay rate of the second moment, in [0, 1): a number, a schedule, or a tree of these.
      epsilon: added to the root of the second moment, in [0, inf): a number, a schedule, or a tree
        of these.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It does not enter the
        moments; see `weight_decay_rule`.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: how weight decay is applied. "decoupled" as above. "cautious" decays only
        the weights that the step moves towards zero: w' = w - learning_rate (delta + weight_decay w
        [Re(delta conj(w)) > 0]). A real weight thus decays if it has the sign of delta, and not if
        delta is 0. "independent": w' = w - learning_rate delta - weight_decay w, with a weight
        decay in [0, 1) that acts even when the learning rate is 0.
      bias_correction: "moments" as above; "step_size" as in `adam_step`, which leaves epsilon
        uncorrected and, unlike the paper, also adds it to 1 - beta1^t; None for no correction.
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
      A transformation with state `OptState(step, mw, vw)`.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> tx = jgrad.adam(1e-3, weight_decay=0.1, weight_decay_mask={"w": True, "b": False})
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> int(state.step), state.mw["w"].shape
      (1, (3, 2))

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2;
      Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, where the
      schedule multiplies both terms but the learning rate only the first; Chen et al., "Cautious
      Weight Decay" (2025), algorithm 1, where weights also decay if delta is 0.
    """
    options = AdamOptions.of(beta1, beta2, epsilon, bias_correction)
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _adam("adam", options, moments, descent)


@explained
def scale_by_adam(
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    epsilon: Number = 1e-8,
    bias_correction: BiasCorrection = "moments",
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Adam's direction for `optax.chain`, without learning rate, minus sign or weight decay.

        updates = delta

    Args:
      beta1: decay rate of the first moment, in [0, 1): a number, a schedule, or a tree of these.
      beta2: decay rate of the second moment, in [0, 1): a number, a schedule, or a tree of these.
      epsilon: added to the root of the second moment, in [0, inf): a number, a schedule, or a tree
        of these.
      bias_correction: "moments" as in `adam`; "step_size" as in `adam_step`, which leaves epsilon
        uncorrected and, unlike the paper, also adds it to 1 - beta1^t; None for no correction.
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
      A transformation with state `OptState(step, mw, vw)`.

    Raises:
      As `adam`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(jgrad.scale_by_adam(beta2=0.99), optax.scale(-1e-3))
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state)
      >>> int(state[0].step), updates["w"].shape
      (1, (3, 2))

    Source: as `adam`.
    """
    options = AdamOptions.of(beta1, beta2, epsilon, bias_correction)
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return _adam("scale_by_adam", options, moments)
