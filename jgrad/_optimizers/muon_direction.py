"""Muon's direction: momentum, orthogonalized matrix by matrix; Adam's for all other elements."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.apply import Stored, apply
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import Mask
from jgrad._inputs.state import OptState
from jgrad._inputs.store import in_full_precision
from jgrad._inputs.update import Update
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._layers.matrix_axes import MatrixAxes, read_cuts, read_output_axes
from jgrad._layers.newton_schulz import Coefficients, check_compute_dtype, read_coefficients
from jgrad._optimizers import adam as adam_of
from jgrad._optimizers.adam import AdamNumbers
from jgrad._optimizers.muon_scale import Scale, ScaleFunction, factors_of, read_scale
from jgrad._packed import arrays, groups, parts as parts_of, seconds
from jgrad._packed.parts import Part
from jgrad._trees import trees, values
from jgrad._trees.trees import PyTree

MuonRule = Literal["muon", "normuon"]
# Of `output_axes`: -1, in a form that `optax.inject_hyperparams` does not make an array of.
LAST = (-1,)
# NorMuon's: added to the root of the mean square of each output, which is 1 / sqrt(inputs) or so.
_NORMUON_EPSILON = 1e-8


# ---- the method, on the arrays of one leaf -----------------------------------------------------


@jit_static_kwargs
def _mean_square(x: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """The mean of |x|^2 over the inputs, for each output of each matrix."""
    return jnp.mean(numerics.abs_squared(x), axis=axes.inputs, keepdims=True)


@jit_static_kwargs
def _normalized(x: jax.Array, vw: jax.Array, *, axes: MatrixAxes) -> jax.Array:
    """O' = O / (sqrt(v) + epsilon), rescaled to |O' |= |O|; 0 where O is"""

    def norm(x: jax.Array) -> jax.Array:
        squares = numerics.abs_squared(x)
        within = (*axes.outputs, *axes.inputs)
        return numerics.safe_sqrt(jnp.sum(squares, axis=within, keepdims=True))

    root = numerics.safe_sqrt(numerics.widen(vw, numerics.real_dtype(x)))
    new = x / (root + _NORMUON_EPSILON).astype(x.dtype)
    return numerics.scaled(new, numerics.safe_divide(norm(x), norm(new)))


# ---- the method, on lists of parts -------------------------------------------------------------


class MuonNumbers(NamedTuple):
    """The numbers and options of Muon's direction.

    Attributes:
      function: whose errors they are.
      momentum: decay rate of the average of gradients; one, or a list with one per part.
      nesterov: whether to look ahead.
      rule: "muon" or "normuon".
      scale: (outputs, inputs) -> factor.
      coefficients: of Newton-Schulz.
      compute_dtype: of what its products read; None for float32 or wider.
      share_over: mesh axes over which matrices are dealt out under `jit`.
    """

    function: str
    momentum: BetaForms
    nesterov: bool
    rule: MuonRule
    scale: ScaleFunction
    coefficients: Coefficients
    compute_dtype: np.dtype | None
    share_over: tuple[str, ...] = ()


# (new arrays, old arrays) -> the new ones as they are stored, or the old ones.
Keep = Callable[[list[Any], list[Any]], list[Any]]


def _always(new: list[Any], _: list[Any]) -> list[Any]:
    """Every update is committed."""
    return new


def directions(
    g: list[Any],
    mw: list[Any],
    vw: list[Any],
    parts: Sequence[Part],
    muon: MuonNumbers,
    adam: AdamNumbers,
    kept: Keep = _always,
) -> tuple[list[Any], list[Any], list[Any]]:
    """The direction and the new moments of each part; `kept` says what is committed."""
    is_matrix = [part.matrices is not None for part in parts]
    matrices = [x if use else None for x, use in zip(g, is_matrix, strict=True)]
    others = [None if use else x for x, use in zip(g, is_matrix, strict=True)]
    if not g:
        return [], [], []

    def store(new: list[Call | None], old: list[Any]) -> Stored:
        values = kept(leafwise.run(new), old)
        return Stored(values, values)

    both = adam_of.new_moments(others, mw, vw, adam, store=store)
    direction = adam_of.directions(*both, adam)
    other_mw, other_vw = (moment.written for moment in both)

    beta = muon.momentum
    new_mw = kept(apply(rules.average, matrices, mw, beta.value, beta.complement), mw)
    ahead = new_mw
    if muon.nesterov:
        ahead = apply(rules.average, matrices, new_mw, beta.value, beta.complement)
    own = [i for i, x in enumerate(ahead) if x is not None]
    cut = [x for i in own if (x := parts[i].matrices) is not None]
    axes = [x.whole for x in cut]
    found = groups.orthogonalized(
        muon.function,
        [x.gathered(parts[i].to_matrices(ahead[i])) for i, x in zip(own, cut, strict=True)],
        axes,
        coefficients=muon.coefficients,
        compute_dtype=muon.compute_dtype,
        share_over=muon.share_over,
    )
    new_vw = other_vw
    if muon.rule == "normuon":
        pairs = zip(own, cut, strict=True)
        old = [x.gathered(parts[i].to_outputs(vw[i]), per_output=True) for i, x in pairs]
        beta2 = BetaForms(*([x[i] for i in own] if isinstance(x, list) else x for x in adam.beta2))
        found, seconds = _normuon(found, old, axes, beta2, kept)
        for i, v, x in zip(own, seconds, cut, strict=True):
            new_vw[i] = parts[i].from_matrices(x.own_part(v, per_output=True), vw[i])
    found = [x.own_part(o) for o, x in zip(found, cut, strict=True)]
    factors = factors_of(muon.function, muon.scale, axes)
    for i, o in zip(own, apply(rules.scale_by, found, factors) if own else [], strict=True):
        direction[i] = parts[i].from_matrices(o, g[i])
    pairs_of_mw = zip(new_mw, other_mw, strict=True)
    return direction, [y if x is None else x for x, y in pairs_of_mw], new_vw


def _normuon(
    found: list[jax.Array],
    old: list[jax.Array],
    axes: Sequence[MatrixAxes],
    beta2: BetaForms,
    kept: Keep,
) -> tuple[list[Any], list[Any]]:
    """Each output divided by the root of its mean square, averaged over steps; and the averages."""
    if not found:
        return [], []
    pairs = zip(axes, found, strict=True)
    means = leafwise.run([(_of_axes(_mean_square, own), (o,)) for own, o in pairs])
    new = kept(apply(rules.average, means, old, beta2.value, beta2.complement), old)
    rows = zip(axes, found, new, strict=True)
    return leafwise.run([(_of_axes(_normalized, own), (o, v)) for own, o, v in rows]), new


@functools.cache
def _of_axes(rule: Function, axes: MatrixAxes) -> Function:
    """One function object for each place of matrices, so that JAX's caches find it again."""
    return functools.partial(rule, axes=axes)


