"""Muon: momentum, orthogonalized matrix by matrix; all other elements are AdamW's."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jgrad._arithmetic import rules
from jgrad._inputs import matrix_options, numbers, options
from jgrad._inputs.factory import (
    FORM,
    MATRICES,
    SHARD_OVER,
    Arguments,
    Given,
    Options,
    Reads,
    checked,
    one_of,
)
from jgrad._inputs.functional import Role
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import Descent
from jgrad._inputs.matrix_options import LAST
from jgrad._inputs.moment import Shapes, Step
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import DecayRule, LearningRate, Mask, Number
from jgrad._inputs.transformation import MomentDType, transformation
from jgrad._layers.matrix_axes import Array, MatrixAxes
from jgrad._muon.directions import MOMENTUM, check_no_momentum, directions
from jgrad._muon.newton_schulz import check_compute_dtype, read_coefficients
from jgrad._optimizers import adam as adam_of
from jgrad._trees import checks, trees
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree

MuonRule = Literal["muon", "normuon"]
ScaleFunction = Callable[[int, int], Any]  # of outputs and inputs
Scale = str | ScaleFunction | None

_SCALES: dict[str | None, ScaleFunction] = {
    "original": lambda out, into: math.sqrt(max(1.0, out / max(1, into))),
    "match_rms_adamw": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "spectral": lambda out, into: math.sqrt(out / max(1, into)),
    None: lambda out, into: 1.0,
}


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


def check_matrices(name: str, matrices: Mask) -> None:
    """A choice of leaves, which has to be made."""
    if matrices is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes; shapes alone cannot tell"
        raise TypeError(f"{name}: `matrices`: None, expected {expected}; {remedy}.")


_DIRECTION = Options(
    matrices=Role.MASK,
    rule=one_of("muon", "normuon"),
    nesterov=Role.FLAG,
    momentum=Role.BETA,
    **MATRICES,
    normuon_beta=numbers.beta,
    error_decay=Role.BETA,
    **{f"adam_{name}": role for name, role in adam_of.NUMBERS.items()},
    **FORM,
    scale=Reads(read_scale),
    coefficients=Reads(read_coefficients),
    compute_dtype=Reads(check_compute_dtype),
    shard_over=SHARD_OVER,
    fraction=Reads(read_fraction),
)
_OPTIONS = Options(
    **_DIRECTION.kinds,
    learning_rate=checked(numbers.number),
    adam_learning_rate=checked(numbers.number, optional=True),
    **dict.fromkeys(("weight_decay", "adam_weight_decay", "weight_decay_rule")),
    weight_decay_mask=Role.MASK,
)


def _checked(name: str, table: Options, arguments: Arguments) -> Given:
    given = table.check(name, arguments)
    check_matrices(name, given.matrices)
    if given.fraction is not None:
        check_no_momentum(name, given.fraction, given.momentum)
    return given


def _shapes(inputs: Parameters, given: Given) -> Shapes:
    """The shapes of the moments; and where the matrices of each leaf are.

    Second ones are those of all leaves but matrices; in NorMuon, one number per output of these.
    """
    matrices = matrices_of(inputs, given)

    def of_second(x: Array, of: MatrixAxes | None) -> jax.ShapeDtypeStruct | None:
        if x is None or not checks.is_inexact(x) or (of is not None and given.rule == "muon"):
            return None
        return jax.ShapeDtypeStruct(x.shape if of is None else of.per_output, x.dtype)

    pairs = zip(inputs.reference.leaves, inputs.per_array(matrices), strict=True)
    vw = trees.flatten(inputs.tree)[1].unflatten([of_second(*pair) for pair in pairs])
    return Shapes(inputs.tree, vw, matrices)


def _made(
    name: str, given: Given, compute: Callable[[Inputs, Step], tuple[list[Any], Any, Any]]
) -> Transformation:
    moments = given.moments(layer_axes=given.layer_axes)
    shapes_of = functools.partial(_shapes, given=given)
    return transformation(name, compute, shapes_of=shapes_of, moments=moments)


# ---- what every method of matrices has, and Adam beside it ---------------------------------------


def check_decays(name: str, given: Given) -> None:
    """Those of matrices, and of all other leaves."""
    decays = {"weight_decay": given.weight_decay}
    if given.adam_weight_decay is not None:
        decays["adam_weight_decay"] = given.adam_weight_decay
    checks.one_of(name, "weight_decay_rule", given.weight_decay_rule, options.DECAY_RULES)
    options.check_decays(name, given.weight_decay_rule, **decays)


def matrices_of(inputs: Parameters, given: Given) -> list[MatrixAxes | None]:
    """Where the matrices of each leaf are; an error where one is packed with others."""
    axes = given.output_axes, given.layer_axes, given.mesh_axes, given.split
    matrices = matrix_options.find(inputs, given.matrices, *axes)
    if inputs.has_buffers:
        matrix_options.refuse_packed(inputs, matrices)
    return matrices


def descent_of(inputs: Inputs, step: Step, given: Given) -> Descent:
    """What makes updates of directions: learning rates and decays of both kinds of leaves."""
    rule = given.weight_decay_rule
    use = options.mask(inputs, "weight_decay_mask", given.weight_decay_mask)

    def decays_of(name: str, x: PyTree) -> list[Any]:
        return options.decay_of_leaves(inputs, name, x, use, step, rule)

    def rates_of(name: str, x: PyTree) -> list[Any]:
        return options.rate_of_leaves(inputs, name, x, step)

    decays = inputs.per_array(_of_both_kinds("weight_decay", decays_of, step, given))
    rates = inputs.per_array(_of_both_kinds("learning_rate", rates_of, step, given))
    return Descent(rules.optional(decays, rule), rates, rule)


def _of_both_kinds(
    name: str, read: Callable[[str, PyTree], list[Any]], step: Step, given: Given
) -> list[Any]:
    """An option for each leaf: that of matrices, or Adam's, which is the same unless it is given.

    Args:
      name: of that of matrices.
      read: (name, option) -> an entry for each leaf.
      step: of the update, which may have another option of Adam.
      given: the options of the factory.
    """
    of_matrices = read(name, getattr(given, name))
    own = getattr(given, f"adam_{name}")
    if own is None and step.numbers.get(f"adam_{name}") is None:
        return of_matrices
    columns = zip(of_matrices, read(f"adam_{name}", own), step.matrices, strict=True)
    return [y if axes is None else x for x, y, axes in columns]


# ---- transformations ----------------------------------------------------------------------------


@explained
def muon(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    momentum: Number = MOMENTUM,
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
    name, given = "muon", _checked("muon", _OPTIONS, locals())
    check_decays(name, given)
    chosen = jax.tree.leaves(matrices, is_leaf=trees.is_leaf)
    is_for_all = bool(chosen) and all(x is True for x in chosen)
    if adam_learning_rate is None and scale != "match_rms_adamw" and not is_for_all:
        expected = "a learning rate for the leaves that are not in `matrices`, such as 3e-4"
        remedy = 'or `scale="match_rms_adamw"`, with which one learning rate fits both'
        raise ValueError(f"{name}: `adam_learning_rate`: None, expected {expected}; {remedy}.")

    def compute(inputs: Inputs, step: Step) -> tuple[list[Array], list[Any], list[Any]]:
        new = directions(inputs, step, given)
        signs = new.signs if weight_decay_rule == "cautious" else None
        updates = descent_of(inputs, step, given).updates(new.direction, inputs.w, signs)
        return updates, new.mw, new.vw

    return _made(name, given, compute)


@explained
def scale_by_muon(
    *,
    matrices: Mask,
    momentum: Number = MOMENTUM,
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
      As `muon`, without those of the learning rate and of weight decay.

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
    name, given = "scale_by_muon", _checked("scale_by_muon", _DIRECTION, locals())

    def compute(inputs: Inputs, step: Step) -> tuple[list[Array], list[Any], list[Any]]:
        new = directions(inputs, step, given)
        return new.direction, new.mw, new.vw

    return _made(name, given, compute)
