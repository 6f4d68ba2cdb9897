"""Gradient descent, and the last step of every optimizer."""

from jgrad._arithmetic.leafwise import compiled
from jgrad._inputs import functional as arguments
from jgrad._inputs import methods
from jgrad._trees import values
from jgrad._trees.trees import PyTree


def optimizer_update(
    w: PyTree,
    effective_grad: PyTree,
    lr: PyTree,
    /,
    *,
    stop_gradients: bool = True,
    out: None = None,
) -> PyTree:
    """New weights from a gradient that an optimizer has made effective.

        w' = w - lr effective_grad

    Args:
      w: weights, floating or complex.
      effective_grad: effective gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w` (so one of shape (n,) goes along
        the last axis). Its sign is the caller's.
      stop_gradients: cut the result from the graph.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      ValueError: structures or shapes do not match, or a Python number is not finite.
      TypeError: `w` has an integer leaf, or an argument has one that is not numeric.
      NotImplementedError: `out` is given.
    """
    values.no_out("optimizer_update", out)
    named = arguments.enter("optimizer_update", w=w, effective_grad=effective_grad, lr=lr)
    return _optimizer_update(named, stop_gradients=stop_gradients)


@compiled
def _optimizer_update(named: dict[str, PyTree], *, stop_gradients: bool) -> PyTree:
    named = arguments.checked("optimizer_update", named)
    step = methods.steps(named["effective_grad"], named["lr"])
    return arguments.new_weights(named["w"], step, stop_gradients)


def gradient_descent_update(
    w: PyTree, dcdw: PyTree, lr: PyTree, /, *, stop_gradients: bool = True, out: None = None
) -> PyTree:
    """New weights by gradient descent.

        w' = w - lr dcdw

    Args:
      w: weights, floating or complex.
      dcdw: gradient, of the shape of `w`.
      lr: learning rate, of a shape that broadcasts to that of `w`. Its sign is the caller's.
      stop_gradients: cut the result from the graph.
      out: None.

    Returns:
      `w'`, with the dtypes of `w`.

    Raises:
      As `optimizer_update`.
    """
    values.no_out("gradient_descent_update", out)
    named = arguments.enter("gradient_descent_update", w=w, dcdw=dcdw, lr=lr)
    return _gradient_descent_update(named, stop_gradients=stop_gradients)


@compiled
def _gradient_descent_update(named: dict[str, PyTree], *, stop_gradients: bool) -> PyTree:
    named = arguments.checked("gradient_descent_update", named)
    step = methods.steps(named["dcdw"], named["lr"])
    return arguments.new_weights(named["w"], step, stop_gradients)
