"""LARS, without momentum."""

from jgrad import arguments, checks, methods
from jgrad.leafwise import compiled
from jgrad.methods import RULES, Rule
from jgrad.trees import PyTree


def lars_update(
    w: PyTree,
    dcdw: PyTree,
    lr: PyTree,
    /,
    *,
    decay_lambda: PyTree = 0,
    trust_coefficient: PyTree = 1.0,
    epsilon: PyTree = 0.0,
    rule: Rule = "paper",
    stop_gradients: bool = True,
    out: None = None,
) -> PyTree:
    """New weights by layer-wise adaptive rate scaling, without momentum.

        ratio = trust_coefficient |w| / (|dcdw| + decay_lambda |w| + epsilon), and 1 where a norm is
                0
        w'    = w - lr ratio (dcdw + decay_lambda w)

    with |.| the 2-norm of a leaf, computed without overflow or underflow. `rule="ivy"` is Ivy's
    own: ratio = trust_coefficient |w| / |dcdw|, divided by decay_lambda |w| where that is positive;
    w' = w - lr ratio dcdw.

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`. Its sign is the caller's.
      decay_lambda: weight decay, in [0, inf).
      trust_coefficient: eta of the paper, in [0, inf). 1 here; the transformation `lars` has 0.001.
      epsilon: added to the denominator, in [0, inf).
      rule: "paper" or "ivy".
      stop_gradients: cut the result from the graph.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      As `optimizer_update`.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
      algorithm 1.
    """
    checks.no_out("lars_update", out)
    checks.one_of("lars_update", "rule", rule, RULES)
    checks.no_epsilon("lars_update", epsilon, rule)
    named = arguments.enter(
        "lars_update",
        w=w,
        dcdw=dcdw,
        lr=lr,
        trust_coefficient=trust_coefficient,
        epsilon=epsilon,
        decay_lambda=arguments.decay(decay_lambda, rule),
    )
    return _lars_update(named, rule=rule, stop_gradients=stop_gradients)


@compiled
def _lars_update(named: dict[str, PyTree], *, rule: Rule, stop_gradients: bool) -> PyTree:
    named = arguments.checked("lars_update", named)
    step = methods.lars_steps(
        named["w"],
        named["dcdw"],
        (named["lr"],),
        named["trust_coefficient"],
        named["decay_lambda"],
        named["epsilon"],
        mask=True,
        rule=rule,
    )
    return arguments.new_weights(named["w"], step, stop_gradients)
