"""Muon: momentum, orthogonalized matrix by matrix; all other elements are AdamW's."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import matrix_axes, numbers, options
from jgrad._inputs.aligned import Role
from jgrad._inputs.factory import FORM, MATRICES, Arguments, Given, Options, checked, one_of
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import Descent, average, of_one_leaf
from jgrad._inputs.matrix_axes import LAST, Array, MatrixAxes
from jgrad._inputs.moment import Moment, MomentShapes, NewMoments, Step, in_full_precision
from jgrad._inputs.moment_options import MomentDType
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import DecayRule, LearningRate, Mask, Number
from jgrad._inputs.transformation import transformation
from jgrad._kernels.moment import Moments
from jgrad._muon import normuon, orthogonalize
from jgrad._muon.newton_schulz import Coefficients, check_compute_dtype, read_coefficients
from jgrad._muon.parts import Part, Parts, PerArray, PerLeaf, PerPart, second_shapes
from jgrad._optimizers import adam as adam_of
from jgrad._trees import checks, needs, trees, values
from jgrad._trees.made_by import Transformation
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree

MuonRule = Literal["muon", "normuon"]
ScaleFunction = Callable[[int, int], Any]  # of outputs and inputs
Scale = str | ScaleFunction | None
_MOMENTUM = 0.95

_SCALES: dict[str | None, ScaleFunction] = {
    "original": lambda out, into: math.sqrt(max(1.0, out / max(1, into))),
    "match_rms_adamw": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "spectral": lambda out, into: math.sqrt(out / max(1, into)),
    None: lambda out, into: 1.0,
}


# ---- options -----------------------------------------------------------------------------------


class Muon(NamedTuple):
    """The options of Muon's direction; `muon` explains each of them.

    Attributes:
      given: those that are numbers are read from here in each update.
    """

    given: Given
    matrices: Mask
    nesterov: bool
    scale: ScaleFunction
    coefficients: Coefficients
    rule: MuonRule
    output_axes: PyTree
    split: PyTree
    mesh_axes: PyTree
    layer_axes: PyTree
    shard_over: tuple[str, ...]
    compute_dtype: np.dtype | None
    normuon_beta: Scalar
    fraction: float | None

    @classmethod
    def of(cls, name: str, given: Given) -> "Muon":
        """What a factory was given, with names as what they stand for."""
        arguments = given.arguments
        muon = cls(given, *(arguments[field] for field in cls._fields[1:]))
        check_matrices(name, muon.matrices)
        over = muon.shard_over
        return muon._replace(
            scale=read_scale(name, muon.scale),
            coefficients=read_coefficients(name, muon.coefficients),
            compute_dtype=check_compute_dtype(name, muon.compute_dtype),
            shard_over=() if over is None else values.axis_names(name, "shard_over", over),
            fraction=_read_fraction(name, given.arguments),
        )

    @property
    def of_newton_schulz(self) -> dict[str, Any]:
        """Keyword arguments of `orthogonalize.orthogonalized`."""
        names = "coefficients", "compute_dtype", "shard_over"
        return {name: getattr(self, name) for name in names}

    @property
    def is_normuon(self) -> bool:
        """Whether matrices have second moments: one number per output."""
        return self.rule == "normuon"

    def shapes_of(self, inputs: Parameters) -> MomentShapes:
        """The shapes of the moments; and where the matrices of each leaf are."""
        axes = self.output_axes, self.layer_axes, self.mesh_axes, self.split
        matrices = matrix_axes.find(inputs, self.matrices, *axes)
        vw = second_shapes(inputs, matrices, per_output=self.is_normuon)
        return MomentShapes(inputs.tree, vw, matrices)


# What a factory checks, and reads in its own way.
_DIRECTION = Options(
    matrices=Role.MASK,
    rule=one_of("muon", "normuon"),
    nesterov=Role.FLAG,
    momentum=Role.BETA,
    **MATRICES,
    normuon_beta=numbers.beta,
    fraction=None,
    error_decay=Role.BETA,
    **{f"adam_{name}": role for name, role in adam_of.NUMBERS.items()},
    **dict.fromkeys(("scale", "coefficients", "shard_over", "compute_dtype")),
    **FORM,
)
_OPTIONS = Options(
    **_DIRECTION.kinds,
    learning_rate=checked(numbers.number),
    adam_learning_rate=checked(numbers.number, optional=True),
    **dict.fromkeys(("weight_decay", "adam_weight_decay", "weight_decay_rule")),
    weight_decay_mask=Role.MASK,
)


def check_matrices(name: str, matrices: Mask) -> None:
    """A choice of leaves, which has to be made."""
    if matrices is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes; shapes alone cannot tell"
        raise TypeError(f"{name}: `matrices`: None, expected {expected}; {remedy}.")


def _read_fraction(function: str, arguments: Arguments) -> float | None:
    """That of the rows which an update takes; None for all of them."""
    fraction = arguments["fraction"]
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
    if fraction == 1:
        return None
    _check_no_momentum(function, fraction, arguments["momentum"])
    return float(fraction)


def _check_no_momentum(function: str, fraction: float, momentum: Any) -> None:
    """Only the default, or what `optax.inject_hyperparams` makes of it."""
    momentum = numbers.as_python_number(momentum)
    if momentum is None or isinstance(momentum, jax.Array) or momentum == _MOMENTUM:
        return
    came = momentum if checks.is_number(momentum) else checks.describe(momentum)
    expected = f"none with `fraction={fraction}`, where gradients are summed; `error_decay` is the"
    raise ValueError(f"{function}: `momentum`: {came}, expected {expected} decay of the sum.")


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


def directions(inputs: Inputs, step: Step, muon: Muon) -> Directions:
    """The direction of each array, and the new moments."""
    inputs.check_buffers()
    parts = Parts(inputs, step.matrices, per_output=muon.is_normuon)
    mw, vw = parts.moment(step.mw), parts.moment(step.vw, second=True)
    g = list(zip(parts.split(inputs.g), parts.all, strict=True))
    g_of_matrices = [x if part.matrices else None for x, part in g]
    g_of_others = [None if part.matrices else x for x, part in g]

    of_update = muon.given.read(inputs, step)
    if muon.fraction is not None:
        _check_no_momentum(inputs.function, muon.fraction, step.numbers.get("momentum"))
    elif (decay := step.numbers.get("error_decay")) is not None:
        no_fraction = "without `fraction`"
        needs.refuse_without_effect(inputs.function, "error_decay", decay, None, no_fraction)
    axes = [
        None if x is None else part.axes.whole
        for part, x in zip(parts.all, g_of_matrices, strict=True)
    ]
    function = _of_all_rows if muon.fraction is None else _of_some_rows
    x, is_taken, mw_of_matrices = function(inputs, muon, parts, g_of_matrices, axes, mw, of_update)
    vw_of_matrices = []
    if muon.is_normuon:
        beta = numbers.beta(inputs.function, "normuon_beta", muon.normuon_beta)
        x, new = normuon.with_equal_outputs(parts, x, is_taken, axes, vw, beta)
        vw_of_matrices.append(new)
    x = leafwise.apply(rules.scale_by, x, factors_of(inputs.function, muon.scale, axes))

    n = of_update.adam_beta1, of_update.adam_beta2, of_update.adam_epsilon
    n = parts.numbers(adam_of.numbers_of(*n, "moments", step.as_float))
    both, mw_of_others, vw_of_others = adam_of.adam_of_leaf(g_of_others, mw, vw, n)
    others, like = ([pair and pair[k] for pair in both] for k in (0, 1))
    x = parts.map(Part.from_matrices, x)
    direction = [other if o is None else o for o, other in zip(x, others, strict=True)]
    return Directions(
        parts.join(direction, inputs.g),
        parts.stored(step.mw, mw_of_matrices, mw_of_others),
        parts.stored(step.vw, *vw_of_matrices, vw_of_others, second=True),
        like if len(parts.all) == len(inputs.specs) else None,
    )


def _of_all_rows(
    inputs: Inputs,
    muon: Muon,
    parts: Parts,
    g: PerPart[Array],
    axes: PerPart[MatrixAxes | None],
    mw: Moment,
    of_update: Any,
) -> tuple[PerPart[Array], PerPart[Array], NewMoments]:
    """Averages of gradients, orthogonalized; nothing for rows that wait; the new moments."""
    momentum = _look_ahead if muon.nesterov else average
    m, new = momentum(g, mw, parts.numbers(of_update.momentum))
    options = muon.of_newton_schulz
    matrices = parts.map(Part.to_matrices, m)
    x = orthogonalize.orthogonalized(inputs.function, matrices, axes, **options)
    return x, [None] * len(x), new


def _of_some_rows(
    inputs: Inputs,
    muon: Muon,
    parts: Parts,
    g: PerPart[Array],
    axes: PerPart[MatrixAxes | None],
    mw: Moment,
    of_update: Any,
) -> tuple[PerPart[Array], PerPart[Array], NewMoments]:
    """Rows of sums of gradients, orthogonalized; which they are; the sums, which decay there."""
    assert muon.fraction is not None
    old = [None if x is None else y for x, y in zip(g, mw.old, strict=True)]
    sums = leafwise.apply(rules.add_scaled, g, in_full_precision(old))
    x, is_taken = orthogonalize.orthogonalized_rows(
        inputs.function,
        parts.map(Part.to_matrices, sums),
        axes,
        fraction=muon.fraction,
        of_outputs=muon.is_normuon,
        **muon.of_newton_schulz,
    )
    of_parts = parts.map(Part.from_matrices, is_taken)
    decay = parts.numbers(of_update.error_decay).value
    _, new = _stored(leafwise.apply(_decayed_rows, sums, of_parts, decay), mw)
    return x, is_taken, new


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


# ---- transformations ----------------------------------------------------------------------------


@explained
def muon(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    momentum: Number = _MOMENTUM,
    nesterov: bool = True,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask = None,
    weight_decay_rule: DecayRule = "decoupled",
    scale: Scale = "original",
    coefficients: Any = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
    fraction: float | None = None,
    error_decay: Number = 0.95,
    output_axes: PyTree = LAST,
    split: PyTree = None,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
    shard_over: str | tuple[str, ...] | None = None,
    compute_dtype: DTypeLike | None = None,
    adam_learning_rate: LearningRate | None = None,
    adam_beta1: Number = 0.9,
    adam_beta2: Number = 0.95,
    adam_epsilon: Number = 1e-8,
    adam_weight_decay: Number | None = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask = None,
) -> Transformation:
    """Muon for matrices, AdamW for all other leaves.

        m'  = momentum m + (1 - momentum) g
        d   = momentum m' + (1 - momentum) g          (without nesterov: m')
        X   = d / |d|, then for each (a, b, c):  A = X X^T;  X = a X + (b A + c A A) X
        w'  = w - learning_rate (s X + weight_decay w),  s = sqrt(max(1, outputs / inputs))

    with |.| the 2-norm of a matrix, computed without overflow or underflow, and X = 0 where d = 0.
    There is no epsilon. X approximates the nearest orthogonal matrix: its singular values are all
    close to 1. Matrices of equal shape are worked on together.

    Args:
      learning_rate: of matrices. A number in [0, inf), an array, or a schedule, which is a function
        of the number of updates done (0 at the first); or a prefix tree or `by_path` of those.
        `update(..., learning_rate=x)` overrides it for one call, and so do the names of the other
        numbers.
      matrices: which leaves are matrices: a prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one. Required, since shapes cannot tell: embeddings and
        heads are Adam's. `hidden_matrices()` chooses by names and shapes.
      momentum: in [0, 1): a number, a schedule, or a tree of those.
      nesterov: whether to look ahead, as Nesterov's momentum does.
      weight_decay: in [0, inf): a number, a schedule, or a tree of those. Decoupled, and not scaled
        by s.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False have no weight decay, whether
        they are matrices or not.
      weight_decay_rule: of both kinds. "decoupled" as above. "cautious": only weights that the step
        moves towards zero decay, those where Re(X conj(w)) > 0, or that of Adam's direction, as in
        `adam`. "independent": w' = w - learning_rate s X - weight_decay w, with a weight decay in
        [0, 1), which acts even at a learning rate of 0.
      scale: s. "original" as above; "match_rms_adamw" is 0.2 sqrt(max(outputs, inputs)), with which
        AdamW's learning rates and weight decays fit; "spectral" is sqrt(outputs / inputs); None is
        1; or a function of (outputs, inputs).
      coefficients: "jordan", "you", "polar_express" or "deepseek_v4", or a sequence of triples, one
        for each step.
      rule: "muon"; or "normuon", which divides each output of X by the root of its mean square,
        averaged over updates, and keeps |X|.
      normuon_beta: decay rate of that average, in [0, 1).
      fraction: of the rows of a matrix, the part that an update uses, in (0, 1]; None for all.
        Below 1, m' = m + g is a sum, without `momentum` and `nesterov`: `momentum` is an error, and
        d = m'. Rows lie along the shorter side of a matrix, in NorMuon along the outputs. An update
        uses the ceil(fraction side) rows with the largest 1-norms; X is 0 in the others, which
        wait. Weight decay acts on all rows; with the "cautious" rule, on those that are used. s is
        that of the whole matrix.
      error_decay: with `fraction`, what is left of m' in rows that were used, in [0, 1); a schedule
        or a tree, as `momentum`.
      output_axes: which axes of a leaf are outputs: an int or a tuple of ints, or a prefix tree of
        those. The last, as in flax and haiku; 0 in equinox and PyTorch. What is neither an output
        nor in `layer_axes` is input, so that the kernel of a convolution is one matrix.
      split: of fused leaves, such as queries, keys and values in one: blocks of outputs that are
        matrices of their own, each with its own s. A tuple of their sizes, such as (512, 128, 128);
        an int, the size of all, such as that of a head; None for one matrix; or a prefix tree or
        `by_path` of those. Outputs of several axes are flattened, and the last axis counts fastest.
        The state is as without, so that `split` may be changed in a run.
      mesh_axes: inside `shard_map`, the PartitionSpec of each leaf, or a prefix tree of those: a
        matrix of which a device has a part is gathered, and the part of the result kept. None is
        an error there where JAX does not know that a leaf is whole, as it does for replicated
        parameters with `check_vma=True`. Under `jit` on a mesh with automatic axes it says how
        leaves are sharded, for `shard_over`.
      layer_axes: axes of a leaf with a matrix for each index: layers for `lax.scan`, experts,
        heads. An int, a tuple of ints, or None, or a prefix tree of those.
      shard_over: under `jit`, a mesh axis or a tuple of axes over which the matrices of a shape are
        dealt out, so that each device iterates over some of them and no iteration waits for
        another device. The mesh is that of the leaves, or that of `jax.set_mesh`. With `mesh_axes`,
        and on meshes with explicit axes, a matrix is dealt out over the other axes over which it is
        sharded, too: an all-to-all there and one back. Without, XLA may gather it along those.
      compute_dtype: dtype to which factors of matrix products are rounded, such as bfloat16; sums
        and all else are in float32. None for float32, in JAX's default precision of products.
      adam_learning_rate: of all other leaves, as `learning_rate`. None for the same, but only with
        "match_rms_adamw", since learning rates for the other scales are far too large for Adam, or
        where there are none: `matrices=True`.
      adam_beta1: decay rate of Adam's first moment, in [0, 1): a number, a schedule, or a tree of
        those.
      adam_beta2: decay rate of Adam's second moment, in [0, 1): a number, a schedule, or a tree of
        those.
      adam_epsilon: added to the root of Adam's second moment, in [0, inf): a number, a schedule, or
        a tree of those.
      adam_weight_decay: of all other leaves; None for `weight_decay`.
      moment_dtype: dtype of the moments; None for the parameter's, but at least float32; "8bit" for
        `Blocks`, as in `adam`. NorMuon's numbers per output stay in float32, and so do the other
        second moments in a packed buffer that has some.
      full_precision: with "8bit", leaves that are not stored in 8 bits: a prefix tree of bools, or
        a function of the parameters' `jax.ShapeDtypeStruct`s that returns one.

    Returns:
      A transformation with state `OptState(step, mw, vw)`. `vw` has None for matrices; in NorMuon
      one number per output, of the leaf's shape with inputs of size 1.

    Raises:
      ValueError: a Python number out of range, an unknown name, or no `adam_learning_rate`.
      TypeError: an option of the wrong kind, or no `matrices`.

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
      and "Dion3" of `dion` with `selection_scope="global"`; heads apart: "GLM-5" (2026, arXiv
      2602.15763), "Muon Split"; sizes: `split_sizes` of `dion`.
    """
    name, given = "muon", _OPTIONS.check("muon", locals())
    method = Muon.of(name, given)
    options.check_decays(name, weight_decay_rule, weight_decay=weight_decay)
    if adam_weight_decay is not None:
        options.check_decays(name, weight_decay_rule, adam_weight_decay=adam_weight_decay)
    chosen = jax.tree.leaves(matrices, is_leaf=trees.is_leaf)
    is_for_all = bool(chosen) and all(x is True for x in chosen)
    if adam_learning_rate is None and scale != "match_rms_adamw" and not is_for_all:
        expected = "a learning rate for the leaves that are not in `matrices`, such as 3e-4"
        remedy = 'or `scale="match_rms_adamw"`, with which one learning rate fits both'
        raise ValueError(f"{name}: `adam_learning_rate`: None, expected {expected}; {remedy}.")

    def compute(inputs: Inputs, step: Step) -> tuple[PerArray[Array], NewMoments, NewMoments]:
        new = directions(inputs, step, method)
        use = options.mask(inputs, "weight_decay_mask", weight_decay_mask)
        decays = of_both_kinds(
            "weight_decay",
            (weight_decay, adam_weight_decay),
            lambda name, x: options.decay_of_leaves(inputs, name, x, use, step, weight_decay_rule),
            step,
        )
        rates = of_both_kinds(
            "learning_rate",
            (learning_rate, adam_learning_rate),
            lambda name, x: options.rate_of_leaves(inputs, name, x, step),
            step,
        )
        decay = rules.optional(inputs.per_array(decays), weight_decay_rule)
        descent = Descent(decay, inputs.per_array(rates), weight_decay_rule)
        signs = new.signs if weight_decay_rule == "cautious" else None
        return descent.updates(new.direction, inputs.w, signs), new.mw, new.vw

    moments = given.moments(layer_axes=layer_axes)
    return transformation(name, compute, shapes_of=method.shapes_of, moments=moments)


def of_both_kinds(
    name: str,
    options_of: tuple[PyTree, PyTree],
    read: Callable[[str, PyTree], PerLeaf[Any]],
    step: Step,
) -> PerLeaf[Any]:
    """An option for each leaf: that of matrices, or Adam's, which is the same unless it is given.

    Args:
      name: of that of matrices.
      options_of: of matrices, and of Adam.
      read: (name, option) -> an entry for each leaf.
      step: of the update, which may have another option of Adam.
    """
    of_matrices = read(name, options_of[0])
    if options_of[1] is None and step.numbers.get(f"adam_{name}") is None:
        return of_matrices
    of_adam = read(f"adam_{name}", options_of[1])
    columns = zip(of_matrices, of_adam, step.matrices, strict=True)
    return [y if axes is None else x for x, y, axes in columns]


@explained
def scale_by_muon(
    *,
    matrices: Mask,
    momentum: Number = _MOMENTUM,
    nesterov: bool = True,
    scale: Scale = "original",
    coefficients: Any = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
    fraction: float | None = None,
    error_decay: Number = 0.95,
    output_axes: PyTree = LAST,
    split: PyTree = None,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
    shard_over: str | tuple[str, ...] | None = None,
    compute_dtype: DTypeLike | None = None,
    adam_beta1: Number = 0.9,
    adam_beta2: Number = 0.95,
    adam_epsilon: Number = 1e-8,
    moment_dtype: MomentDType = None,
    full_precision: Mask = None,
) -> Transformation:
    """Muon's direction for `optax.chain`: no learning rates, no minus sign and no weight decay.

        updates = s X for matrices, Adam's direction for all other leaves

    With a scale other than "match_rms_adamw", the two kinds need different learning rates.

    Args:
      matrices: as in `muon`, and so are all others.
      momentum: in [0, 1): a number, a schedule, or a tree of those.
      nesterov: whether to look ahead, as Nesterov's momentum does.
      scale: s.
      coefficients: of Newton-Schulz.
      rule: "muon" or "normuon".
      normuon_beta: decay rate of the average of NorMuon, in [0, 1).
      fraction: of the rows of a matrix, the part that an update uses, in (0, 1]; None for all.
      error_decay: what is left of the sum in rows that were taken, in [0, 1).
      output_axes: which axes of a leaf are outputs.
      split: sizes of blocks of outputs that are matrices of their own.
      mesh_axes: how leaves are sharded.
      layer_axes: axes of a leaf with a matrix for each index.
      shard_over: mesh axes over which iterations are sharded under `jit`.
      compute_dtype: dtype to which factors of matrix products are rounded.
      adam_beta1: decay rate of Adam's first moment, in [0, 1): a number, a schedule, or a tree of
        those.
      adam_beta2: decay rate of Adam's second moment, in [0, 1): a number, a schedule, or a tree of
        those.
      adam_epsilon: added to the root of Adam's second moment, in [0, inf): a number, a schedule, or
        a tree of those.
      moment_dtype: dtype of the moments; None for the parameter's, but at least float32.
      full_precision: with "8bit", leaves that are not stored in 8 bits.

    Returns:
      A transformation with state `OptState(step, mw, vw)`, that of `muon`.

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
    name, given = "scale_by_muon", _DIRECTION.check("scale_by_muon", locals())
    method = Muon.of(name, given)

    def compute(inputs: Inputs, step: Step) -> tuple[PerArray[Array], NewMoments, NewMoments]:
        new = directions(inputs, step, method)
        return new.direction, new.mw, new.vw

    moments = given.moments(layer_axes=layer_axes)
    return transformation(name, compute, shapes_of=method.shapes_of, moments=moments)
