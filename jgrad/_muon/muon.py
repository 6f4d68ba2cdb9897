"""Muon: momentum, orthogonalized matrix by matrix; all other leaves are AdamW's."""

from collections.abc import Callable
from typing import Any

import optax
from jax.typing import DTypeLike

from jgrad._arithmetic import rules
from jgrad._inputs import numbers, options
from jgrad._inputs.inputs import Inputs
from jgrad._inputs.moment import NewMoments, Step
from jgrad._inputs.moments import MomentDType, MomentOptions
from jgrad._inputs.numbers import Scalar
from jgrad._inputs.options import DecayRule, LearningRate, Mask, Number
from jgrad._inputs.transformation import transformation
from jgrad._muon.direction import LAST, Muon, MuonRule, Scale, directions
from jgrad._muon.parts import Array, PerArray, PerLeaf
from jgrad._trees.other_names import explained
from jgrad._trees.renamed import renamed
from jgrad._trees.trees import PyTree


@renamed(
    norm_axes="mesh_axes",
    share_over="shard_over",
    beta1="adam_beta1",
    beta2=("adam_beta2", "normuon_beta"),
)
@explained
def muon(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    momentum: Number = 0.95,
    nesterov: bool = True,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask = None,
    weight_decay_rule: DecayRule = "decoupled",
    scale: Scale = "original",
    coefficients: Any = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
    output_axes: PyTree = LAST,
    split: PyTree = None,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
    shard_over: str | tuple[str, ...] | None = None,
    compute_dtype: DTypeLike | None = None,
    adam_learning_rate: LearningRate = None,
    adam_beta1: Number = 0.9,
    adam_beta2: Number = 0.95,
    adam_epsilon: Number = 1e-8,
    adam_weight_decay: Number = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices, AdamW for all other leaves.

        m'  = momentum m + (1 - momentum) g
        d   = momentum m' + (1 - momentum) g          (without nesterov: m')
        X   = d / |d|, then for each (a, b, c):  A = X X^T;  X = a X + (b A + c A A) X
        w'  = w - learning_rate (s X + weight_decay w),  s = sqrt(max(1, outputs / inputs))

    with |.| the 2-norm of a matrix, computed without overflow or underflow, and X = 0 where d = 0.
    There is no epsilon. X approximates the nearest orthogonal matrix: its singular values are all
    close to 1. Matrices of equal shape are worked on together.

    Args:
      learning_rate: of matrices. A number in [0, inf), an array, or a function of the number of
        updates done (0 at the first); or a prefix tree or `by_path` of those. `update(...,
        learning_rate=x)` overrides it for one call, and so do the names of all other numbers.
      matrices: which leaves are matrices: a prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one. Required, since shapes cannot tell: embeddings and
        heads are Adam's. `hidden_matrices()` chooses by names and shapes.
      momentum: in [0, 1); a number, a function, or a tree, likewise.
      nesterov: look ahead.
      weight_decay: in [0, inf); likewise. Decoupled, and not scaled by s.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay, of either kind.
      weight_decay_rule: of both kinds. "decoupled" as above. "cautious": only weights that the step
        moves towards zero decay, those where Re(X conj(w)) > 0, or that of Adam's direction, as in
        `adam`. "independent": w' = w - learning_rate s X - weight_decay w, with a decay in [0, 1),
        which acts at a rate of 0, too.
      scale: s. "original" as above; "match_rms_adamw" is 0.2 sqrt(max(outputs, inputs)), with which
        rates and decays of AdamW fit; "spectral" is sqrt(outputs / inputs); None is 1; or a
        function of (outputs, inputs).
      coefficients: "jordan", "you", "polar_express" or "deepseek_v4", or a sequence of triples, one
        for each step.
      rule: "muon"; or "normuon", which divides each output of X by the root of its mean square,
        averaged over updates, and keeps |X|.
      normuon_beta: decay rate of that average, in [0, 1).
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
      adam_learning_rate: of all other leaves, as `learning_rate`. None for the same, only with
        "match_rms_adamw": rates for the other scales are far too large for Adam.
      adam_beta1: decay rate of Adam's first moment, in [0, 1); likewise.
      adam_beta2: decay rate of Adam's second moment, in [0, 1); likewise.
      adam_epsilon: added to the root of Adam's second moment, in [0, inf); likewise.
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
      (2025), algorithm 1; heads apart: "GLM-5" (2026, arXiv 2602.15763), "Muon Split"; sizes:
      `split_sizes` of `dion`.
    """
    name, arguments = "muon", locals()
    options.check(name, numbers.number, learning_rate=learning_rate)
    method = Muon.of_arguments(name, arguments)
    of_numbers = (
        *(learning_rate, momentum, weight_decay, normuon_beta, adam_learning_rate),
        *(adam_beta1, adam_beta2, adam_epsilon, adam_weight_decay),
    )
    options.check_masks(
        name,
        of_numbers,
        matrices=matrices,
        weight_decay_mask=weight_decay_mask,
        full_precision=full_precision,
    )
    options.check_decays(name, weight_decay_rule, weight_decay=weight_decay)
    if adam_weight_decay is not None:
        options.check_decays(name, weight_decay_rule, adam_weight_decay=adam_weight_decay)
    _check_adam_learning_rate(name, adam_learning_rate, scale)

    def compute(inputs: Inputs, step: Step) -> tuple[PerArray[Array], NewMoments, NewMoments]:
        is_cautious = weight_decay_rule == "cautious"
        new = directions(inputs, step, method, signs=is_cautious)
        use = options.mask(inputs, "weight_decay_mask", weight_decay_mask)
        decays = _of_both_kinds(
            "weight_decay",
            (weight_decay, adam_weight_decay),
            lambda name, x: options.decay_of_leaves(inputs, name, x, use, step, weight_decay_rule),
            step,
        )
        rates = _of_both_kinds(
            "learning_rate",
            (learning_rate, adam_learning_rate),
            lambda name, x: options.rate_of_leaves(inputs, name, x, step),
            step,
        )
        numbers = inputs.per_array(decays), inputs.per_array(rates)
        updates = rules.updates(
            new.direction, inputs.w, *numbers, new.signs, rule=weight_decay_rule
        )
        return updates, new.mw, new.vw

    moments = MomentOptions(moment_dtype, full_precision, layer_axes)
    return transformation(name, compute, shapes_of=method.shapes_of, moments=moments)


def _check_adam_learning_rate(name: str, rate: LearningRate, scale: Scale) -> None:
    """A rate for Adam, unless one fits both."""
    if rate is not None:
        options.check(name, numbers.number, adam_learning_rate=rate)
    elif scale != "match_rms_adamw":
        expected = "a rate for the leaves that are not in `matrices`, such as 3e-4"
        remedy = 'or `scale="match_rms_adamw"`, with which one rate fits both'
        raise ValueError(f"{name}: `adam_learning_rate`: None, expected {expected}; {remedy}.")


def _of_both_kinds(
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


@renamed(
    norm_axes="mesh_axes",
    share_over="shard_over",
    beta1="adam_beta1",
    beta2=("adam_beta2", "normuon_beta"),
)
@explained
def scale_by_muon(
    *,
    matrices: Mask,
    momentum: Number = 0.95,
    nesterov: bool = True,
    scale: Scale = "original",
    coefficients: Any = "jordan",
    rule: MuonRule = "muon",
    normuon_beta: Scalar = 0.95,
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
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction, for `optax.chain`: `muon` without learning rates, sign and decay.

        updates = s X for matrices, Adam's direction for all other leaves

    With a scale other than "match_rms_adamw" the two kinds want different rates.

    Args:
      matrices: as in `muon`, and so are all others.
      momentum: in [0, 1); a number, a function, or a tree, likewise.
      nesterov: look ahead.
      scale: s.
      coefficients: of Newton-Schulz.
      rule: "muon" or "normuon".
      normuon_beta: decay rate of the average of NorMuon, in [0, 1).
      output_axes: which axes of a leaf are outputs.
      split: sizes of blocks of outputs that are matrices of their own.
      mesh_axes: how leaves are sharded.
      layer_axes: axes of a leaf with a matrix for each index.
      shard_over: mesh axes over which iterations are sharded under `jit`.
      compute_dtype: dtype to which factors of matrix products are rounded.
      adam_beta1: decay rate of Adam's first moment, in [0, 1); likewise.
      adam_beta2: decay rate of Adam's second moment, in [0, 1); likewise.
      adam_epsilon: added to the root of Adam's second moment, in [0, inf); likewise.
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
    name, arguments = "scale_by_muon", locals()
    method = Muon.of_arguments(name, arguments)
    of_numbers = momentum, normuon_beta, adam_beta1, adam_beta2, adam_epsilon
    masks = {"matrices": matrices, "full_precision": full_precision}
    options.check_masks(name, of_numbers, **masks)

    def compute(inputs: Inputs, step: Step) -> tuple[PerArray[Array], NewMoments, NewMoments]:
        new = directions(inputs, step, method)
        return new.direction, new.mw, new.vw

    moments = MomentOptions(moment_dtype, full_precision, layer_axes)
    return transformation(name, compute, shapes_of=method.shapes_of, moments=moments)
