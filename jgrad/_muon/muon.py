"""Muon: momentum, orthogonalized matrix by matrix, and AdamW for other leaves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Literal, NamedTuple

import jax

from jgrad._arithmetic import rules
from jgrad._inputs import kinds, numbers
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import Descent
from jgrad._inputs.matrix_options import (
    LAST,
    MatrixOptions,
    read_shard_over,
    with_shapes_of_matrices,
)
from jgrad._inputs.moment import Shapes, Step
from jgrad._inputs.transformation import MomentOptions, OptState, transformation
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._muon.directions import (
    MOMENTUM,
    Directions,
    MuonOptions,
    MuonRule,
    ScaleFunction,
    check_no_momentum,
    directions,
)
from jgrad._muon.newton_schulz import read_steps
from jgrad._optimizers import adam as adam_of
from jgrad._trees import checks, trees
from jgrad._trees.annotations import (
    ArrayAxes,
    ComputeDType,
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Number,
    Polynomials,
    Scalar,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import Leaf

Scale = Literal["original", "match_rms_adamw", "spectral"] | ScaleFunction | None

_SCALES: dict[str | None, ScaleFunction] = {
    "original": lambda out, into: math.sqrt(max(1.0, out / max(1, into))),
    "match_rms_adamw": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "spectral": lambda out, into: math.sqrt(out / max(1, into)),
    None: lambda out, into: 1.0,
}


# ---- what every method of matrices has, and Adam beside it ---------------------------------------


class MatrixDescent(NamedTuple):
    """Learning rates and decays of matrices, and of all other leaves where these have their own."""

    for_matrices: kinds.DescentOptions
    for_others: kinds.DescentOptions

    @classmethod
    def of(
        cls,
        for_matrices: kinds.DescentOptions,
        adam_learning_rate: LearningRate | None,
        adam_weight_decay: Number | None,
    ) -> MatrixDescent:
        """Of the arguments of a factory, by their usual names."""
        decay = dataclasses.replace(
            for_matrices.weight_decay,
            name="adam_weight_decay",
            value=adam_weight_decay,
            is_optional=True,
        )
        rate = kinds.Rate("adam_learning_rate", adam_learning_rate, is_optional=True)
        return cls(for_matrices, kinds.DescentOptions(rate, decay))

    def check(self, function: str) -> None:
        """What a factory can."""
        self.for_matrices.check(function)
        self.for_others.check(function)

    def updates(self, inputs: Inputs, step: Step, new: Directions) -> list[Leaf]:
        """Those of all arrays."""
        matrices, others = self.for_matrices, self.for_others
        rule = matrices.weight_decay.rule
        decays = _per_kind(inputs, step, matrices.weight_decay, others.weight_decay)
        rates = _per_kind(inputs, step, matrices.learning_rate, others.learning_rate)
        signs = new.signs if rule == "cautious" else None
        descent = Descent(rules.optional(decays, rule), rates, rule)
        return descent.updates(new.direction, inputs.w, signs)


def _per_kind(
    inputs: Inputs,
    step: Step,
    for_matrices: kinds.Rate | kinds.Decay,
    for_others: kinds.Rate | kinds.Decay,
) -> list[Leaf]:
    """An option for each array: that of matrices, or Adam's, if it has its own."""
    entries = for_matrices.leaf_values(inputs, step)
    if for_others.is_given(step):
        pairs = enumerate(zip(entries, for_others.leaf_values(inputs, step), strict=True))
        entries = [x if i in step.matrices else y for i, (x, y) in pairs]
    return inputs.per_array(entries)


# ---- options -----------------------------------------------------------------------------------


def read_scale(function: str, scale: Scale) -> ScaleFunction:
    """The function of (outputs, inputs)."""
    if not callable(scale):
        checks.one_of(function, "scale", scale, _SCALES)
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


def read_fraction(function: str, fraction: Any) -> float | None:
    """That of the rows which an update takes; None for all of them."""
    if fraction is None:
        return None
    fraction = numbers.as_python_number(fraction)
    if isinstance(fraction, jax.Array) or not checks.is_number(fraction):
        expected = "None or a number of Python in (0, 1]"
        remedy = f"; {checks.INJECTED}" * isinstance(fraction, jax.Array)
        came = checks.describe(fraction)
        raise TypeError(f"{function}: `fraction`: {came}, expected {expected}{remedy}.")
    if not 0 < fraction <= 1:
        raise ValueError(f"{function}: `fraction`: {fraction}, expected a number in (0, 1].")
    return None if fraction == 1 else float(fraction)


