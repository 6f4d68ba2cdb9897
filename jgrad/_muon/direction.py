"""Muon's direction: momentum, orthogonalized matrix by matrix; Adam's for all other elements."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.each import of_one_leaf
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.moment import LeafMoment, Moment, MomentShapes, NewMoments, Step
from jgrad._inputs.notes import Notes
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import Mask, Number
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._muon import matrix_axes, matrix_options, orthogonalize
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._muon.newton_schulz import check_compute_dtype, read_coefficients
from jgrad._muon.parts import (
    Array,
    Matrices,
    Part,
    Parts,
    PerArray,
    PerLeaf,
    PerPart,
    check_whole,
    second_shapes,
)
from jgrad._optimizers import adam as adam_of
from jgrad._optimizers.adam import Adam, Numbers
from jgrad._packed import packing
from jgrad._trees import trees, values
from jgrad._trees.shardings import replicated
from jgrad._trees.trees import PyTree

MuonRule = Literal["muon", "normuon"]
ScaleFunction = Callable[[int, int], Any]  # of outputs and inputs
Scale = str | ScaleFunction | None
# Of `output_axes`: -1, in a form that `optax.inject_hyperparams` does not make an array of.
LAST = (-1,)
# NorMuon's: added to the root of the mean square of each output, which is 1 / sqrt(inputs) or so.
_NORMUON_EPSILON = 1e-8

_SCALES: dict[Any, ScaleFunction] = {
    "original": lambda out, into: math.sqrt(max(1.0, out / max(1, into))),
    "match_rms_adamw": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "spectral": lambda out, into: math.sqrt(out / max(1, into)),
    None: lambda out, into: 1.0,
}


# ---- options -----------------------------------------------------------------------------------


class Muon(NamedTuple):
    """The options of Muon's direction; `muon` explains each of them."""

    matrices: Mask
    momentum: Any
    nesterov: bool
    scale: Any
    coefficients: Any
    rule: MuonRule
    output_axes: PyTree
    split: PyTree
    mesh_axes: PyTree
    layer_axes: PyTree
    shard_over: Any
    compute_dtype: Any
    normuon_beta: Scalar
    adam_beta1: Number
    adam_beta2: Number
    adam_epsilon: Number

    @classmethod
    def of_arguments(cls, name: str, arguments: dict[str, Any]) -> "Muon":
        """Those among the arguments of a factory; names as what they stand for, and checked."""
        muon = cls(**{field: arguments[field] for field in cls._fields})
        _check_matrices(name, muon.matrices)
        values.one_of(name, "rule", muon.rule, ("muon", "normuon"))
        values.boolean(name, "nesterov", muon.nesterov)
        options.check(name, numbers.scalar_betas, momentum=muon.momentum)
        matrix_options.read_output_axes(name, muon.output_axes)
        matrix_options.read_split(name, muon.split)
        read_layer_axes(name, muon.layer_axes)
        matrix_options.read_shardings(name, muon.mesh_axes)
        numbers.beta(name, "normuon_beta", muon.normuon_beta)
        muon.adam.check(name, prefix="adam_")
        over = muon.shard_over
        return muon._replace(
            scale=read_scale(name, muon.scale),
            coefficients=read_coefficients(name, muon.coefficients),
            compute_dtype=check_compute_dtype(name, muon.compute_dtype),
            shard_over=() if over is None else values.axis_names(name, "shard_over", over),
        )

    @property
    def adam(self) -> Adam:
        """The numbers of Adam, of all other leaves."""
        return Adam(self.adam_beta1, self.adam_beta2, self.adam_epsilon, "moments")

    @property
    def is_normuon(self) -> bool:
        """Whether matrices have second moments: one number per output."""
        return self.rule == "normuon"

    def shapes_of(self, inputs: Parameters) -> MomentShapes:
        """The shapes of the moments; and where the matrices of each leaf are."""
        axes = self.output_axes, self.layer_axes, self.mesh_axes, self.split
        matrices = matrix_options.find(inputs, self.matrices, *axes)
        if inputs.has_buffers:
            check_whole(inputs, matrices)
        vw = second_shapes(inputs, matrices, per_output=self.is_normuon)
        return MomentShapes(inputs.tree, vw, matrices)


def _check_matrices(name: str, matrices: Mask) -> None:
    """A choice of leaves, which has to be made."""
    if matrices is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes; shapes alone cannot tell"
        raise TypeError(f"{name}: `matrices`: None, expected {expected}; {remedy}.")
    if isinstance(matrices, jax.Array):
        expected = "a tree of Python's bools, or a function of the parameters' shapes"
        remedy = '`optax.inject_hyperparams` needs `static_args=("matrices",)`'
        raise TypeError(f"{name}: `matrices`: an array, expected {expected}; {remedy}.")