# ---- options -----------------------------------------------------------------------------------


def check_matrices(name: str, matrices: Mask) -> None:
    """A choice of leaves, which has to be made."""
    if matrices is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes; shapes alone cannot tell"
        raise TypeError(f"{name}: `matrices`: None, expected {expected}; {remedy}.")
    if isinstance(matrices, jax.Array):
        expected = "a tree of Python's bools, or a function of the parameters' shapes"
        remedy = '`optax.inject_hyperparams` needs `static_args=("matrices",)`'
        raise TypeError(f"{name}: `matrices`: an array, expected {expected}; {remedy}.")


def check_rule(name: str, rule: MuonRule) -> None:
    """A rule that exists."""
    values.one_of(name, "rule", rule, ("muon", "normuon"))


class MuonOptions(NamedTuple):
    """The options of Muon's direction as a user gave them."""

    matrices: Mask
    momentum: Scalar | Callable[[jax.Array], Any]
    nesterov: bool
    scale: Scale
    coefficients: Any
    rule: MuonRule
    output_axes: PyTree
    layer_axes: PyTree
    norm_axes: PyTree
    share_over: str | tuple[str, ...] | None
    compute_dtype: DTypeLike | None
    beta1: Scalar
    beta2: Scalar
    adam_epsilon: Scalar

    def check(self, name: str) -> None:
        """What the factory can say already."""
        check_matrices(name, self.matrices)
        check_rule(name, self.rule)
        values.boolean(name, "nesterov", self.nesterov)
        if not trees.may_be_function(self.momentum):
            numbers.beta(name, "momentum", cast(Scalar, self.momentum))
        read_output_axes(name, self.output_axes)
        read_layer_axes(name, self.layer_axes)
        read_cuts(name, self.norm_axes)
        self.at(name, 0, self.momentum if not callable(self.momentum) else 0.0)

    def at(self, name: str, step: Any, momentum: Any) -> tuple[MuonNumbers, AdamNumbers]:
        """The numbers of one update; errors of the transformation `name` where they are wrong."""
        return (
            MuonNumbers(
                function=name,
                momentum=numbers.beta(name, "momentum", momentum),
                nesterov=self.nesterov,
                rule=self.rule,
                scale=read_scale(name, self.scale),
                coefficients=read_coefficients(name, self.coefficients),
                compute_dtype=check_compute_dtype(name, self.compute_dtype),
                share_over=()
                if self.share_over is None
                else values.axis_names(name, "share_over", self.share_over),
            ),
            AdamNumbers(
                step=jnp.asarray(step, dtype=float),
                beta1=numbers.beta(name, "beta1", self.beta1),
                beta2=numbers.beta(name, "beta2", self.beta2),
                epsilon=numbers.scalar(name, "adam_epsilon", self.adam_epsilon),
                bias_correction="moments",
            ),
        )

    def axes(self, inputs: Update) -> list[MatrixAxes | None]:
        """Where the matrices of each leaf are; none where there are no parameters."""
        if not inputs.g:
            return []
        return options.matrix_axes(
            inputs, self.matrices, self.output_axes, self.layer_axes, self.norm_axes
        )

    def second_shapes(self, inputs: Update) -> PyTree:
        """The shape of the second moments of each array."""
        return self._second_shapes(inputs, self.axes(inputs))

    def _second_shapes(self, inputs: Update, axes: list[MatrixAxes | None]) -> PyTree:
        per_output = self.rule == "normuon"
        return seconds.second_shapes(inputs.tree, axes, per_output=per_output)

    def from_state(
        self, inputs: Update, state: OptState
    ) -> tuple[list[Any], list[Any], list[Any], list[MatrixAxes | None]]:
        """The direction and the new moments of each array; and where the matrices are."""
        name, axes = inputs.function, self.axes(inputs)
        inputs.check_buffers()
        done = state.step - 1
        momentum = options.called(inputs, "momentum", self.momentum, lambda: done)
        muon, adam = self.at(name, state.step, momentum)
        parts = parts_of.of_arrays(inputs.specs, axes, per_output=self.rule == "normuon")
        specs = inputs.specs
        second = arrays.specs(self._second_shapes(inputs, axes))
        # Parts of arrays are computed in full precision, and whole arrays rounded.
        wide_mw, wide_vw = (in_full_precision(x) for x in (state.mw, state.vw))
        g, old = (parts_of.by_segment(specs, x) for x in (inputs.g, wide_mw))
        direction, mw, vw = directions(
            parts_of.taken(parts, g),
            parts_of.taken(parts, old),
            parts_of.seconds_taken(parts, parts_of.by_segment(second, wide_vw)),
            parts,
            muon,
            adam,
            kept=inputs.kept,
        )
        direction = parts_of.by_share(specs, parts_of.joined(parts, direction), inputs.g)
        mw = parts_of.by_share(specs, parts_of.joined(parts, mw), state.mw)
        vw = parts_of.by_share(second, parts_of.joined_seconds(parts, vw), state.vw)
        return (
            direction,
            inputs.store.in_form_of(mw, state.mw),
            inputs.store.of(second).in_form_of(vw, state.vw),
            axes,
        )
