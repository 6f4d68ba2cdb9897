"""SOAP: Adam in the eigenvectors of Shampoo's factors; all leaves that are no matrices are AdamW's."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Function, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._inputs import numbers, options
from jgrad._inputs.aligned import Role
from jgrad._inputs.factory import FORM, Given, Options, checked, one_of
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import Descent, of_one_leaf
from jgrad._inputs.moment import MomentShapes, NewMoments, Step
from jgrad._inputs.moment_options import MomentDType
from jgrad._inputs.options import DecayRule, LearningRate, Mask, Number
from jgrad._inputs.transformation import MoreFields, transformation
from jgrad._kernels.moment import Moments
from jgrad._muon import matrix_axes
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._muon.muon import LAST, check_matrices, of_both_kinds
from jgrad._optimizers import adam as adam_of
from jgrad._soap import bases, factors as factors_of
from jgrad._soap.factors import OfLeaf, SoapState
from jgrad._trees import trees, values
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree

FirstStep = Literal["skip", "adam"]

_NAME = "soap"
_OPTIONAL_BETA = checked(numbers.scalar_betas, optional=True)
_OPTIONS = Options(
    matrices=Role.MASK,
    first_step=one_of("skip", "adam"),
    learning_rate=checked(numbers.number),
    beta1=Role.BETA,
    beta2=Role.BETA,
    shampoo_beta=Role.BETA,
    every=values.count,
    epsilon=Role.NUMBER,
    max_side=functools.partial(values.count, low=0),
    output_axes=lambda function, _, x: matrix_axes.read_output_axes(function, x),
    split=lambda function, _, x: matrix_axes.read_split(function, x),
    layer_axes=Role.LAYER_AXES,
    mesh_axes=lambda function, _, x: matrix_axes.read_shardings(function, x),
    adam_learning_rate=checked(numbers.number, optional=True),
    adam_beta1=_OPTIONAL_BETA,
    adam_beta2=_OPTIONAL_BETA,
    adam_epsilon=checked(numbers.scalars, optional=True),
    weight_decay_mask=Role.MASK,
    **dict.fromkeys(("weight_decay", "adam_weight_decay", "weight_decay_rule", "shard_over")),
    **FORM,
)


class Soap(NamedTuple):
    """The options of SOAP that are no numbers; `soap` explains each of them.

    Attributes:
      given: those that are numbers are read from here in each update.
    """

    given: Given
    matrices: Mask
    every: int
    max_side: int
    output_axes: PyTree
    layer_axes: PyTree
    mesh_axes: PyTree
    split: PyTree
    shard_over: tuple[str, ...]
    first_step: FirstStep

    @classmethod
    def of(cls, given: Given) -> "Soap":
        """What the factory was given."""
        soap = cls(given, *(given.arguments[field] for field in cls._fields[1:]))
        check_matrices(_NAME, soap.matrices)
        over = soap.shard_over
        over = () if over is None else values.axis_names(_NAME, "shard_over", over)
        return soap._replace(shard_over=over)

    def shapes_of(self, inputs: Parameters) -> MomentShapes:
        """Those of all elements; and where the matrices of each leaf are."""
        axes = self.output_axes, self.layer_axes, self.mesh_axes, self.split
        matrices = matrix_axes.find(inputs, self.matrices, *axes)
        for spec in inputs.specs:
            for i in () if spec.is_unpacked else spec.positions:
                if matrices[i] is not None:
                    arg = ArgLeaves.from_tree(inputs.function, "matrices", inputs.shapes)
                    remedy = "expected a leaf that is not: `pack(params, max_size=...)` below its size"
                    arg.fail(i, ValueError, f"True for a leaf packed with others, {remedy}")
        return MomentShapes(inputs.tree, inputs.tree, matrices)

    @property
    def fields(self) -> MoreFields:
        """What the state has beside moments."""

        def init(inputs: Parameters, shapes: MomentShapes) -> tuple[PyTree]:
            return (factors_of.init(inputs, shapes.matrices or [], self.max_side),)

        def read(inputs: Inputs, shapes: MomentShapes, state: SoapState) -> list[OfLeaf | None]:
            return factors_of.read(inputs, shapes.matrices or [], self.max_side, state.factors)

        return MoreFields(SoapState, init, read)


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


@functools.cache
def _bounded_for(size: int) -> Function:
    """One function object for each size, so that JAX's caches find it again."""
    return functools.partial(_bounded, size=size)


