"""Muon's direction: momentum, orthogonalized matrix by matrix; Adam's for all other elements."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Function, apply, jit_static_kwargs
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import of_one_leaf
from jgrad._inputs.moment import (
    Moment,
    MomentShapes,
    NewMoments,
    Step,
    in_full_precision,
)
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import Mask, Number
from jgrad._kernels.moment import Moments
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._muon import batches, matrix_axes, packed_parts, residual, split_leaves
from jgrad._muon.matrix_axes import MatrixAxes, Part, read_output_axes, read_shardings, second_shape
from jgrad._muon.newton_schulz import check_compute_dtype, read_coefficients
from jgrad._muon.scales import factors_of, read_scale
from jgrad._muon.second_moments import second_shapes
from jgrad._optimizers import adam as adam_of
from jgrad._packed.array_spec import ArraySpec
from jgrad._trees import trees, values
from jgrad._trees.trees import PyTree

MuonRule = Literal["muon", "normuon"]
# Of `output_axes`: -1, in a form that `optax.inject_hyperparams` does not make an array of.
LAST = (-1,)
# NorMuon's: added to the root of the mean square of each output, which is 1 / sqrt(inputs) or so.
_NORMUON_EPSILON = 1e-8


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
        given = cls(**{field: arguments[field] for field in cls._fields})
        _check_matrices(name, given.matrices)
        values.one_of(name, "rule", given.rule, ("muon", "normuon"))
        values.boolean(name, "nesterov", given.nesterov)
        options.check(name, numbers.scalar_betas, momentum=given.momentum)
        read_output_axes(name, given.output_axes)
        split_leaves.read_split(name, given.split)
        read_layer_axes(name, given.layer_axes)
        read_shardings(name, given.mesh_axes)
        numbers.beta(name, "normuon_beta", given.normuon_beta)
        betas = {"adam_beta1": given.adam_beta1, "adam_beta2": given.adam_beta2}
        options.check(name, numbers.scalar_betas, **betas)
        options.check(name, numbers.scalars, adam_epsilon=given.adam_epsilon)
        over = given.shard_over
        return given._replace(
            scale=read_scale(name, given.scale),
            coefficients=read_coefficients(name, given.coefficients),
            compute_dtype=check_compute_dtype(name, given.compute_dtype),
            shard_over=() if over is None else values.axis_names(name, "shard_over", over),
        )

    def adam(self, inputs: Inputs, step: Step) -> adam_of.Numbers:
        """The numbers of Adam, of all other leaves."""
        return adam_of.numbers_of(
            options.beta_per_array(inputs, step, "adam_beta1", self.adam_beta1),
            options.beta_per_array(inputs, step, "adam_beta2", self.adam_beta2),
            options.number_per_array(inputs, step, "adam_epsilon", self.adam_epsilon),
            "moments",
            step.as_float,
        )

    def shapes_of(self, inputs: Parameters) -> MomentShapes:
        """The shapes of the moments; and where the matrices of each leaf are."""
        axes = matrix_axes.find(
            inputs, self.matrices, self.output_axes, self.layer_axes, self.mesh_axes
        )
        axes = split_leaves.with_blocks(inputs, axes, self.split)
        per_output = self.rule == "normuon"
        if inputs.has_buffers:
            packed_parts.check_whole(inputs, axes)
            vw = second_shapes(inputs.tree, axes, per_output=per_output)
        else:
            structure = trees.flatten(inputs.tree)[1]
            shape = functools.partial(second_shape, per_output=per_output)
            vw = structure.unflatten(map(shape, inputs.reference.leaves, axes))
        return MomentShapes(inputs.tree, vw, found=axes)


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


# ---- the method, on the arrays of one leaf -----------------------------------------------------


@jit_static_kwargs
def _mean_square(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """The mean of |x|^2 over the inputs, for each output of each matrix."""
    return jnp.mean(numerics.abs_squared(x), axis=axes.inputs, keepdims=True)


@jit_static_kwargs
def _normalized(x: jax.Array, vw: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """O' = O / (sqrt(v) + epsilon), rescaled to |O' |= |O|; 0 where O is"""

    def norm(x: jax.Array) -> jax.Array:
        return numerics.safe_sqrt(split_leaves.sums(numerics.abs_squared(x), axes))

    root = numerics.safe_sqrt(numerics.widen(vw, numerics.real_dtype(x)))
    new = x / (root + _NORMUON_EPSILON).astype(x.dtype)
    return numerics.scaled(new, numerics.safe_divide(norm(x), norm(new)))


# ---- the method, on lists of parts -------------------------------------------------------------


class _Parts:
    """The arrays of an update, taken apart where packed buffers hold matrices and others."""

    def __init__(self, inputs: Inputs, axes: Sequence[MatrixAxes | None], per_output: bool) -> None:
        """`axes` says where the matrices of each leaf are, and `per_output` what `vw` has."""
        self.inputs = inputs
        if inputs.has_buffers:
            self.parts = packed_parts.of_arrays(inputs.specs, axes, per_output=per_output)
        else:
            self.parts = list(map(Part, range(len(axes)), axes))

    def split(self, specs: Sequence[ArraySpec], arrays: list[Any], second: bool) -> list[Any]:
        """The parts of arrays, or of their second moments."""
        if not self.inputs.has_buffers:
            return arrays
        return packed_parts.split(self.parts, specs, arrays, second=second)

    def numbers_of_parts(self, x: Any) -> Any:
        """Numbers of each array as those of each part; or a tuple of them."""
        if isinstance(x, tuple):
            return type(x)(*map(self.numbers_of_parts, x))
        if not (self.inputs.has_buffers and isinstance(x, list)):
            return x
        return packed_parts.split_numbers(self.parts, self.inputs.specs, x)

    def join(
        self, specs: Sequence[ArraySpec], values: list[Any], like: list[Any], second: bool
    ) -> list[Any]:
        """The arrays from their parts."""
        if not self.inputs.has_buffers:
            return values
        return packed_parts.join(self.parts, specs, values, like, second=second)


class _MomentInParts:
    """A moment as a method sees it that computes with parts of arrays: one for each part."""

    def __init__(self, parts: _Parts, moment: Moment, *, second: bool = False) -> None:
        self._parts, self._moment, self._second = parts, moment, second
        old = parts.split(moment.specs, in_full_precision(moment.old), second)
        self.of_parts = Moment(old, commit=parts.inputs.commit, has_form=True)

    def joined(self, *new: NewMoments) -> NewMoments:
        """Arrays as they are stored, from the new moments of both kinds of parts."""
        exact = [y if x is None else x for x, y in zip(*(x.stored for x in new), strict=True)]
        moment = self._moment
        arrays = self._parts.join(moment.specs, exact, moment.old, self._second)
        return NewMoments(moment.rounded(arrays), exact)


@of_one_leaf
def _momentum(g: Any, mw: Moments, beta: BetaForms) -> jax.Array:
    return mw.write(rules.average, g, mw.old, beta.value, beta.complement)


@of_one_leaf
def _look_ahead(g: Any, mw: Moments, beta: BetaForms) -> jax.Array:
    m = mw.write(rules.average, g, mw.old, beta.value, beta.complement)
    return rules.average(g, m, beta.value, beta.complement)


def directions(inputs: Inputs, step: Step, muon: Muon) -> tuple[list[Any], NewMoments, NewMoments]:
    """The direction of each array, and the new moments."""
    name, is_normuon = inputs.function, muon.rule == "normuon"
    inputs.check_buffers()
    all_parts = _Parts(inputs, step.found, per_output=is_normuon)
    b = all_parts.numbers_of_parts(options.beta_per_array(inputs, step, "momentum", muon.momentum))
    adam = all_parts.numbers_of_parts(muon.adam(inputs, step))
    parts = all_parts.parts
    g = all_parts.split(inputs.specs, inputs.g, False)
    is_matrix = [part.matrices is not None for part in parts]
    g_of_matrices = [x if own else None for x, own in zip(g, is_matrix, strict=True)]
    g_of_others = [None if own else x for x, own in zip(g, is_matrix, strict=True)]
    mw, vw = _MomentInParts(all_parts, step.mw), _MomentInParts(all_parts, step.vw, second=True)

    rule = _look_ahead if muon.nesterov else _momentum
    ahead, mw_of_matrices = rule(g_of_matrices, mw.of_parts, b)
    of_others, mw_of_others, vw_of_others = adam_of.adam_of_leaf(
        g_of_others, mw.of_parts, vw.of_parts, adam
    )
    direction = [x and x[0] for x in of_others]
    new_mw = mw.joined(mw_of_matrices, mw_of_others)
    own = [i for i, x in enumerate(ahead) if x is not None]
    chosen = [parts[i] for i in own]
    found = _orthogonalized(name, chosen, [ahead[i] for i in own], muon)
    if inputs.notes is not None:
        join = functools.partial(all_parts.join, inputs.specs, like=inputs.g, second=False)
        whole = dict(zip(own, found, strict=True))
        residual.note(inputs, inputs.notes, step.found, parts, whole, g, join)

    means: list[Any] = [None] * len(parts)
    if is_normuon:
        for i, mean in zip(own, _mean_squares(chosen, found), strict=True):
            means[i] = parts[i].from_matrices(mean, vw.of_parts.old[i], per_output=True)
    bn = numbers.beta(name, "normuon_beta", muon.normuon_beta)
    averages, vw_of_matrices = _momentum(means, vw.of_parts, bn)
    new_vw = vw.joined(vw_of_matrices, vw_of_others)
    if is_normuon:
        found = _normalized_outputs(chosen, found, [averages[i] for i in own])

    factors = factors_of(name, muon.scale, [part.whole for part in chosen])
    for i, o in zip(own, apply(rules.scale_by, found, factors), strict=True):
        direction[i] = parts[i].from_matrices(o, g[i])
    return all_parts.join(inputs.specs, direction, inputs.g, False), new_mw, new_vw


def _orthogonalized(
    name: str, chosen: Sequence[Part], values: Sequence[Any], muon: Muon
) -> list[jax.Array]:
    return batches.orthogonalized(
        name,
        [part.to_matrices(x) for part, x in zip(chosen, values, strict=True)],
        [part.whole for part in chosen],
        coefficients=muon.coefficients,
        compute_dtype=muon.compute_dtype,
        shard_over=muon.shard_over,
    )


def _mean_squares(chosen: Sequence[Part], found: Sequence[jax.Array]) -> list[Any]:
    """The mean of |x|^2 over the inputs, for each output of each matrix."""
    pairs = zip(chosen, found, strict=True)
    return leafwise.run([(_of_axes(_mean_square, part.whole), (o,)) for part, o in pairs])


def _normalized_outputs(
    chosen: Sequence[Part], found: Sequence[jax.Array], vw: Sequence[Any]
) -> list[Any]:
    """Each output divided by the root of its mean square, averaged over steps."""
    rows = zip(chosen, found, vw, strict=True)
    return leafwise.run(
        [
            (_of_axes(_normalized, part.whole), (o, part.to_matrices(v, per_output=True)))
            for part, o, v in rows
        ]
    )


@functools.cache
def _of_axes(rule: Function, axes: MatrixAxes) -> Function:
    """One function object for each place of matrices, so that JAX's caches find it again."""
    return functools.partial(rule, axes=axes)