def _muon(
    name: str,
    muon: MuonOptions,
    moments: MomentOptions,
    descent: MatrixDescent | None = None,
) -> Transformation[OptState]:
    checks.one_of(name, "rule", muon.rule, ("muon", "normuon"))
    checks.boolean(name, "nesterov", muon.nesterov)
    muon.momentum.check(name)
    numbers.beta(name, "normuon_beta", muon.normuon_beta)
    muon.error_decay.check(name)
    muon.adam.check(name)
    if descent is not None:
        descent.check(name)
    muon.matrices.check(name)
    if muon.fraction is not None:
        check_no_momentum(name, muon.fraction, muon.momentum.value)

    def compute(inputs: Inputs, step: Step) -> tuple[list[Leaf], list[Leaf], list[Leaf]]:
        new = directions(inputs, step, muon)
        updates = new.direction if descent is None else descent.updates(inputs, step, new)
        return updates, new.mw, new.vw

    shapes_of = functools.partial(_shapes, muon=muon)
    return transformation(name, compute, shapes_of=shapes_of, moments=moments)


def _shapes(inputs: Parameters, muon: MuonOptions) -> Shapes:
    """The shapes of the moments; and where the matrices of each leaf are.

    Second ones are those of all leaves but matrices; in NorMuon, one number per output of these.
    """
    matrices = muon.matrices.find(inputs)

    def second_shape(x: jax.Array, axes: MatrixAxes) -> jax.ShapeDtypeStruct | None:
        return None if muon.rule == "muon" else jax.ShapeDtypeStruct(axes.per_output, x.dtype)

    vw = with_shapes_of_matrices(inputs, matrices, second_shape)
    return Shapes({"mw": inputs.tree, "vw": vw}, matrices)


# ---- transformations ----------------------------------------------------------------------------