def read_scale(function: str, scale: Scale) -> ScaleFunction:
    """The function of (outputs, inputs)."""
    if not callable(scale):
        values.one_of(function, "scale", scale, _SCALES)
        return _SCALES[scale]
    try:
        signature = inspect.signature(scale)
    except ValueError:  # of a function in C
        return scale
    try:
        signature.bind(1, 1)
    except TypeError:
        came = f"{getattr(scale, '__name__', type(scale).__name__)}{signature}"
        expected = "a function of the numbers of outputs and inputs of a matrix"
        raise TypeError(f"{function}: `scale`: {came}, expected {expected}.") from None
    return scale


# ---- the method, on the arrays of one leaf -----------------------------------------------------


@of_one_leaf
def _momentum(g: Any, mw: LeafMoment, beta: BetaForms) -> jax.Array:
    return mw.write(rules.average, g, mw.old, beta.value, beta.complement)


@of_one_leaf
def _look_ahead(g: Any, mw: LeafMoment, beta: BetaForms) -> jax.Array:
    m = mw.write(rules.average, g, mw.old, beta.value, beta.complement)
    return rules.average(g, m, beta.value, beta.complement)


@of_one_leaf
def _adam_and_signs(g: Any, mw: LeafMoment, vw: LeafMoment, n: Numbers) -> tuple[Any, Any]:
    """Adam's direction, and the first moment, which has its signs.

    XLA would write out the direction for a second reader; the moment is written in any case.
    """
    return adam_of.direction(g, mw, vw, n)[:2]


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
    new = x / (root + _NORMUON_EPSILON).astype(x.dtype)
    return numerics.scaled(new, numerics.safe_divide(norm(x), norm(new)))


# ---- the method, on parts of arrays ------------------------------------------------------------


class Directions(NamedTuple):
    """What one update makes.

    Attributes:
      direction: of each array.
      mw: new first moments.
      vw: new second moments.
      signs: of each array one that has the signs of Adam's direction; None where there is none.
    """

    direction: PerArray[Array]
    mw: NewMoments
    vw: NewMoments
    signs: PerArray[Array] | None = None


def directions(inputs: Inputs, step: Step, muon: Muon, *, signs: bool = False) -> Directions:
    """The direction of each array, and the new moments; and `signs`, if they are asked for."""
    inputs.check_buffers()
    parts = Parts(inputs, step.matrices, per_output=muon.is_normuon)
    mw, vw = parts.moment(step.mw), parts.moment(step.vw, second=True)
    g = list(zip(parts.split(inputs.g), parts.all, strict=True))
    g_of_matrices = [x if part.matrices else None for x, part in g]
    g_of_others = [None if part.matrices else x for x, part in g]

    beta = parts.numbers(options.beta_per_array(inputs, step, "momentum", muon.momentum))
    momentum = _look_ahead if muon.nesterov else _momentum
    m, mw_of_matrices = momentum(g_of_matrices, mw, beta)
    axes = [None if x is None else part.axes.whole for part, x in zip(parts.all, m, strict=True)]
    x = orthogonalize.orthogonalized(
        inputs.function,
        parts.map(Part.to_matrices, m),
        axes,
        coefficients=muon.coefficients,
        compute_dtype=muon.compute_dtype,
        shard_over=muon.shard_over,
    )
    if inputs.notes is not None:
        _note_residuals(inputs, inputs.notes, step.matrices, parts, x)
    vw_of_matrices = []
    if muon.is_normuon:
        beta = numbers.beta(inputs.function, "normuon_beta", muon.normuon_beta)
        x, new = _with_equal_outputs(parts, x, axes, vw, beta)
        vw_of_matrices.append(new)
    x = leafwise.apply(rules.scale_by, x, factors_of(inputs.function, muon.scale, axes))

    n = parts.numbers(muon.adam.read(inputs, step, prefix="adam_"))
    others, like, mw_of_others, vw_of_others = _adam(g_of_others, mw, vw, n, signs=signs)
    x = parts.map(Part.from_matrices, x)
    direction = [other if o is None else o for o, other in zip(x, others, strict=True)]
    return Directions(
        parts.join(direction, inputs.g),
        parts.stored(step.mw, mw_of_matrices, mw_of_others),
        parts.stored(step.vw, *vw_of_matrices, vw_of_others, second=True),
        like if len(parts.all) == len(inputs.specs) else None,
    )


