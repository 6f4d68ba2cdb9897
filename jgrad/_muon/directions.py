"""Muon's direction of each array: matrices by Newton-Schulz, all other leaves by Adam.

Matrices are never packed, so everything here is a list with an entry for each array: lists for
matrices have None for all other arrays, and the other way round.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import jit_static_kwargs, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import kinds, numbers, options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import average_of_leaf, of_one_leaf
from jgrad._inputs.matrix_options import MatrixOptions
from jgrad._inputs.moment import Moment, Step
from jgrad._layers import matrix_axes
from jgrad._layers.matrix_axes import Array, MatrixAxes
from jgrad._muon import newton_schulz, orthogonalize
from jgrad._optimizers import adam as adam_of
from jgrad._trees import checks
from jgrad._trees.annotations import Scalar
from jgrad._trees.known_names import refuse_without_effect
from jgrad._trees.protocols import Leaf

MOMENTUM = 0.95  # by default

# Added to the root of the mean square of each output, which is 1 / sqrt(inputs) or so.
_EPSILON = 1e-8

T = TypeVar("T")
PerArray: TypeAlias = list[T]
Axes: TypeAlias = PerArray[MatrixAxes | None]


MuonRule = Literal["muon", "normuon"]
ScaleFunction = Callable[[int, int], Scalar]  # of outputs and inputs


class MuonOptions(NamedTuple):
    """What a user chose of Muon's direction, read as far as it can be.

    Attributes:
      scale: see `muon`, a function.
      coefficients: a triple for each step.
      fraction: of rows that an update takes; None for all.
      shard_over: names of mesh axes.
      adam: of the leaves that are no matrices.
    """

    matrices: MatrixOptions
    momentum: kinds.Beta
    nesterov: bool
    scale: ScaleFunction
    coefficients: newton_schulz.Coefficients
    rule: MuonRule
    normuon_beta: Scalar
    fraction: float | None
    error_decay: kinds.Beta
    shard_over: tuple[str, ...]
    compute_dtype: np.dtype | None
    adam: adam_of.AdamOptions


class Directions(NamedTuple):
    """What one update makes.

    Attributes:
      direction: of each array.
      mw: new first moments.
      vw: new second moments.
      signs: of each array one that has the signs of Adam's direction.
    """

    direction: PerArray[Array]
    mw: PerArray[Leaf]
    vw: PerArray[Leaf]
    signs: PerArray[Array]


def directions(inputs: Inputs, step: Step, muon: MuonOptions) -> Directions:
    """The direction of each array, and the new moments."""
    matrices: Axes = inputs.per_array(step.matrices)
    both = list(zip(inputs.g, matrices, strict=True))
    g = [x if of else None for x, of in both]
    axes = [of.whole if of and x is not None else None for x, of in both]
    g_of_others = [None if of else x for x, of in both]

    first, second = step.moments["mw"], step.moments["vw"]
    is_normuon = muon.rule == "normuon"
    steps = newton_schulz.steps(muon.coefficients, muon.compute_dtype)
    is_taken: PerArray[Array] | None = None
    if muon.fraction is None:
        if (decay := step.numbers.get("error_decay")) is not None:
            without = "without `fraction`"
            refuse_without_effect(inputs.function, "error_decay", decay, None, without)
        momentum = _look_ahead if muon.nesterov else average_of_leaf
        m, mw_of_matrices = momentum(g, first, muon.momentum.read(inputs, step))
        m = matrix_axes.each(MatrixAxes.gathered, matrices, m)
        x = orthogonalize.orthogonalized(inputs.function, m, axes, steps, muon.shard_over)
    else:
        check_no_momentum(inputs.function, muon.fraction, step.numbers.get("momentum"))
        old = [None if x is None else y for x, y in zip(g, first.old, strict=True)]
        sums = leafwise.apply(rules.add_scaled, g, old)
        x, is_taken = orthogonalize.orthogonalized_rows(
            inputs.function,
            matrix_axes.each(MatrixAxes.gathered, matrices, sums),
            axes,
            steps,
            muon.shard_over,
            fraction=muon.fraction,
            of_outputs=is_normuon,
        )
        there = matrix_axes.each(MatrixAxes.local_part, matrices, is_taken)
        decay = muon.error_decay.read(inputs, step).value
        _, mw_of_matrices = _stored(leafwise.apply(_decayed_rows, sums, there, decay), first)
    vw_of_matrices: PerArray[Leaf] = [None] * len(x)
    if is_normuon:
        beta = numbers.beta(inputs.function, "normuon_beta", muon.normuon_beta)
        x, vw_of_matrices = _with_equal_outputs(x, matrices, axes, is_taken, second, beta)
    x = leafwise.apply(rules.scale_by, x, factors_of(inputs.function, muon.scale, axes))

    of_adam = muon.adam.read(inputs, step)
    pairs, mw, vw = adam_of.adam_of_leaf(g_of_others, first, second, of_adam)
    others, signs = ([pair and pair[k] for pair in pairs] for k in (0, 1))
    return Directions(
        either(matrix_axes.each(MatrixAxes.local_part, matrices, x), others),
        either(mw_of_matrices, mw),
        either(vw_of_matrices, vw),
        signs,
    )


def either(first: PerArray[Leaf], second: PerArray[Leaf]) -> PerArray[Leaf]:
    """Each entry of the first list, or that of the second where it is None."""
    return [y if x is None else x for x, y in zip(first, second, strict=True)]


def check_no_momentum(function: str, fraction: float, momentum: object) -> None:
    """Only the default, or what `optax.inject_hyperparams` makes of it."""
    momentum = numbers.as_python_number(momentum)
    if momentum is None or isinstance(momentum, jax.Array) or momentum == MOMENTUM:
        return
    came = momentum if checks.is_number(momentum) else checks.describe(momentum)
    expected = f"none with `fraction={fraction}`, where gradients are summed; `error_decay` is the"
    raise ValueError(f"{function}: `momentum`: {came}, expected {expected} decay of the sum.")


def factors_of(
    function: str, scale: Callable[[int, int], Scalar], axes: PerArray[MatrixAxes | None]
) -> PerArray[Array]:
    """For each array a scalar, or one number per output where it has blocks of several sizes.

    Matrices with equal sizes share one in the program.
    """
    factors: dict[tuple[int, int], jax.Array] = {}
    of_arrays: PerArray[Array] = [None] * len(axes)
    for i, of in enumerate(axes):
        sizes = [] if of is None else [piece.sizes for piece in matrix_axes.pieces(of)]
        for size in sizes:
            if size not in factors:
                x = options.result_of(function, "scale", "outputs and inputs", scale, *size)
                factors[size] = numbers.scalar(function, f"scale{size}", x)
        if of is not None and len(set(sizes)) > 1:
            of_arrays[i] = matrix_axes.per_output([factors[size] for size in sizes], of)
        elif of is not None:
            of_arrays[i] = factors[sizes[0]]
    return of_arrays


def _with_equal_outputs(
    x: PerArray[Array],
    matrices: Axes,
    axes: Axes,
    is_taken: PerArray[Array] | None,
    vw: Moment,
    beta: BetaForms,
) -> tuple[PerArray[Array], PerArray[Leaf]]:
    """NorMuon: outputs divided by the root of their mean squares, averaged over updates.

    Those of rows that wait are zeros, and their averages wait, too.
    """

    def local(numbers: PerArray[Array]) -> PerArray[Array]:
        return matrix_axes.each(MatrixAxes.local_part, matrices, numbers, per_output=True)

    mean_squares = local(matrix_axes.on_matrices(_mean_square, axes, x))
    if is_taken is None:
        averages, new = average_of_leaf(mean_squares, vw, beta)
    else:
        there = local(matrix_axes.on_matrices(_any, axes, is_taken))
        averages, new = _average_of_outputs(mean_squares, vw, beta, there)
    averages = matrix_axes.each(MatrixAxes.gathered, matrices, averages, per_output=True)
    return matrix_axes.on_matrices(_normalized, axes, x, averages), new


# ---- on the arrays of one leaf -----------------------------------------------------------------


@of_one_leaf
def _look_ahead(g: jax.Array, mw: Moments, beta: BetaForms) -> jax.Array:
    m = mw.write(rules.average, g, mw.old, beta.value, beta.complement)
    return rules.average(g, m, beta.value, beta.complement)


@of_one_leaf
def _stored(x: jax.Array, mw: Moments) -> jax.Array:
    return mw.write(leafwise.identity, x)


@on_leaf(arrays=1)
def _decayed_rows(m: jax.Array, is_taken: jax.Array, decay: jax.Array) -> jax.Array:
    """decay m in rows that are taken, m in the others"""
    return jnp.where(is_taken, numerics.scaled(m, decay), m)


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