@explained
def muon(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    momentum: Number = MOMENTUM,
    nesterov: bool = True,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    scale: Scale = "original",
    coefficients: Polynomials = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
    fraction: float | None = None,
    error_decay: Number = 0.95,
    output_axes: ArrayAxes = LAST,
    split: ArrayAxes = None,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    shard_over: str | tuple[str, ...] | None = None,
    compute_dtype: ComputeDType = None,
    adam_learning_rate: LearningRate | None = None,
    adam_beta1: Number = 0.9,
    adam_beta2: Number = 0.95,
    adam_epsilon: Number = 1e-8,
    adam_weight_decay: Number | None = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Muon for matrices, AdamW for all other leaves.

        m'  = momentum m + (1 - momentum) g
        d   = momentum m' + (1 - momentum) g          (without nesterov: m')
        X   = d / |d|, then for each (a, b, c):  A = X X^T;  X = a X + (b A + c A A) X
        w'  = w - learning_rate (s X + weight_decay w),  s = sqrt(max(1, outputs / inputs))

    where |.| is the 2-norm of a matrix, computed without overflow or underflow, and X = 0 where d =
    0, without any epsilon. X approximates the nearest orthogonal matrix, so its singular values are
    all close to 1. Matrices of equal shape are iterated on together.

    Args:
      learning_rate: for matrices. A number in [0, inf), an array, or a schedule, which is a
        function of the number of completed updates (0 for the first); or a prefix tree or `by_path`
        of these. `update(..., learning_rate=x)` overrides it for one call; the other numeric
        options can be overridden in the same way.
      matrices: which leaves are matrices: a prefix tree of bools, or a function that returns one
        from the parameters' `jax.ShapeDtypeStruct`s. Required, because embeddings and heads should
        be left to Adam and shapes don't tell them apart. `hidden_matrices()` chooses by names and
        shapes.
      momentum: in [0, 1): a number, a schedule, or a tree of these.
      nesterov: whether to look ahead, as Nesterov's momentum does.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It does not enter the
        momentum, and is not multiplied by s.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay, whether they are matrices
        or not.
      weight_decay_rule: for matrices and other leaves. "decoupled" as above. "cautious" decays only
        the weights that the step moves towards zero, where Re(X conj(w)) > 0, and for other leaves
        as in `adam`. "independent": w' = w - learning_rate s X - weight_decay w, with a weight
        decay in [0, 1) that acts even when the learning rate is 0.
      scale: the factor s. "original" as above; "match_rms_adamw" is 0.2 sqrt(max(outputs, inputs)),
        which lets you reuse AdamW's learning rates and weight decays; "spectral" is sqrt(outputs /
        inputs); None is 1; or a function of (outputs, inputs).
      coefficients: "jordan", "you", "polar_express" or "deepseek_v4", or a sequence of triples, one
        per step of the iteration.
      rule: "muon", or "normuon", which divides each output of X by its root mean square, with
        squares averaged over updates, and then restores |X|.
      normuon_beta: decay rate of that average, in [0, 1).
      fraction: the fraction of a matrix's rows that each update uses, in (0, 1]; None for all.
        Below 1, m' = m + g and d = m', so `nesterov` has no effect and `momentum` raises an error.
        Rows run along the shorter side of a matrix, or along the outputs in NorMuon. An update uses
        the ceil(fraction side) rows with the largest 1-norms; in the others, X is 0 and m' keeps
        accumulating. Weight decay acts on all rows or, with the "cautious" rule, on those that are
        used. s is that of the whole matrix.
      error_decay: with `fraction`, the factor by which m' is multiplied in rows that were used, in
        [0, 1): a number, a schedule, or a tree of these.
      output_axes: which axes of a leaf are outputs: an int, a tuple of ints, or a prefix tree of
        these. The default, the last axis, fits flax and haiku; use 0 for equinox and PyTorch. All
        other axes except `layer_axes` are inputs, so the kernel of a convolution is one matrix.
      split: how to split the outputs of a fused leaf, such as queries, keys and values in one
        array, into separate matrices, each with its own s. A tuple of sizes, such as (512, 128,
        128); an int if all have one size, such as that of a head; None for one matrix; or a prefix
        tree or `by_path` of these. If there are several output axes, they are flattened in
        row-major order. `split` doesn't affect the state, so you can change it in the middle of a
        run.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map`, each device gathers
        sharded matrices and keeps its own part of the result. A matrix needs a PartitionSpec there,
        unless JAX knows that it is not sharded, as it does for replicated parameters with
        `check_vma=True`. Under `jit` on a mesh with automatic axes, it tells `shard_over` how
        leaves are sharded.
      layer_axes: axes along which a leaf stacks matrices, such as layers for `lax.scan`, experts or
        heads: an int, a tuple of ints, None, or a prefix tree of these.
      shard_over: under `jit`, a mesh axis or a tuple of axes. Matrices of the same shape are
        distributed over these, so that each device orthogonalizes some of them without
        communication between iterations. The mesh is that of the leaves or of `jax.set_mesh`. With
        `mesh_axes`, and on meshes with explicit axes, matrices are also distributed over the other
        axes over which they are sharded, by one all-to-all before and one after. Otherwise XLA may
        gather them along those axes.
      compute_dtype: dtype to which the factors of matrix products are rounded, such as bfloat16;
        everything else is in float32. None for float32, with JAX's default precision of products.
      adam_learning_rate: learning rate of all other leaves. None uses `learning_rate`, but only
        with "match_rms_adamw", because learning rates for the other scales are far too large for
        Adam, or if there are no other leaves (`matrices=True`).
      adam_beta1: decay rate of Adam's first moment, in [0, 1): a number, a schedule, or a tree of
        these.
      adam_beta2: decay rate of Adam's second moment, in [0, 1): a number, a schedule, or a tree of
        these.
      adam_epsilon: added to the root of Adam's second moment, in [0, inf): a number, a schedule, or
        a tree of these.
      adam_weight_decay: weight decay of all other leaves; None for `weight_decay`.
      moment_dtype: dtype of the moments. None uses the parameter's dtype, but at least float32;
        "8bit" stores `Blocks`, as in `adam`. NorMuon's averages stay in float32, along with any
        other second moments in the same packed buffer.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s.

    Returns:
      A transformation with state `OptState(step, mw, vw)`. In `vw`, matrices have None or, with
      NorMuon, one number per output, in the shape of the leaf with size 1 for inputs.

    Raises:
      ValueError: a Python number is out of range, a name is unknown, or `adam_learning_rate` is
        missing.
      TypeError: an option has the wrong type, or `matrices` is missing.

    Example:
      >>> params = grads = {"embed": jnp.ones((9, 3)), "w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.muon(0.02, matrices=jgrad.hidden_matrices(), adam_learning_rate=3e-4)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> jax.tree.map(jnp.shape, state.vw)
      {'b': (2,), 'embed': (9, 3), 'w': None}

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and
      `muon.py` there; "match_rms_adamw": Liu et al., "Muon is Scalable for LLM Training" (2025),
      section 2.2; Li et al., "NorMuon" (2025), algorithm 1; Amsel et al., "The Polar Express"
      (2025), algorithm 1; `fraction`: Ahn et al., "Dion2" (2025, arXiv 2512.16928), algorithm 1,
      and "Dion3" in `dion` with `selection_scope="global"`; `split`: "Muon Split" of "GLM-5" (2026,
      arXiv 2602.15763), and `split_sizes` in `dion`.
    """
    name = "muon"
    options = MuonOptions(
        matrices=MatrixOptions(matrices, output_axes, split, layer_axes, mesh_axes),
        momentum=kinds.Beta("momentum", momentum),
        nesterov=nesterov,
        scale=read_scale(name, scale),
        steps=read_steps(name, coefficients, compute_dtype),
        rule=rule,
        normuon_beta=normuon_beta,
        fraction=read_fraction(name, fraction),
        error_decay=kinds.Beta("error_decay", error_decay),
        shard_over=read_shard_over(name, shard_over),
        adam=adam_of.AdamOptions.of(
            adam_beta1, adam_beta2, adam_epsilon, "moments", prefix="adam_"
        ),
    )
    moments = MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes)
    descent = MatrixDescent.of(
        kinds.DescentOptions.of(learning_rate, weight_decay, weight_decay_mask, weight_decay_rule),
        adam_learning_rate,
        adam_weight_decay,
    )
    tx = _muon(name, options, moments, descent)
    chosen = jax.tree.leaves(matrices, is_leaf=trees.is_leaf)
    is_for_all = bool(chosen) and all(x is True for x in chosen)
    if adam_learning_rate is None and scale != "match_rms_adamw" and not is_for_all:
        expected = "a learning rate for the leaves that are not in `matrices`, such as 3e-4"
        remedy = 'or `scale="match_rms_adamw"`, with which one learning rate fits both'
        raise ValueError(f"{name}: `adam_learning_rate`: None, expected {expected}; {remedy}.")
    return tx


@explained
def scale_by_muon(
    *,
    matrices: Mask,
    momentum: Number = MOMENTUM,
    nesterov: bool = True,
    scale: Scale = "original",
    coefficients: Polynomials = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
    fraction: float | None = None,
    error_decay: Number = 0.95,
    output_axes: ArrayAxes = LAST,
    split: ArrayAxes = None,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    shard_over: str | tuple[str, ...] | None = None,
    compute_dtype: ComputeDType = None,
    adam_beta1: Number = 0.9,
    adam_beta2: Number = 0.95,
    adam_epsilon: Number = 1e-8,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[OptState]:
    """Muon's direction for `optax.chain`, without learning rates, minus sign or weight decay.

        updates = s X for matrices, Adam's direction for all other leaves

    Unless the scale is "match_rms_adamw", matrices and other leaves need different learning rates.

    Args:
      As `muon`, without the learning rates and without weight decay and its options.

    Returns:
      A transformation with state `OptState(step, mw, vw)`, as in `muon`.

    Raises:
      As `muon`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> direction = jgrad.scale_by_muon(matrices={"w": True, "b": False}, scale="match_rms_adamw")
      >>> tx = optax.chain(direction, optax.scale(-1e-3))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> jax.tree.map(jnp.shape, updates)
      {'b': (2,), 'w': (3, 2)}

    Source: as `muon`.
    """
    name = "scale_by_muon"
    options = MuonOptions(
        matrices=MatrixOptions(matrices, output_axes, split, layer_axes, mesh_axes),
        momentum=kinds.Beta("momentum", momentum),
        nesterov=nesterov,
        scale=read_scale(name, scale),
        steps=read_steps(name, coefficients, compute_dtype),
        rule=rule,
        normuon_beta=normuon_beta,
        fraction=read_fraction(name, fraction),
        error_decay=kinds.Beta("error_decay", error_decay),
        shard_over=read_shard_over(name, shard_over),
        adam=adam_of.AdamOptions.of(
            adam_beta1, adam_beta2, adam_epsilon, "moments", prefix="adam_"
        ),
    )
    moments = MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes)
    return _muon(name, options, moments)
