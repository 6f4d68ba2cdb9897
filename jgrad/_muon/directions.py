"""Muon's direction of each array: matrices by Newton-Schulz, all other leaves by Adam.

Matrices are never packed, so a list has an entry for each array: one of matrices, or one of others.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import Function, jit_static_kwargs, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import kinds, numbers, options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.leaf_functions import average_of_leaf, of_one_leaf
from jgrad._inputs.matrix_options import MatrixOptions
from jgrad._inputs.moment import Moment, Step
from jgrad._layers import matrix_axes
from jgrad._layers.matrix_axes import MatrixAxes, TwoKinds
from jgrad._muon import orthogonalize
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
Axes: TypeAlias = PerArray[MatrixAxes]


MuonRule = Literal["muon", "normuon"]
ScaleFunction = Callable[[int, int], Scalar]  # of outputs and inputs


class MuonOptions(NamedTuple):
    """What a user chose of Muon's direction, read as far as it can be.

    Attributes:
      scale: see `muon`, a function.
      steps: of Newton-Schulz, on a stack of wide matrices.
      fraction: of rows that an update takes; None for all.
      shard_over: names of mesh axes.
      adam: of the leaves that are no matrices.
    """

    matrices: MatrixOptions
    momentum: kinds.Beta
    nesterov: bool
    scale: ScaleFunction
    steps: Function
    rule: MuonRule
    normuon_beta: Scalar
    fraction: float | None
    error_decay: kinds.Beta
    shard_over: tuple[str, ...]
    adam: adam_of.AdamOptions


class Directions(NamedTuple):
    """What one update makes.

    Attributes:
      direction: of each array.
      mw: new first moments.
      vw: new second moments.
      signs: of each array one that has the signs of the direction.
    """

    direction: PerArray[jax.Array]
    mw: PerArray[Leaf]
    vw: PerArray[Leaf]
    signs: PerArray[jax.Array]


def directions(inputs: Inputs, step: Step, muon: MuonOptions) -> Directions:
    """The direction of each array, and the new moments."""
    both = TwoKinds.of(inputs.specs, step.matrices)
    beta = (muon.momentum if muon.fraction is None else muon.error_decay).read(inputs, step)
    moments = list(step.moments.values())
    arguments = *leafwise.at((inputs.g, beta), both.first), *(x.at(both.first) for x in moments)
    orthogonal = _matrix_directions(inputs.function, muon, step.numbers, both.axes, *arguments)
    return with_adam(inputs, step, both, orthogonal, muon.adam.read(inputs, step))


def with_adam(
    inputs: Inputs, step: Step, both: TwoKinds, of_matrices: Directions, n: adam_of.Numbers
) -> Directions:
    """Of all arrays: of matrices as they are given, of the others by Adam with these numbers."""
    pairs, mw, vw = adam_of.adam_of_leaf(
        leafwise.at(inputs.g, both.second),
        *(x.at(both.second) for x in step.moments.values()),
        leafwise.at(n, both.second),
    )
    others = Directions([x for x, _ in pairs], mw, vw, [x for _, x in pairs])
    return Directions(*map(both.together, of_matrices, others))


def _matrix_directions(
    function: str,
    muon: MuonOptions,
    call_numbers: Mapping[str, Leaf],
    matrices: Axes,
    g: PerArray[jax.Array],
    beta: BetaForms,
    first: Moment,
    second: Moment,
) -> Directions:
    """Those of matrices, of which alone all arguments are."""
    axes = [where.whole for where in matrices]
    is_normuon = muon.rule == "normuon"
    is_taken: PerArray[jax.Array] | None = None
    if muon.fraction is None:
        if (decay := call_numbers.get("error_decay")) is not None:
            without = "without `fraction`"
            refuse_without_effect(function, "error_decay", decay, None, without)
        averaged = _look_ahead if muon.nesterov else average_of_leaf
        m, mw = averaged(g, first, beta)
        m = list(map(MatrixAxes.gathered, matrices, m))
        x = orthogonalize.orthogonalized(function, m, axes, muon.steps, muon.shard_over)
    else:
        check_no_momentum(function, muon.fraction, call_numbers.get("momentum"))
        sums = leafwise.apply(rules.add_scaled, g, first.old)
        x, is_taken = orthogonalize.orthogonalized_rows(
            function,
            list(map(MatrixAxes.gathered, matrices, sums)),
            axes,
            muon.steps,
            muon.shard_over,
            fraction=muon.fraction,
            of_outputs=is_normuon,
        )
        there = list(map(MatrixAxes.local_part, matrices, is_taken))
        decayed = leafwise.apply(_decayed_rows, sums, there, beta.value)
        _, mw = _stored(decayed, first)
    vw = second.old  # which are none in Muon itself
    if is_normuon:
        of_outputs = numbers.beta(function, "normuon_beta", muon.normuon_beta)
        x, vw = _with_equal_outputs(x, matrices, axes, is_taken, second, of_outputs)
    x = leafwise.apply(rules.scale_by, x, factors_of(function, muon.scale, axes))
    x = list(map(MatrixAxes.local_part, matrices, x))
    return Directions(x, mw, vw, signs=x)


def check_no_momentum(function: str, fraction: float, momentum: object) -> None:
    """Only the default, or what `optax.inject_hyperparams` makes of it."""
    momentum = numbers.as_python_number(momentum)
    if momentum is None or isinstance(momentum, jax.Array) or momentum == MOMENTUM:
        return
    came = momentum if checks.is_number(momentum) else checks.describe(momentum)
    expected = f"none with `fraction={fraction}`, where gradients are summed; `error_decay` is the"
    raise ValueError(f"{function}: `momentum`: {came}, expected {expected} decay of the sum.")


def factors_of(
    function: str, scale: Callable[[int, int], Scalar], axes: Axes
) -> PerArray[jax.Array]:
    """For each array a scalar, or one number per output where it has pieces of several sizes.

    Matrices with equal sizes share one in the program.
    """
    factors: dict[tuple[int, int], jax.Array] = {}
    numbers_of_arrays: PerArray[jax.Array] = []
    for where in axes:
        sizes = [run.sizes for run in matrix_axes.axes_of_runs(where)]
        for size in sizes:
            if size not in factors:
                x = options.result_of(function, "scale", "outputs and inputs", scale, *size)
                factors[size] = numbers.scalar(function, f"scale{size}", x)
        is_one = len(set(sizes)) == 1
        scales = [factors[size] for size in sizes]
        numbers_of_arrays.append(scales[0] if is_one else matrix_axes.per_output(scales, where))
    return numbers_of_arrays


def _with_equal_outputs(
    x: PerArray[jax.Array],
    matrices: Axes,
    axes: Axes,
    is_taken: PerArray[jax.Array] | None,
    vw: Moment,
    beta: BetaForms,
) -> tuple[PerArray[jax.Array], PerArray[Leaf]]:
    """NorMuon: outputs divided by the root of their mean squares, averaged over updates.

    Those of rows that wait are zeros, and their averages wait, too.
    """

    def local(numbers: PerArray[jax.Array]) -> PerArray[jax.Array]:
        pairs = zip(matrices, numbers, strict=True)
        return [where.local_part(x, where.outputs) for where, x in pairs]

    mean_squares = local(matrix_axes.on_matrices(_mean_square, axes, x))
    if is_taken is None:
        averages, new = average_of_leaf(mean_squares, vw, beta)
    else:
        there = local(matrix_axes.on_matrices(_any, axes, is_taken))
        averages, new = _average_of_outputs(mean_squares, vw, beta, there)
    pairs = zip(matrices, averages, strict=True)
    averages = [where.gathered(x, where.outputs) for where, x in pairs]
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
