"""Gradient descent, with heavy-ball or Nesterov momentum, and the last line of every optimizer."""

from __future__ import annotations

from typing import Any

import jax

from jgrad._arithmetic import rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import apply, on_leaf
from jgrad._inputs import functional, kinds
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import of_one_leaf
from jgrad._inputs.moment import Step
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._trees import checks
from jgrad._trees.annotations import (
    CoupledDecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Number,
    Weights,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree


@on_leaf(arrays=3)
def _momentum_of_decayed(
    g: jax.Array, mw: jax.Array, w: jax.Array, weight_decay: jax.Array, decay: jax.Array
) -> jax.Array:
    """m' = (g + lambda w) + mu m, as one function of what it reads"""
    return rules.add_scaled(rules.add_scaled(g, w, weight_decay), mw, decay)


@of_one_leaf
def _direction_of_leaf(
    g: jax.Array, mw: Moments | None, beta: Any, w: Any, decay: Any, *, nesterov: bool
) -> jax.Array:
    """The direction of one leaf; the decay is a part of it, and None is none."""
    if mw is None:
        return rules.decayed(g, w, decay)
    if decay is None:
        direction = mw.write(rules.add_scaled, g, mw.old, beta)
    else:
        direction = mw.write(_momentum_of_decayed, g, mw.old, w, decay, beta)
    if not nesterov:
        return direction
    return rules.add_scaled(rules.decayed(*mw.again((g, w)), decay), direction, beta)


@functional.update({"w": None}, w=Role.WEIGHTS, effective_grad=Role.GRADIENT, lr=Role.RATE)
def optimizer_update(
    w: Weights,
    effective_grad: PyTree,
    lr: PyTree,
    /,
    *,
    stop_gradients: bool = True,
    out: None = None,
) -> Weights:
    """Moves weights along an effective gradient, such as the one that `adam_step` returns.

        w' = w - lr effective_grad

    Args:
      w: weights, floating or complex.
      effective_grad: effective gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w` (shape (n,) applies along the
        last axis), and of any sign.
      stop_gradients: apply `jax.lax.stop_gradient` to the result.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      ValueError: tree structures or shapes do not match, or a Python number is not finite.
      TypeError: `w` has an integer leaf, or an argument has a leaf that is not numeric.
      NotImplementedError: `out` is given.

    Example:
      >>> w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> new = jgrad.optimizer_update(w, jax.tree.map(jnp.sign, w), 0.1)
      >>> jax.tree.map(jnp.shape, new)
      {'b': (2,), 'w': (3, 2)}
    """
    return functional.returned(apply(rules.descent, effective_grad, lr))


@functional.update({"w": None}, w=Role.WEIGHTS, dcdw=Role.GRADIENT, lr=Role.RATE)
def gradient_descent_update(
    w: Weights, dcdw: PyTree, lr: PyTree, /, *, stop_gradients: bool = True, out: None = None
) -> Weights:
    """Updates weights by one step of gradient descent.

        w' = w - lr dcdw

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign.
      stop_gradients: apply `jax.lax.stop_gradient` to the result.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      As `optimizer_update`.

    Example:
      >>> w = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = jax.tree.map(jnp.ones_like, w)
      >>> new = jgrad.gradient_descent_update(w, grads, {"w": 0.1, "b": 0.01})
      >>> jax.tree.map(jnp.shape, new)
      {'b': (2,), 'w': (3, 2)}
    """
    return functional.returned(apply(rules.descent, dcdw, lr))


@explained
def gradient_descent(
    learning_rate: LearningRate,
    *,
    momentum: Number | None = None,
    nesterov: bool = False,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: CoupledDecayRule = "coupled",
    mesh_axes: MeshAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Gradient descent, with or without momentum.

        d   = g + weight_decay w
        m'  = momentum m + d                        with momentum
        d'  = momentum m' + d  if nesterov, else m'
        w'  = w - learning_rate d'

    By default, weight decay is added to the gradient, as in PyTorch's SGD.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these. A
        callable that is not itself such a tree is treated as a schedule. `update(...,
        learning_rate=x)` overrides it for one call; the other numeric options can be overridden in
        the same way.
      momentum: decay rate of the momentum buffer, in [0, 1): a number, a schedule, or a tree of
        these. With None there is no buffer.
      nesterov: whether to look ahead, as Nesterov's momentum does.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: "coupled" as above. The other rules have d = g and apply weight decay in
        the last line, outside the momentum. "decoupled": w' = w - learning_rate (d' + weight_decay
        w). "cautious" decays only the weights that the step moves towards zero, as in `adam`: w' =
        w - learning_rate (d' + weight_decay w [Re(d' conj(w)) > 0]). "independent": w' = w -
        learning_rate d' - weight_decay w, with a weight decay in [0, 1) that acts even when the
        learning rate is 0.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Stochastically rounded moments need
        PartitionSpecs: inside `shard_map` for the random bits of a single device, and on a TPU,
        under `jit` on a mesh with automatic axes, to update an 8-bit leaf with one kernel (see
        `leaf_programs`).
      moment_dtype: dtype of the buffer; None uses the parameter's dtype, but at least float32.
        "8bit" stores leaves with at least 4096 elements, and packed buffers that contain one (see
        `pack`), as `Blocks` of 256 elements. bfloat16 and 8-bit values are rounded stochastically.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s. Smaller leaves and
        complex ones are never stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, None)`; `mw` is None without momentum.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.gradient_descent(lambda done: jnp.where(done < 100, 0.1, 0.01), momentum=0.9)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> int(state.step), state.mw["w"].shape, state.vw
      (1, (3, 2), None)

    Source: Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum
      in deep learning" (2013), section 2; Loshchilov and Hutter, "Decoupled Weight Decay
      Regularization" (2019); Chen et al., "Cautious Weight Decay" (2025), algorithm 1.
    """
    name, buffer = "gradient_descent", kinds.Beta("momentum", momentum, is_optional=True)
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    descent.check(name, kinds.COUPLED_DECAY_RULES)
    checks.boolean(name, "nesterov", nesterov)
    buffer.check(name)
    coupled = weight_decay_rule == "coupled"

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        descent_now, inside = descent.read(inputs, step), None
        if coupled:
            descent_now, inside = descent_now._replace(decay=None), descent_now.decay
        beta = kinds.momentum_of(buffer, inputs, step)
        return _direction_of_leaf.update(
            inputs,
            *(inputs.g, step.moments.get("mw"), beta and beta.value, inputs.w, inside),
            descent=descent_now,
            nesterov=nesterov,
        )

    has = () if momentum is None else ("mw",)
    moments = MomentOptions(moment_dtype, full_precision, mesh_axes=mesh_axes)
    return transformation(name, compute, has=has, moments=moments)
