"""LAMB."""

from jgrad._arithmetic.leafwise import compiled
from jgrad._arithmetic.rules import BiasCorrection
from jgrad._inputs import functional as arguments
from jgrad._inputs import methods
from jgrad._inputs.methods import LAMB_RULES, Adam, LambRule, Layers
from jgrad._layers import layer_axes as places
from jgrad._layers.layer_axes import Static
from jgrad._packed import arrays as slots
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def lamb_update(
    w: PyTree,
    dcdw: PyTree,
    lr: PyTree,
    mw_tm1: PyTree,
    vw_tm1: PyTree,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.999,
    epsilon: PyTree = 1e-7,
    max_trust_ratio: PyTree = 10,
    decay_lambda: PyTree = 0,
    min_trust_ratio: PyTree = 0.0,
    bias_correction: BiasCorrection = "step_size",
    rule: LambRule = "paper",
    norm_axes: PyTree = None,
    layer_axes: PyTree = None,
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """New weights and moments by LAMB.

        (delta, mw, vw) = adam_step(dcdw, mw_tm1, vw_tm1, step)
        u     = delta + decay_lambda w
        ratio = clip(|w| / |u|, min_trust_ratio, max_trust_ratio), and 1 where a norm is 0
        w'    = w - lr ratio u

    with |.| the 2-norm of a layer, computed without overflow or underflow; a leaf is a layer unless
    `layer_axes` or `norm_axes` says otherwise. `rule="ivy"` is Ivy's own: the same ratio, 0 where
    the weights are, but w' = w - lr ratio delta: decay acts in the norm alone.

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`. Its sign is the caller's.
      mw_tm1: first moment of the step before, of a shape that broadcasts to that of `w`.
      vw_tm1: second moment of the step before, real, likewise.
      step: number of this update, counted from 1; may be fractional or traced.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      max_trust_ratio: upper clamp of the ratio, in [0, inf); None for none.
      decay_lambda: weight decay, in [0, inf).
      min_trust_ratio: lower clamp of the ratio, in [0, inf).
      bias_correction: see `adam_step`.
      rule: "paper" or "ivy".
      norm_axes: see `lars`.
      layer_axes: see `lars`.
      stop_gradients: cut `w'` from the graph, and only it.
      out: None.

    Returns:
      `(w', mw, vw)`, each with the dtypes of what it replaces.

    Raises:
      As `adam_update`.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
      (2020), algorithm 2, with phi the clamp of the ratio.
    """
    values.no_out("lamb_update", out)
    values.one_of("lamb_update", "rule", rule, LAMB_RULES)
    values.clamps("lamb_update", min_trust_ratio, max_trust_ratio)
    named = arguments.enter(
        "lamb_update",
        w=w,
        dcdw=dcdw,
        lr=lr,
        mw_tm1=mw_tm1,
        vw_tm1=vw_tm1,
        step=step,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        min_trust_ratio=min_trust_ratio,
        max_trust_ratio=arguments.clamp(max_trust_ratio),
        decay_lambda=arguments.decay(decay_lambda, rule),
    )
    adam = arguments.adam("lamb_update", named, bias_correction)
    return _lamb_update(
        named,
        adam,
        bias_correction=bias_correction,
        rule=rule,
        axes=places.static("lamb_update", norm_axes, layer_axes),
        stop_gradients=stop_gradients,
    )


@compiled
def _lamb_update(
    named: dict[str, PyTree],
    adam: Adam,
    *,
    bias_correction: BiasCorrection,
    rule: LambRule,
    axes: Static,
    stop_gradients: bool,
) -> tuple[PyTree, PyTree, PyTree]:
    named, adam = arguments.checked_with_adam("lamb_update", named, adam)
    mw, vw = named["mw_tm1"], named["vw_tm1"]
    new_mw, new_vw = methods.adam_moments(named["dcdw"], mw, vw, adam)
    step = methods.lamb_steps(
        named["w"],
        new_mw,
        new_vw,
        adam,
        named["lr"],
        named["decay_lambda"],
        named["min_trust_ratio"],
        named["max_trust_ratio"],
        Layers(slots.in_trees("lamb_update", axes, named["w"], named["dcdw"])),
        bias_correction=bias_correction,
        rule=rule,
    )
    w = arguments.new_weights(named["w"], step, stop_gradients)
    return w, arguments.like(new_mw, mw), arguments.like(new_vw, vw)
