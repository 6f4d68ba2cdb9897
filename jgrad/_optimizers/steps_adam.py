"""Adam, as a direction with new moments and as a whole update."""

from jgrad._arithmetic.leafwise import compiled
from jgrad._arithmetic.rules import BiasCorrection
from jgrad._inputs import functional as arguments
from jgrad._inputs import methods
from jgrad._inputs.methods import Adam
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def adam_step(
    dcdw: PyTree,
    mw: PyTree,
    vw: PyTree,
    step: PyTree,
    /,
    *,
    beta1: PyTree = 0.9,
    beta2: PyTree = 0.999,
    epsilon: PyTree = 1e-7,
    bias_correction: BiasCorrection = "step_size",
    out: None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Adam's direction and new moments; the learning rate is not applied.

        mw'   = beta1 mw + (1 - beta1) dcdw
        vw'   = beta2 vw + (1 - beta2) |dcdw|^2
        alpha = sqrt(1 - beta2^step) / (1 - beta1^step + epsilon)
        delta = alpha mw' / (sqrt(vw') + epsilon)

    The epsilon inside alpha is Ivy's guard and not the paper's. At the default it moves the first
    step by one part in a million; a large one (0.1, 1) matters: take `bias_correction="moments"`
    for recipes that were tuned elsewhere.

    Args:
      dcdw: gradient.
      mw: first moment, of a shape that broadcasts to the gradient's.
      vw: second moment, real, likewise.
      step: number of this update, counted from 1; may be fractional or traced. At 0 delta is 0.
      beta1: decay rate of the first moment, in [0, 1).
      beta2: decay rate of the second moment, in [0, 1).
      epsilon: added to the root of the second moment, in [0, inf).
      bias_correction: "step_size" is the form above, of the end of section 2 of the paper;
        "moments" is `m_hat / (sqrt(v_hat) + epsilon)`, its algorithm 1, PyTorch's and optax's; None
        is alpha = 1.
      out: None.

    Returns:
      `(delta, mw', vw')`, of the gradient's shape; a scalar gradient takes that of moments with one
      element. The moments keep their dtypes, delta has the gradient's.

    Raises:
      ValueError: structures or shapes do not match, or a Python number is out of range.
      TypeError: a leaf is not a number or an array of numbers, or is complex beside a real one.
      NotImplementedError: `out` is given.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2.
    """
    values.no_out("adam_step", out)
    named = arguments.enter(
        "adam_step",
        dcdw=dcdw,
        mw=mw,
        vw=vw,
        step=step,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
    )
    adam = arguments.adam("adam_step", named, bias_correction)
    return _adam_step(named, adam, bias_correction=bias_correction)


@compiled
def _adam_step(
    named: dict[str, PyTree], adam: Adam, *, bias_correction: BiasCorrection
) -> tuple[PyTree, PyTree, PyTree]:
    named, adam = arguments.checked_with_adam("adam_step", named, adam)
    dcdw, mw, vw = named["dcdw"], named["mw"], named["vw"]
    new_mw, new_vw = methods.adam_moments(dcdw, mw, vw, adam)
    delta = methods.adam_delta(new_mw, new_vw, adam, bias_correction)
    like = arguments.like
    return like(delta, dcdw), like(new_mw, mw), like(new_vw, vw)


def adam_update(
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
    bias_correction: BiasCorrection = "step_size",
    stop_gradients: bool = True,
    out: None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """New weights and moments by Adam.

        (delta, mw, vw) = adam_step(dcdw, mw_tm1, vw_tm1, step)
        w' = w - lr delta

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
      bias_correction: see `adam_step`.
      stop_gradients: cut `w'` from the graph, and only it.
      out: None.

    Returns:
      `(w', mw, vw)`, each with the dtypes of what it replaces.

    Raises:
      As `adam_step`; TypeError also where `w` has an integer leaf.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), section 2.
    """
    values.no_out("adam_update", out)
    named = arguments.enter(
        "adam_update",
        w=w,
        dcdw=dcdw,
        lr=lr,
        mw_tm1=mw_tm1,
        vw_tm1=vw_tm1,
        step=step,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
    )
    adam = arguments.adam("adam_update", named, bias_correction)
    return _adam_update(named, adam, bias_correction=bias_correction, stop_gradients=stop_gradients)


@compiled
def _adam_update(
    named: dict[str, PyTree], adam: Adam, *, bias_correction: BiasCorrection, stop_gradients: bool
) -> tuple[PyTree, PyTree, PyTree]:
    named, adam = arguments.checked_with_adam("adam_update", named, adam)
    mw, vw = named["mw_tm1"], named["vw_tm1"]
    new_mw, new_vw = methods.adam_moments(named["dcdw"], mw, vw, adam)
    delta = methods.adam_delta(new_mw, new_vw, adam, bias_correction)
    w = arguments.new_weights(named["w"], methods.steps(delta, named["lr"]), stop_gradients)
    return w, arguments.like(new_mw, mw), arguments.like(new_vw, vw)