@of_one_leaf
def _momentum(g: jax.Array, mw: Moments, beta: BetaForms) -> jax.Array:
    return mw.write(rules.average, g, mw.old, beta.value, beta.complement)


@of_one_leaf
def _adam_in_basis(g: jax.Array, m: jax.Array, vw: Moments, n: adam_of.Numbers) -> jax.Array:
    """Adam's direction of a gradient and a moment that are in the bases, as vw is."""
    v = vw.write(adam_of.second_moment, g, vw.old, n.beta2.value, n.beta2.complement)
    return adam_of.delta(m, v, n.alpha, n.epsilon)


@on_leaf(arrays=2)
def _first_of_adam(
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


class _New(NamedTuple):
    """What one update makes of the matrices; None for other arrays."""

    direction: list[Any]
    mw: NewMoments
    vw: NewMoments
    factors: list[OfLeaf | None]


def _of_matrices(
    inputs: Inputs, step: Step, soap: Soap, axes: list[MatrixAxes | None], n: Any
) -> _New:
    """The step in the bases as they are; behind it new averages, and sometimes new bases."""
    factors = _per_array(inputs, step.more)
    sizes = [None if of is None else int(np.prod(factors_of.whole(of).shape)) for of in axes]
    g = leafwise.run(
        [
            None if x is None or size is None else (_bounded_for(size), (x,))
            for x, size in zip(inputs.g, sizes, strict=True)
        ]
    )
    is_first = step.number == 1
    m, mw = _momentum(g, step.mw, _held(is_first, n.beta1))
    done = jnp.asarray(step.number - 1, float)
    of_adam = adam_of.numbers_of(n.beta1, n.beta2, n.epsilon, "moments", done)
    of_adam = of_adam._replace(beta2=_held(is_first, n.beta2))
    turned, turned_m = (factors_of.into_bases(x, axes, factors) for x in (g, m))
    x, vw = _adam_in_basis(turned, turned_m, step.vw, of_adam)
    direction = factors_of.out_of_bases(x, axes, factors)
    if soap.first_step == "adam":
        direction = leafwise.apply(_first_of_adam, direction, g, is_first, n.epsilon)
    count = len(g)
    beta = [leafwise.per_leaf(x, count) for x in (n.shampoo_beta.value, n.shampoo_beta.complement)]
    new = factors_of.averaged(g, axes, factors, *beta)
    is_turn = (step.number - 1) % soap.every == 0
    what = jnp.where(is_first, bases.BEGIN, jnp.where(is_turn, bases.TURN, bases.KEEP))
    is_updated = [x is not None for x in g]
    new = factors_of.refreshed(inputs.function, new, is_updated, what, soap.shard_over)
    return _New(direction, mw, vw, _per_leaf(inputs, _kept(inputs, new, factors)))


def _held(is_first: jax.Array, beta: BetaForms) -> BetaForms:
    """With 1 and 0 in the first update, whose gradient is in no average."""

    def held(x: Any, first: float) -> Any:
        if not isinstance(x, list):
            return jnp.where(is_first, jnp.full_like(x, first), x)
        known = {id(y): None if y is None else held(y, first) for y in x}
        return [known[id(y)] for y in x]

    return BetaForms(held(beta.value, 1.0), held(beta.complement, 0.0), beta.log)


def _kept(
    inputs: Inputs, new: list[OfLeaf | None], old: list[OfLeaf | None]
) -> list[OfLeaf | None]:
    """The new factors, or the old ones where the update is not committed."""
    arrays, structure = jax.tree.flatten(new)
    return structure.unflatten(inputs.kept(arrays, jax.tree.leaves(old)))


def _per_array(inputs: Inputs, entries: list[Any]) -> list[Any]:
    """Of arrays that are a leaf each; None for buffers."""
    return [entries[x.positions[0]] if x.is_unpacked else None for x in inputs.specs]


def _per_leaf(inputs: Inputs, entries: list[Any]) -> list[Any]:
    pairs = zip(inputs.specs, entries, strict=True)
    return [x for spec, x in pairs for _ in spec.positions]


def _both(a: NewMoments, b: NewMoments) -> NewMoments:
    """Moments of matrices and of other arrays."""
    pairs = (zip(x, y, strict=True) for x, y in zip(a, b, strict=True))
    return NewMoments(*([y if x is None else x for x, y in of_kind] for of_kind in pairs))


def _numbers_of_adam(given: Given, inputs: Inputs, step: Step, n: Any) -> adam_of.Numbers:
    """Those of all other leaves, which are SOAP's where they are not given."""
    found = []
    for name, read in (
        ("beta1", options.beta_per_array),
        ("beta2", options.beta_per_array),
        ("epsilon", options.number_per_array),
    ):
        own = given.arguments[f"adam_{name}"]
        is_given = own is not None or step.numbers.get(f"adam_{name}") is not None
        found.append(read(inputs, step, f"adam_{name}", own) if is_given else getattr(n, name))
    return adam_of.numbers_of(*found, "moments", step.as_float)


# ---- the transformation ------------------------------------------------------------------------


@explained
def soap(
    learning_rate: LearningRate,
    *,
    matrices: Mask,
    beta1: Number = 0.95,
    beta2: Number = 0.95,
    shampoo_beta: Number = 0.95,
    every: int = 10,
    epsilon: Number = 1e-8,
    max_side: int = 8192,
    weight_decay: Number = 0.01,
    weight_decay_mask: Mask = None,
    weight_decay_rule: DecayRule = "decoupled",
    first_step: FirstStep = "skip",
    output_axes: PyTree = LAST,
    split: PyTree = None,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
    shard_over: str | tuple[str, ...] | None = None,
    adam_learning_rate: LearningRate = None,
    adam_beta1: Number = None,
    adam_beta2: Number = None,
    adam_epsilon: Number = None,
    adam_weight_decay: Number = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """SOAP for matrices: Adam in the eigenvectors of Shampoo's factors; AdamW for all other leaves.

        m'  = beta1 m + (1 - beta1) g
        v'  = beta2 v + (1 - beta2) |P^H g Q|^2
        d   = P [P^H m' Q / (1 - beta1^t) / (sqrt(v' / (1 - beta2^t)) + epsilon)] Q^H
        w'  = w - learning_rate (d + weight_decay w)
        L'  = shampoo_beta L + (1 - shampoo_beta) g g^H,  R' likewise of g^H g

    with the bases P and Q, eigenvectors of L and R. In each `every`-th update one power step turns
    them: P' is that of the decomposition P' T = L' P, columns taken in the order of diag(P^H L' P)
    and put back, so that v stays with them; and Q' likewise.

    The first update initializes P and Q, and moves nothing (`first_step="skip"`); t counts the
    updates after it. All products are in float32 or wider, by `jax.lax.Precision.HIGHEST`, since
    bases in TensorFloat-32 or bfloat16 are off by more than a step turns them. Derivatives through
    an update take P and Q for constants.

    Args:
      learning_rate: of matrices. A number in [0, inf), an array, or a function of the number of
        updates done (0 at the first); or a prefix tree or `by_path` of those. `update(...,
        learning_rate=x)` overrides it for one call, and so do the names of all other numbers.
      matrices: which leaves are matrices: a prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one. Required. `hidden_matrices()` chooses by names and
        shapes. They are not packed with other leaves.
      beta1: decay rate of the first moment, in [0, 1); a number, a function, or a tree, likewise.
      beta2: decay rate of the second moment, in [0, 1); likewise.
      shampoo_beta: decay rate of L and R, in [0, 1); likewise.
      every: updates from one power step to the next, at least 1.
      epsilon: added to the root of the second moment, in [0, inf); likewise.
      max_side: a side of more rows or columns keeps the identity for its basis, and has no factor.
      weight_decay: in [0, inf); likewise. Decoupled from the moments.
      weight_decay_mask: prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one; leaves with False do not decay, of either kind.
      weight_decay_rule: "decoupled", "cautious" or "independent", as in `adam`, of d.
      first_step: "skip"; or "adam", with which the first update is a step of Adam, w' = w -
        learning_rate (g / (|g| + epsilon) + weight_decay w), whose moments are forgotten.
      output_axes: which axes of a leaf are outputs: an int or a tuple of ints, or a prefix tree of
        those. What is neither an output nor in `layer_axes` is input. Rows are those of both that
        come first in the leaf.
      split: blocks of outputs that are matrices of their own, as in `muon`. The state then has
        factors of each block.
      mesh_axes: inside `shard_map`, the PartitionSpec of each leaf, or a prefix tree of those, as
        in `muon`. There a device has the factors of each of its matrices as a whole.
      layer_axes: axes of a leaf with a matrix for each index: layers for `lax.scan`, experts,
        heads. An int, a tuple of ints, or None, or a prefix tree of those.
      shard_over: under `jit`, a mesh axis or a tuple of axes over which the power steps of bases of
        one size are dealt out. The mesh is that of the leaves, or that of `jax.set_mesh`.
      adam_learning_rate: of all other leaves, as `learning_rate`; None for the same.
      adam_beta1: of all other leaves; None for `beta1`, and so are the next three.
      adam_beta2: likewise.
      adam_epsilon: likewise.
      adam_weight_decay: likewise.
      moment_dtype: dtype of the moments; None for the parameter's, but at least float32; "8bit" for
        `Blocks`, as in `adam`. Factors are in float32 or wider: codes of a basis would not be
        orthogonal.
      full_precision: with "8bit", leaves that are not stored in 8 bits: a prefix tree of bools, or
        a function of the parameters' `jax.ShapeDtypeStruct`s that returns one.

    Returns:
      A transformation with state `SoapState(step, mw, vw, factors)`.

    Raises:
      ValueError: a Python number out of range, an unknown name, or a packed matrix.
      TypeError: an option of the wrong kind, or no `matrices`.

    Example:
      >>> params = grads = {"embed": jnp.ones((9, 3)), "w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.soap(3e-3, matrices=jgrad.hidden_matrices())
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> jax.tree.map(jnp.shape, state.factors["w"].left), state.factors["b"]
      ((3, 3), None)

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), algorithms 3
      and 4; the first step, the order of columns and corrections: `soap.py` of nikhilvyas/SOAP.
    """
    given = _OPTIONS.check(_NAME, locals())
    method = Soap.of(given)
    options.check_decays(_NAME, weight_decay_rule, weight_decay=weight_decay)
    if adam_weight_decay is not None:
        options.check_decays(_NAME, weight_decay_rule, adam_weight_decay=adam_weight_decay)

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        inputs.check_buffers()
        axes = _per_array(inputs, step.matrices)
        n = given.read(inputs, step)
        new = _of_matrices(inputs, step, method, axes, n)
        of_adam = _numbers_of_adam(given, inputs, step, n)
        g = [x if of is None else None for x, of in zip(inputs.g, axes, strict=True)]
        others, mw, vw = adam_of.adam_of_leaf(g, step.mw, step.vw, of_adam)
        direction = [y and y[0] if x is None else x for x, y in zip(new.direction, others, strict=True)]
        signs = [y and y[1] for y in others]
        columns = zip(signs, new.direction, strict=True)
        signs = [x if y is None else y for y, x in columns]
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
        updates = descent.updates(
            direction, inputs.w, signs if weight_decay_rule == "cautious" else None
        )
        if first_step == "skip":
            is_matrix = [None if x is None else u for u, x in zip(updates, new.direction, strict=True)]
            waiting = leafwise.apply(_zero_at_first, is_matrix, step.number == 1)
            updates = [u if x is None else x for u, x in zip(updates, waiting, strict=True)]
        tree = factors_of.tree_of(inputs, new.factors)
        return updates, _both(new.mw, mw), _both(new.vw, vw), tree

    moments = given.moments(layer_axes=layer_axes)
    return transformation(
        _NAME, compute, shapes_of=method.shapes_of, moments=moments, more=method.fields
    )
