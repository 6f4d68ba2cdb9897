"""SOAP: Adam in the basis of the eigenvectors of Shampoo's factors, and AdamW for other leaves."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leaf_moment import Moments
from jgrad._arithmetic.leafwise import PerLeaf, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import kinds
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import average_of_leaf, of_one_leaf
from jgrad._inputs.matrix_options import LAST, MatrixOptions, read_shard_over
from jgrad._inputs.moment import Moment, Shapes, Step
from jgrad._inputs.transformation import MomentOptions, MoreFields, transformation
from jgrad._layers.matrix_axes import TwoKinds
from jgrad._muon.directions import Directions, with_adam
from jgrad._muon.muon import MatrixDescent
from jgrad._optimizers import adam as adam_of
from jgrad._soap import bases
from jgrad._soap.factors import Matrices, Runs, SoapState, init, read, tree_of
from jgrad._trees import checks
from jgrad._trees.annotations import (
    ArrayAxes,
    Count,
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Number,
)
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import Leaf

FirstStep = Literal["skip", "adam"]

_NAME = "soap"


class _Options(NamedTuple):
    """What a user chose; Adam's numbers are those of the matrices where they are None."""

    matrices: MatrixOptions
    beta1: kinds.Beta
    beta2: kinds.Beta
    shampoo_beta: kinds.Beta
    every: Count
    epsilon: kinds.Number
    max_side: Count
    descents: MatrixDescent
    first_step: FirstStep
    shard_over: tuple[str, ...]
    adam_beta1: kinds.Beta
    adam_beta2: kinds.Beta
    adam_epsilon: kinds.Number

    def check(self) -> None:
        """What a factory can."""
        checks.one_of(_NAME, "first_step", self.first_step, ("skip", "adam"))
        for beta in (self.beta1, self.beta2, self.shampoo_beta, self.adam_beta1, self.adam_beta2):
            beta.check(_NAME)
        self.epsilon.check(_NAME)
        self.adam_epsilon.check(_NAME)
        checks.count(_NAME, "every", self.every)
        checks.count(_NAME, "max_side", self.max_side, 0)
        self.descents.check(_NAME)
        self.matrices.check(_NAME)


def _shapes(inputs: Parameters, soap: _Options) -> Shapes:
    """Those of all elements; and where the matrices of each leaf are."""
    return Shapes({"mw": inputs.tree, "vw": inputs.tree}, soap.matrices.find(inputs))


# ---- the method, on the arrays of one leaf -----------------------------------------------------