def _adam(
    g: PerPart[Array], mw: Moment, vw: Moment, n: Numbers, *, signs: bool
) -> tuple[PerPart[Array], PerPart[Array] | None, NewMoments, NewMoments]:
    """Adam's directions, arrays with their signs if they are asked for, and the new moments."""
    if not signs:
        direction, new_mw, new_vw = adam_of.deltas(g, mw, vw, n)
        return direction, None, new_mw, new_vw
    both, new_mw, new_vw = _adam_and_signs(g, mw, vw, n)
    direction, like = ([None if pair is None else pair[k] for pair in both] for k in (0, 1))
    return direction, like, new_mw, new_vw


def _with_equal_outputs(
    parts: Parts, x: PerPart[Array], axes: PerPart[MatrixAxes | None], vw: Moment, beta: BetaForms
) -> tuple[PerPart[Array], NewMoments]:
    """NorMuon: outputs divided by the root of their mean squares, averaged over updates."""
    mean_squares = _apply(_mean_square, axes, x)
    mean_squares = parts.map(Part.from_matrices, mean_squares, per_output=True)
    averages, new = _momentum(mean_squares, vw, beta)
    averages = parts.map(Part.to_matrices, averages, per_output=True)
    return _apply(_normalized, axes, x, averages), new


def _apply(
    rule: Function, axes: PerPart[MatrixAxes | None], *columns: PerPart[Array]
) -> PerPart[Array]:
    """The rule of the entries of each part that has matrices."""
    rows = zip(axes, zip(*columns, strict=True), strict=True)
    return leafwise.run([None if of is None else (_of_axes(rule, of), row) for of, row in rows])


@functools.cache
def _of_axes(rule: Function, axes: MatrixAxes) -> Function:
    """One function object for each place of matrices, so that JAX's caches find it again."""
    return functools.partial(rule, axes=axes)


def factors_of(
    function: str, scale: ScaleFunction, axes: PerPart[MatrixAxes | None]
) -> PerPart[Array]:
    """For each array a scalar, or one number per output where it has blocks of several sizes.

    Matrices with equal sizes share one in the program.
    """
    factors: dict[tuple[int, int], jax.Array] = {}
    of_parts: PerPart[Array] = [None] * len(axes)
    for i, of in enumerate(axes):
        sizes = [] if of is None else [piece.sizes for piece in matrix_axes.pieces(of)]
        for size in sizes:
            if size not in factors:
                factors[size] = numbers.scalar(function, f"scale{size}", scale(*size))
        if of is not None and len(set(sizes)) > 1:
            of_parts[i] = matrix_axes.per_output([factors[size] for size in sizes], of)
        elif of is not None:
            of_parts[i] = factors[sizes[0]]
    return of_parts


# ---- how far results of Newton-Schulz are from orthogonal matrices -----------------------------


def _note_residuals(
    inputs: Inputs, notes: Notes, matrices: Matrices, parts: Parts, x: PerPart[Array]
) -> None:
    """Notes the largest |X X^T - I| / sqrt(rows) of the matrices of each leaf, X wide.

    NaN inside `zero`, where a device has some of the matrices of a leaf.
    """
    leaves: PerLeaf[Array] = x
    is_shard = any(spec.shard is not None for spec in inputs.specs)
    if inputs.has_buffers and not is_shard:
        arrays = parts.join(parts.map(Part.from_matrices, x), inputs.g)
        tree = trees.flatten(inputs.tree)[1].unflatten(arrays)
        leaves = trees.flatten(packing.unpack(tree))[0]
    for i, (name, axes) in enumerate(zip(trees.names(inputs.shapes), matrices, strict=True)):
        if axes is not None and is_shard:
            notes.add(f"muon_residual/{name}", jnp.nan)
        elif axes is not None and (leaf := leaves[i]) is not None:
            notes.add(f"muon_residual/{name}", _residual(replicated(leaf), axes=axes.whole))


@jit_static_kwargs
def _residual(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    runs = zip(matrix_axes.cut(x, axes), matrix_axes.pieces(axes), strict=True)
    return functools.reduce(jnp.maximum, [_residual_of_run(y, of) for y, of in runs])


def _residual_of_run(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    x = axes.as_wide.of(x)
    rows = x.shape[1]
    stacked, over = ((0,), (0,)), ((2,), (2,))
    product = jax.lax.dot_general(x, x.conj(), (over, stacked))
    apart = product - jnp.eye(rows, dtype=x.dtype)[None]
    squares = jnp.sum(numerics.abs_squared(apart), axis=(1, 2))
    return jnp.max(jnp.sqrt(squares / np.float32(max(1, rows)).astype(squares.dtype)), initial=0.0)
