"""NorMuon: outputs of orthogonal matrices, divided by the root of their averaged mean squares."""

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics, rules
from jgrad._arithmetic.leafwise import jit_static_kwargs, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import matrix_axes
from jgrad._inputs.leaf_functions import average, of_one_leaf
from jgrad._inputs.matrix_axes import Array, MatrixAxes
from jgrad._inputs.moment import Moment
from jgrad._kernels.moment import Moments
from jgrad._muon.parts import Part, Parts, PerPart

# Added to the root of the mean square of each output, which is 1 / sqrt(inputs) or so.
_EPSILON = 1e-8


def with_equal_outputs(
    parts: Parts,
    x: PerPart[Array],
    is_taken: PerPart[Array],
    axes: PerPart[MatrixAxes | None],
    vw: Moment,
    beta: BetaForms,
) -> tuple[PerPart[Array], PerPart[Array]]:
    """NorMuon: outputs divided by the root of their mean squares, averaged over updates.

    Those of rows that wait are zeros, and their averages wait, too.
    """
    mean_squares = matrix_axes.apply(_mean_square, axes, x)
    mean_squares = parts.map(Part.from_matrices, mean_squares, per_output=True)
    if any(y is not None for y in is_taken):
        is_taken = parts.map(
            Part.from_matrices, matrix_axes.apply(_any, axes, is_taken), per_output=True
        )
        averages, new = _average_of_outputs(mean_squares, vw, beta, is_taken)
    else:
        averages, new = average(mean_squares, vw, beta)
    averages = parts.map(Part.to_matrices, averages, per_output=True)
    return matrix_axes.apply(_normalized, axes, x, averages), new


# ---- on the arrays of one leaf -----------------------------------------------------------------


@of_one_leaf
def _average_of_outputs(
    x: jax.Array, vw: Moments, beta: BetaForms, is_taken: jax.Array
) -> jax.Array:
    return vw.write(_average_of_some, x, vw.old, beta.value, beta.complement, is_taken)


@on_leaf(arrays=2)
def _average_of_some(
    x: jax.Array, old: jax.Array, beta: jax.Array, complement: jax.Array, is_taken: jax.Array
) -> jax.Array:
    """The average where an output is taken, else the old one"""
    return jnp.where(is_taken, rules.average(x, old, beta, complement), old)


@jit_static_kwargs
def _mean_square(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """The mean of |x|^2 over the inputs, for each output of each matrix."""
    return jnp.mean(numerics.abs_squared(x), axis=axes.inputs, keepdims=True)


@jit_static_kwargs
def _normalized(x: jax.Array, vw: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """O' = O / (sqrt(v) + epsilon), rescaled to |O' |= |O|; 0 where O is"""

    def norm(x: jax.Array) -> jax.Array:
        return numerics.safe_sqrt(matrix_axes.sums(numerics.abs_squared(x), axes))

    root = numerics.safe_sqrt(numerics.widen(vw, numerics.real_dtype(x)))
    new = x / (root + _EPSILON).astype(x.dtype)
    return numerics.scaled(new, numerics.safe_divide(norm(x), norm(new)))


@jit_static_kwargs
def _any(is_taken: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """Whether an output of each matrix has elements that are taken."""
    return jnp.any(is_taken, axis=axes.inputs, keepdims=True)