@on_leaf(arrays=1)
def _bounded(g: jax.Array, *, size: int) -> jax.Array:
    """The gradient, clipped so that the squares of a whole matrix have a finite sum.

    Infinities stay infinite, so that a fault is seen.
    """
    half = jnp.finfo(g.dtype).maxexp // 2 - 2
    largest = 2.0 ** (half - (size.bit_length() + 1) // 2)

    def part(x: jax.Array) -> jax.Array:
        return jax.lax.select(jnp.isfinite(x), numerics.clipped(x, largest), x)

    return jax.lax.complex(part(g.real), part(g.imag)) if jnp.iscomplexobj(g) else part(g)


@of_one_leaf
def _adam_in_bases(g: jax.Array, m: jax.Array, vw: Moments, n: adam_of.Numbers) -> jax.Array:
    """Adam's direction of a gradient and a moment that are in the bases, as vw is."""
    v = vw.write(adam_of.second_moment, g, vw.old, n.beta2.value, n.beta2.complement)
    return adam_of.delta(m, v, n.alpha, n.epsilon)


@on_leaf(arrays=3)
def _above_noise(direction: jax.Array, m: jax.Array, noise: jax.Array) -> jax.Array:
    """The direction m / sqrt(v), of which the root counts as no less than the noise of m.

    Where gradients have no part along a pair of eigenvectors, m and v are what rounding left: m of
    its form, in all elements, and v of the products alone.
    """
    noise = noise.real
    is_noise = noise * numerics.magnitude(direction) > numerics.magnitude(m)
    inverse = numerics.safe_divide(jnp.ones_like(noise), noise)
    return jnp.where(is_noise, numerics.scaled(m, inverse), direction)


@on_leaf(arrays=2)
def _adam_at_first(
    direction: jax.Array, g: jax.Array, is_first: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """In the first update a step of Adam, g / (|g| + epsilon)."""
    one = jnp.ones((), numerics.real_dtype(g))
    first = adam_of.delta(g, numerics.bounded_square(g), one, epsilon)
    return jnp.where(is_first, first, direction)


@on_leaf(arrays=1)
def _zero_at_first(update: jax.Array, is_first: jax.Array) -> jax.Array:
    return jnp.where(is_first, jnp.zeros_like(update), update)


# ---- the method, on lists of arrays ------------------------------------------------------------


class _Numbers(NamedTuple):
    beta1: BetaForms
    beta2: BetaForms
    shampoo: BetaForms
    epsilon: PerLeaf


def _matrix_updates(
    inputs: Inputs,
    step: Step,
    soap: _Options,
    old: Matrices,
    g: list[Leaf],
    n: _Numbers,
    *moments: Moment,
) -> tuple[Directions, Sequence[Runs]]:
    """The step in the bases as they are; behind it new averages, and sometimes new bases.

    Of matrices alone are gradients, numbers and moments.
    """
    sizes = [math.prod(where.whole.shape) for where in old.axes]
    pairs = zip(g, sizes, strict=True)
    g = leafwise.run([(leafwise.fixed(_bounded, size=size), (x,)) for x, size in pairs])

    is_first, done = step.number == 1, step.number - 1
    first, second = moments
    m, mw = average_of_leaf(g, first, _held(is_first, n.beta1))
    count = jnp.asarray(done, float)
    adam_numbers = adam_of.numbers_of(n.beta1, n.beta2, n.epsilon, "moments", count)
    adam_numbers = adam_numbers._replace(beta2=_held(is_first, n.beta2))
    in_bases = old.rotated(g, into=True), old.rotated(m, into=True)
    x, vw = _adam_in_bases(*in_bases, second, adam_numbers)
    x = leafwise.apply(_above_noise, x, in_bases[1], old.noise(m, first.old))
    direction = old.rotated(x, into=False)
    if soap.first_step == "adam":
        direction = leafwise.apply(_adam_at_first, direction, g, is_first, n.epsilon)

    new = old.averaged(g, n.shampoo.value, n.shampoo.complement)
    what = jnp.where(done % soap.every == 0, bases.TURN, bases.KEEP)
    what = jnp.where(is_first, bases.BEGIN, what)
    new = new.refreshed(inputs.function, what, soap.shard_over)
    arrays = (jax.tree.leaves(x) for x in (new.factors, old.factors))
    kept = jax.tree.unflatten(jax.tree.structure(new.factors), inputs.kept(*arrays))
    return Directions(direction, mw, vw, signs=direction), kept


def _held(is_first: jax.Array, beta: BetaForms) -> BetaForms:
    """With 1 and 0 in the first update, whose gradient is in no average."""

    def held(x: Leaf, first: float) -> Leaf:
        if not isinstance(x, list):
            return jnp.where(is_first, jnp.full_like(x, first), x)
        known = {id(y): held(y, first) for y in x}
        return [known[id(y)] for y in x]

    return BetaForms(held(beta.value, 1.0), held(beta.complement, 0.0), beta.log)


def _adam_numbers(soap: _Options, inputs: Inputs, step: Step, n: _Numbers) -> adam_of.Numbers:
    """The numbers of all other leaves, which are SOAP's where they are not given."""
    first, second, added = soap.adam_beta1, soap.adam_beta2, soap.adam_epsilon
    return adam_of.numbers_of(
        first.read(inputs, step) if first.is_given(step) else n.beta1,
        second.read(inputs, step) if second.is_given(step) else n.beta2,
        added.read(inputs, step) if added.is_given(step) else n.epsilon,
        "moments",
        step.as_float,
    )


def _update(inputs: Inputs, step: Step, soap: _Options) -> tuple[Any, ...]:
    """Updates, new moments and new factors."""
    inputs.check_buffers()
    n = _Numbers(
        beta1=soap.beta1.read(inputs, step),
        beta2=soap.beta2.read(inputs, step),
        shampoo=soap.shampoo_beta.read(inputs, step),
        epsilon=soap.epsilon.read(inputs, step),
    )
    both = TwoKinds.of(inputs.specs, step.matrices)
    leaves = [inputs.specs[i].positions[0] for i in both.first]  # matrices are not packed
    old = Matrices(both.axes, list(map(step.more.__getitem__, leaves)))
    moments = list(step.moments.values())
    arguments = *leafwise.at((inputs.g, n), both.first), *(x.at(both.first) for x in moments)
    of_matrices, runs = _matrix_updates(inputs, step, soap, old, *arguments)
    new = with_adam(inputs, step, both, of_matrices, _adam_numbers(soap, inputs, step, n))
    updates = soap.descents.updates(inputs, step, new)
    if soap.first_step == "skip":
        of_first = leafwise.at(updates, both.first)
        skipped = leafwise.apply(_zero_at_first, of_first, step.number == 1)
        updates = both.together(skipped, leafwise.at(updates, both.second))
    factors = tree_of(inputs, step.more | dict(zip(leaves, runs, strict=True)))
    return updates, new.mw, new.vw, factors


# ---- the transformation ------------------------------------------------------------------------


@explained
def soap(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    beta1: Number = 0.95,
    beta2: Number = 0.95,
    shampoo_beta: Number = 0.95,
    every: Count = 10,
    epsilon: Number = 1e-8,
    max_side: Count = 8192,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    first_step: FirstStep = "skip",
    output_axes: ArrayAxes = LAST,
    split: ArrayAxes = None,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    shard_over: str | tuple[str, ...] | None = None,
    adam_learning_rate: LearningRate | None = None,
    adam_beta1: Number | None = None,
    adam_beta2: Number | None = None,
    adam_epsilon: Number | None = None,
    adam_weight_decay: Number | None = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[SoapState]:
    """SOAP, which is Adam in Shampoo's eigenbases, for matrices, and AdamW for all other leaves.

        m'  = beta1 m + (1 - beta1) g
        v'  = beta2 v + (1 - beta2) |P^H g Q|^2
        d   = P [P^H m' Q / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon)] Q^H
        w'  = w - learning_rate (d + weight_decay w)
        L'  = shampoo_beta L + (1 - shampoo_beta) g g^H,  R' the same of g^H g

    where the columns of P and Q approximate the eigenvectors of L and R. Every `every` updates, one
    power step refines them: P' is the orthogonal factor of the QR decomposition P' T = L' P, with
    columns sorted by diag(P^H L' P) for the decomposition and put back afterwards, so that v still
    matches them. Q' is computed in the same way.

    The root of v' is bounded below by the rounding error of m' in these bases, in float32, bfloat16
    or 8 bits. Otherwise, directions in which the gradient vanishes would be noise divided by almost
    zero.

    The first update only initializes P and Q and moves no matrices (`first_step="skip"`); t counts
    the updates after it. All matrix products are in float32 or wider with
    `jax.lax.Precision.HIGHEST`, because errors from TensorFloat-32 or bfloat16 would exceed what a
    power step changes.

    In rows and columns that never have a gradient, weights do not move at all. Elsewhere, steps
    have no upper bound, because m' is rotated with the bases and v' is not.

    If you differentiate through an update, P and Q are treated as constants. Derivatives with
    respect to the learning rate are exact until the first power step, and close after it.
    Derivatives with respect to weights or gradients are useless: on a full batch they are 10^4
    times too large, because the bases come from the same gradient.

    Args:
      learning_rate: for matrices. A number in [0, inf), an array, or a schedule, which is a
        function of the number of completed updates (0 for the first); or a prefix tree or `by_path`
        of these. `update(..., learning_rate=x)` overrides it for one call; the other numeric
        options can be overridden in the same way.
      matrices: which leaves are matrices: a prefix tree of bools, or a function that returns one
        from the parameters' `jax.ShapeDtypeStruct`s. Required. `hidden_matrices()` chooses by names
        and shapes. Matrices cannot be packed.
      beta1: decay rate of the first moment, in [0, 1): a number, a schedule, or a tree of these.
      beta2: decay rate of the second moment, in [0, 1): a number, a schedule, or a tree of these.
      shampoo_beta: decay rate of L and R, in [0, 1): a number, a schedule, or a tree of these.
      every: number of updates from one power step to the next, at least 1.
      epsilon: added to the root of the second moment, in [0, inf): a number, a schedule, or a tree
        of these.
      max_side: the longest side that has a factor and a basis. For a longer one, the basis is the
        identity.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It does not enter the
        moments.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay, whether they are matrices
        or not.
      weight_decay_rule: "decoupled", "cautious" or "independent", as in `adam`, with d in place of
        delta.
      first_step: "skip", or "adam", which makes the first update a step of Adam, w' = w -
        learning_rate (g / (|g| + epsilon) + weight_decay w), and then discards its moments.
      output_axes: which axes of a leaf are outputs: an int, a tuple of ints, or a prefix tree of
        these. All other axes except `layer_axes` are inputs. Whichever of the two come first in the
        leaf are the rows.
      split: how to split fused leaves into separate matrices, as in `muon`. The state then has
        factors for each of them.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map`, matrices need
        PartitionSpecs, as in `muon`, and each device holds the full factors of each of its
        matrices.
      layer_axes: axes along which a leaf stacks matrices, such as layers for `lax.scan`, experts or
        heads: an int, a tuple of ints, None, or a prefix tree of these.
      shard_over: under `jit`, a mesh axis or a tuple of axes over which the power steps of bases of
        the same size are distributed. The mesh is that of the leaves or of `jax.set_mesh`.
      adam_learning_rate: learning rate of all other leaves; None for `learning_rate`.
      adam_beta1: beta1 of all other leaves; None for `beta1`.
      adam_beta2: beta2 of all other leaves; None for `beta2`.
      adam_epsilon: epsilon of all other leaves; None for `epsilon`.
      adam_weight_decay: weight decay of all other leaves; None for `weight_decay`.
      moment_dtype: dtype of the moments. None uses the parameter's dtype, but at least float32;
        "8bit" stores `Blocks`, as in `adam`. Factors and bases stay in float32 or wider, because a
        basis in 8 bits would not be orthogonal.
      full_precision: with "8bit", which leaves not to store in 8 bits: a prefix tree of bools, or a
        function that returns one from the parameters' `jax.ShapeDtypeStruct`s.

    Returns:
      A transformation with state `SoapState(step, mw, vw, factors)`.

    Raises:
      ValueError: a Python number is out of range, a name is unknown, or a matrix is packed.
      TypeError: an option has the wrong type, or `matrices` is missing.

    Example:
      >>> params = grads = {"embed": jnp.ones((9, 3)), "w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.soap(3e-3, matrices=jgrad.hidden_matrices())
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> jax.tree.map(jnp.shape, state.factors["w"].left), state.factors["b"]
      ((3, 3), None)

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), algorithms 3
      and 4; the first step, the order of columns and the bias corrections follow `soap.py` of
      nikhilvyas/SOAP.
    """
    chosen = _Options(
        matrices=MatrixOptions(matrices, output_axes, split, layer_axes, mesh_axes),
        beta1=kinds.Beta("beta1", beta1),
        beta2=kinds.Beta("beta2", beta2),
        shampoo_beta=kinds.Beta("shampoo_beta", shampoo_beta),
        every=every,
        epsilon=kinds.Number("epsilon", epsilon),
        max_side=max_side,
        descents=MatrixDescent.of(
            kinds.DescentOptions.of(
                learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
            ),
            adam_learning_rate,
            adam_weight_decay,
        ),
        first_step=first_step,
        shard_over=read_shard_over(_NAME, shard_over),
        adam_beta1=kinds.Beta("adam_beta1", adam_beta1, is_optional=True),
        adam_beta2=kinds.Beta("adam_beta2", adam_beta2, is_optional=True),
        adam_epsilon=kinds.Number("adam_epsilon", adam_epsilon, is_optional=True),
    )
    chosen.check()
    return transformation(
        _NAME,
        functools.partial(_update, soap=chosen),
        shapes_of=functools.partial(_shapes, soap=chosen),
        moments=MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes),
        more=MoreFields(
            functools.partial(init, max_side=max_side),
            functools.partial(read, max_side=max_side),
        ),
        state_type=SoapState,
    )
