"""LARS, without momentum."""

from jgrad._arithmetic.leafwise import compiled
from jgrad._inputs import functional as arguments
from jgrad._inputs import methods
from jgrad._inputs.methods import LARS_RULES, LarsRule, Layers
from jgrad._layers import layer_axes as places
from jgrad._layers.layer_axes import Static
from jgrad._packed import arrays as slots
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def lars_update(
    w: PyTree,
    dcdw: PyTree,
    lr: PyTree,
    /,
    *,
    decay_lambda: PyTree = 0,
    trust_coefficient: PyTree = 1.0,
    epsilon: PyTree = 0.0,
    rule: LarsRule = "paper",
    norm_axes: PyTree = None,
    layer_axes: PyTree = None,
    stop_gradients: bool = True,
    out: None = None,
) -> PyTree:
    """New weights by layer-wise adaptive rate scaling, without momentum.

        ratio = trust_coefficient |w| / (|dcdw| + decay_lambda |w| + epsilon), and 1 where a norm is
                0
        w'    = w - lr ratio (dcdw + decay_lambda w)

    with |.| the 2-norm of a layer, computed without overflow or underflow; a leaf is a layer unless
    `layer_axes` or `norm_axes` says otherwise. `rule="decayed_gradient"` divides by
    |dcdw + decay_lambda w| + epsilon, as optax does. `rule="ivy"` is Ivy's own:
    ratio = trust_coefficient |w| / |dcdw|, divided by decay_lambda |w| where that is positive;
    w' = w - lr ratio dcdw.

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`. Its sign is the caller's.
      decay_lambda: weight decay, in [0, inf).
      trust_coefficient: eta of the paper, in [0, inf). 1 here; the transformation `lars` has 0.001.
      epsilon: added to the denominator, in [0, inf).
      rule: "paper", "decayed_gradient" or "ivy".
      norm_axes: see `lars`.
      layer_axes: see `lars`.
      stop_gradients: cut the result from the graph.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      As `optimizer_update`.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
      algorithm 1.
    """
    values.no_out("lars_update", out)
    values.one_of("lars_update", "rule", rule, LARS_RULES)
    values.no_epsilon("lars_update", epsilon, rule)
    named = arguments.enter(
        "lars_update",
        w=w,
        dcdw=dcdw,
        lr=lr,
        trust_coefficient=trust_coefficient,
        epsilon=epsilon,
        decay_lambda=arguments.decay(decay_lambda, rule),
    )
    axes = places.static("lars_update", norm_axes, layer_axes)
    return _lars_update(named, rule=rule, axes=axes, stop_gradients=stop_gradients)


@compiled
def _lars_update(
    named: dict[str, PyTree], *, rule: LarsRule, axes: Static, stop_gradients: bool
) -> PyTree:
    named = arguments.checked("lars_update", named)
    step = methods.lars_steps(
        named["w"],
        named["dcdw"],
        (named["lr"],),
        named["trust_coefficient"],
        named["decay_lambda"],
        named["epsilon"],
        Layers(slots.in_trees("lars_update", axes, named["w"], named["dcdw"])),
        rule=rule,
    )
    return arguments.new_weights(named["w"], step, stop_gradients)
