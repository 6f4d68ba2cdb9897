"""Muon as a functional update."""

from typing import Any

from jax.typing import DTypeLike

from jgrad._arithmetic import rules
from jgrad._arithmetic.apply import add_decay, apply
from jgrad._inputs import functional, numbers, options
from jgrad._inputs.aligned import AlignedArguments, Role
from jgrad._inputs.options import Mask
from jgrad._layers.layer_axes import StaticTree, read_layer_axes, static_tree
from jgrad._layers.matrix_axes import read_output_axes
from jgrad._layers.newton_schulz import Coefficients, check_compute_dtype, read_coefficients
from jgrad._optimizers.adam import AdamNumbers
from jgrad._optimizers.muon_direction import (
    MuonNumbers,
    MuonRule,
    check_matrices,
    check_rule,
    directions,
)
from jgrad._optimizers.muon_scale import Scale, read_scale
from jgrad._packed import packing
from jgrad._packed.parts import Part
from jgrad._trees import checks, values
from jgrad._trees.trees import PyTree

_NAME = "muon_update"


def muon_update(
    w: PyTree,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: PyTree,
    vw_tm1: PyTree,
    step: PyTree,
    /,
    *,
    matrices: Mask = None,
    momentum: PyTree = 0.95,
    nesterov: bool = True,
    decay_lambda: PyTree = 0,
    scale: Scale = "original",
    coefficients: Any = "jordan",
    rule: MuonRule = "muon",
    output_axes: PyTree = -1,
    layer_axes: PyTree = None,
    compute_dtype: DTypeLike | None = None,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.95,
    adam_epsilon: PyTree = 1e-8,
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """New weights and moments by Muon for matrices, by AdamW for all other leaves.

        mw' = momentum mw + (1 - momentum) dcdw
        d   = momentum mw' + (1 - momentum) dcdw          (without nesterov: mw')
        w'  = w - lr (s orthogonalize(d) + decay_lambda w)

    Args:
      w: weights, floating or complex; a tree of arrays, not packed.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`, and of any sign. With a scale
        other than "match_rms_adamw" a tree: leaves of Adam need another.
      mw_tm1: first moment of the step before, of a shape that broadcasts to that of `w`.
      vw_tm1: second moments of the step before: None for matrices, or with "normuon" one number per
        output; for other leaves real, of a shape that broadcasts to that of `w`.
      step: number of this update, counted from 1; may be fractional or traced.
      matrices: as in `muon`.
      momentum: in [0, 1).
      nesterov: look ahead.
      decay_lambda: weight decay, in [0, inf).
      scale: s, as in `muon`, and so are the following.
      coefficients: of Newton-Schulz.
      rule: "muon" or "normuon".
      output_axes: which axes of a leaf are outputs.
      layer_axes: axes of a leaf with a matrix for each index.
      compute_dtype: dtype to which factors of matrix products are rounded.
      beta1: decay rate of Adam's first moment, in [0, 1).
      beta2: decay rate of Adam's second moment, and of NorMuon's, in [0, 1).
      adam_epsilon: added to the root of Adam's second moment, in [0, inf).
      stop_gradients: apply `jax.lax.stop_gradient` to `w'`, and to nothing else.
      out: None.

    Returns:
      `(w', mw, vw)`, each with the dtypes of what it replaces.

    Raises:
      As `adam_update` and `muon`.

    Example:
      >>> w = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> mw = jax.tree.map(jnp.zeros_like, w)
      >>> rates, matrices = {"w": 0.02, "b": 3e-4}, {"w": True, "b": False}
      >>> vw = {"w": None, "b": jnp.zeros(2)}
      >>> w, mw, vw = jgrad.muon_update(w, grads, rates, mw, vw, 1, matrices=matrices)
      >>> jax.tree.map(jnp.shape, w)
      {'b': (2,), 'w': (3, 2)}

    Source: as `muon`.
    """
    check_matrices(_NAME, matrices)
    check_rule(_NAME, rule)
    values.boolean(_NAME, "nesterov", nesterov)
    packing.check_unpacked(_NAME, "w", w)
    return _muon_update(
        w=w,
        dcdw=dcdw,
        lr=lr,
        mw_tm1=mw_tm1,
        vw_tm1=vw_tm1,
        step=step,
        momentum=momentum,
        decay_lambda=numbers.optional_decay(decay_lambda, negative_is_none=False),
        beta1=beta1,
        beta2=beta2,
        adam_epsilon=adam_epsilon,
        nesterov=nesterov,
        rule=rule,
        scale=read_scale(_NAME, scale),
        coefficients=read_coefficients(_NAME, coefficients),
        compute_dtype=check_compute_dtype(_NAME, compute_dtype),
        matrices=static_tree(options.read_mask(_NAME, "matrices", matrices, checks.values_of(w))),
        output_axes=static_tree(read_output_axes(_NAME, output_axes)),
        layer_axes=static_tree(read_layer_axes(_NAME, layer_axes)),
        stop_gradients=stop_gradients,
        out=out,
    )


@functional.update(
    w=Role.WEIGHTS,
    dcdw=Role.GRADIENT,
    mw_tm1=Role.FIRST_MOMENT,
    vw_tm1=Role.SOME_SECOND_MOMENTS,
    lr=Role.RATE,
    step=Role.NUMBER,
    momentum=Role.BETA,
    decay_lambda=Role.OPTIONAL_NUMBER,
    beta1=Role.BETA,
    beta2=Role.BETA,
    adam_epsilon=Role.NUMBER,
)
def _muon_update(
    args: AlignedArguments,
    *,
    nesterov: bool,
    rule: MuonRule,
    scale: Any,
    coefficients: Coefficients,
    compute_dtype: Any,
    matrices: StaticTree,
    output_axes: StaticTree,
    layer_axes: StaticTree,
    stop_gradients: bool,
) -> tuple[PyTree, PyTree, PyTree]:
    axes = args.matrix_axes(matrices, output_axes, layer_axes)
    args.require("vw_tm1", [own is None or rule == "normuon" for own in axes])
    direction, mw, vw = directions(
        args["dcdw"],
        args["mw_tm1"],
        args["vw_tm1"],
        [Part(i, matrices=own) for i, own in enumerate(axes)],
        MuonNumbers(_NAME, args["momentum"], nesterov, rule, scale, coefficients, compute_dtype),
        AdamNumbers(args["step"], args["beta1"], args["beta2"], args["adam_epsilon"], "moments"),
    )
    updates = add_decay(direction, args["w"], args["decay_lambda"])
    updates = apply(rules.descent, updates, args["lr"])
    return (
        args.new_weights(updates, stop_gradients=stop_gradients),
        args.replaced("mw_tm1", mw, computed_from=("dcdw", "momentum", "beta1")),
        args.replaced("vw_tm1", vw, computed_from=("dcdw", "beta2")),
    )
