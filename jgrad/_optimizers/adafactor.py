"""Adafactor: factored second moments, and clipped steps in proportion to the weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs, on_leaf
from jgrad._arithmetic.numerics import BetaForms
from jgrad._forms.factors import Factors
from jgrad._inputs import kinds, layer_options, matrix_options, numbers, options
from jgrad._inputs.around import narrow
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.leaf_functions import Descent, average_of_leaf
from jgrad._inputs.matrix_options import LAST
from jgrad._inputs.moment import Moment, Shapes, Step
from jgrad._inputs.transformation import AdafactorState, MomentOptions, transformation
from jgrad._layers import matrix_axes, norms
from jgrad._layers.array_spec import ArraySpec
from jgrad._layers.layer_axes import LayerAxes, read_layer_axes
from jgrad._layers.matrix_axes import MatrixAxes, TwoKinds
from jgrad._layers.trust import quotient
from jgrad._trees import checks, trees
from jgrad._trees.annotations import (
    ArrayAxes,
    Count,
    DecayRule,
    LearningRate,
    Mask,
    MeshAxes,
    MomentDType,
    Number,
    Scalar,
)
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.told import told

AdafactorRule = Literal["paper", "torch"]


class _Options(NamedTuple):
    """What a user chose, beside moments and descent."""

    beta2_decay: Scalar
    beta2_cap: Scalar | None
    epsilon: tuple[Scalar | None, Scalar]
    clip_threshold: Scalar | None
    scale_by_parameter: bool
    min_side: Count
    rule: AdafactorRule
    output_axes: ArrayAxes
    mesh_axes: MeshAxes
    layer_axes: ArrayAxes

    def check(self, function: str) -> None:
        """What a factory can."""
        numbers.scalar(function, "beta2_decay", self.beta2_decay)
        if self.beta2_cap is not None:
            options.check(function, numbers.beta, beta2_cap=self.beta2_cap)
        _check_epsilon(function, self.epsilon, self.rule)
        if (x := self.clip_threshold) is not None:
            numbers.scalars(function, "clip_threshold", x, positive=True)
            numbers.scalar(function, "clip_threshold", x)
        checks.boolean(function, "scale_by_parameter", self.scale_by_parameter)
        checks.count(function, "min_side", self.min_side)
        checks.one_of(function, "rule", self.rule, ("paper", "torch"))
        read_layer_axes(function, self.layer_axes)
        read_layer_axes(function, self.output_axes, "output_axes")


def _check_epsilon(function: str, x: Any, rule: AdafactorRule) -> None:
    begin = f"{function}: `epsilon`"
    if not (isinstance(x, tuple | list) and len(x) == 2):
        expected = "a pair: what is added to squares, and the smallest scale"
        raise TypeError(f"{begin}: {checks.describe(x)}, expected {expected}.")
    for number in x if x[0] is not None else x[1:]:
        numbers.scalar(function, "epsilon", number)
    if x[0] is None and rule != "torch":
        expected = 'two numbers; the first may be None with `rule="torch"`'
        raise TypeError(f"{begin}: {x}, expected {expected}.")


# ---- squares, by rows and columns, on the arrays of one leaf -----------------------------------


def _count(x: jax.Array, over: Sequence[int], axes: MatrixAxes) -> int:
    """How many numbers whole matrices have along some axes; 1 for none."""
    names = axes.sharded_over(over)
    devices = jax.lax.psum(1, names) if names else 1
    return max(1, devices * math.prod(x.shape[axis] for axis in over))


def _mean(x: jax.Array, over: Sequence[int], axes: MatrixAxes) -> jax.Array:
    """The mean of whole matrices over some axes, which stay with size 1."""
    names, total = axes.sharded_over(over), jnp.sum(x, axis=tuple(over), keepdims=True)
    return (jax.lax.psum(total, names) if names else total) / _count(x, over, axes)


def _terms(g: jax.Array, axes: MatrixAxes) -> int:
    """How many numbers the longer sums have."""
    return max(_count(g, over, axes) for over in (axes.inputs, axes.outputs))


@jit_static_kwargs
def _mean_squares(g: jax.Array, *, axes: MatrixAxes) -> Factors:
    """The means of |g|^2 over inputs and over outputs.

    A square counts as at most 2^126 / n where sums have n terms, so that none overflows.
    """
    wide = numerics.wide(g)
    squares = numerics.bounded_square(wide, _terms(g, axes))
    return Factors(*(_mean(squares, over, axes) for over in (axes.inputs, axes.outputs)))


@on_leaf(arrays=1)
def _squares(g: jax.Array) -> jax.Array:
    """|g|^2

    Averages begin with beta2 = 0, so epsilon may be added to them where they are read. In a packed
    buffer padding stays zero.
    """
    return numerics.bounded_square(g)


@jax.custom_jvp
def _inverse_root(x: jax.Array) -> jax.Array:
    """1 / sqrt(x) for x > 0, and its derivatives for every x: x^(-3/2) overflows below 1e-26."""
    return 1 / jnp.sqrt(x)


@_inverse_root.defjvp
def _inverse_root_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    root = _inverse_root(*primals)
    return root, -0.5 * root * quotient(*tangents, *primals)


@jit_static_kwargs
def _inverse_roots(
    rows: jax.Array, columns: jax.Array, least: jax.Array, *, axes: MatrixAxes, rule: AdafactorRule
) -> tuple[jax.Array, jax.Array]:
    """a and b: 1 / sqrt(v) is their product, v = rows columns / (mean of the rows).

    A row counts as at least 2^-126 of the mean, and any number as at least the smallest normal one,
    so that a b times a gradient, whose square is in both averages, does not overflow.
    """
    if rule == "paper":
        rows, columns = (x + least.astype(x.dtype) for x in (rows, columns))
    mean = _mean(rows, axes.outputs, axes)
    if rule == "torch":
        mean = jnp.maximum(mean, least.astype(mean.dtype))
    mean = numerics.positive(mean)
    rows = numerics.positive(jnp.maximum(rows, float(jnp.finfo(rows.dtype).tiny) * mean))
    return jnp.sqrt(mean) * _inverse_root(rows), _inverse_root(numerics.positive(columns))


# A gradient is clipped where its square is, or steps would have no bound.


@on_leaf(arrays=1)
def _by_factors(g: jax.Array, a: jax.Array, b: jax.Array, *, terms: int) -> jax.Array:
    """g / sqrt(v)"""
    return numerics.scaled(numerics.squarable(g, terms), a * b)


@on_leaf(arrays=1)
def _by_bounded_factors(
    g: jax.Array, a: jax.Array, b: jax.Array, least: jax.Array, *, terms: int
) -> jax.Array:
    """g / sqrt(max(v, least^2))"""
    largest = 1 / numerics.positive(least)
    return numerics.scaled(numerics.squarable(g, terms), jnp.minimum(a * b, largest))


@on_leaf(arrays=1)
def _by_elements(g: jax.Array, v: jax.Array, added: jax.Array) -> jax.Array:
    """g / sqrt(v + added)"""
    return numerics.scaled(numerics.squarable(g), _inverse_root(numerics.positive(v + added)))


@on_leaf(arrays=1)
def _by_bounded_elements(g: jax.Array, v: jax.Array, least: jax.Array) -> jax.Array:
    """g / sqrt(max(v, least^2))"""
    root = _inverse_root(numerics.positive(jnp.maximum(v, least * least)))
    return numerics.scaled(numerics.squarable(g), root)


# ---- on vectors with an entry per layer --------------------------------------------------------


@on_leaf(arrays=1)
def _clip(norm: jax.Array, inverse: jax.Array, threshold: jax.Array) -> jax.Array:
    """1 / max(1, RMS(u) / threshold); `inverse` is 1 / sqrt(elements of a layer)"""
    rms = norm * inverse
    return threshold / jnp.maximum(threshold, rms)


@on_leaf(arrays=1)
def _scale(norm: jax.Array, inverse: jax.Array, least: jax.Array) -> jax.Array:
    """max(least, RMS(w))"""
    return jnp.maximum(least, norm * inverse)


# ---- which leaves are factored -----------------------------------------------------------------


def _shapes(inputs: Parameters, chosen: _Options, *, mw: bool) -> Shapes:
    """The shapes of the moments; and where the matrices are of each leaf that is factored."""
    matrices = _matrices(inputs, chosen)
    first = {"mw": inputs.tree} if mw else {}
    vw = matrix_options.with_shapes_of_matrices(inputs, matrices, _shape)
    return Shapes(first | {"vw": vw}, matrices)


def _shape(x: Any, axes: MatrixAxes) -> Factors:
    reduced = (axes.inputs, axes.outputs)
    shapes = [[1 if i in over else n for i, n in enumerate(x.shape)] for over in reduced]
    return Factors(*(jax.ShapeDtypeStruct(tuple(shape), x.dtype) for shape in shapes))


def _matrices(inputs: Parameters, chosen: _Options) -> dict[int, MatrixAxes]:
    """Where the matrices of leaves are that are factored; an error if one is packed."""
    leaves = trees.flatten(inputs.shapes)[0]
    stacked = layer_options.stacked_axes(inputs, chosen.layer_axes)
    counts = {i: len(stacked.leaves[i].values) for i, x in enumerate(leaves) if np.ndim(x) > 1}
    for spec in inputs.specs:
        for i, span in zip(spec.positions, spec.spans, strict=False):
            counts[i] = max(counts.get(i, 0), len(span.layers.stacked))
    is_matrix = [np.ndim(x) - counts.get(i, 0) > 1 for i, x in enumerate(leaves)]
    axes = chosen.output_axes, chosen.mesh_axes
    matrices = matrix_options.find(inputs, is_matrix, stacked, *axes)
    factored = {i: x for i, x in matrices.items() if min(x.whole.sizes) >= chosen.min_side}
    for i in matrix_options.packed(inputs, factored):
        arg = ArgLeaves.from_tree(inputs.function, inputs.reference.name, inputs.shapes)
        remedy = "which is factored, expected it unpacked: `pack_small`, or `max_size` of `pack`"
        arg.fail(i, ValueError, f"a packed matrix of shape {leaves[i].shape}, {remedy}")
    return factored


# ---- the method, on lists of leaves ------------------------------------------------------------


def _direction(inputs: Inputs, step: Step, chosen: _Options) -> tuple[list[Call], list[Any]]:
    """The calls that divide gradients by the roots of their averaged squares; and these."""
    name, both = inputs.function, TwoKinds.of(inputs.specs, step.matrices)
    is_torch = chosen.rule == "torch"
    first = chosen.epsilon[0]
    of_dtypes = [float(jnp.finfo(x.dtype).eps) for x in inputs.reference.leaves]  # as in PyTorch
    least: list[Any] = of_dtypes if first is None else [first] * len(of_dtypes)
    known = {x: jnp.asarray(numbers.scalar(name, "epsilon", x)) for x in dict.fromkeys(least)}
    least = [known[x] for x in least]
    beta = _beta2(name, chosen, step)

    g = list(map(_as_read_in_branches, inputs.g))
    axes, (matrix_gradients, floors) = both.axes, leafwise.at((g, least), both.first)
    means = matrix_axes.on_matrices(_mean_squares, axes, matrix_gradients)
    vw = step.moments["vw"].at(both.first)
    (rows, new_rows), (columns, new_columns) = (
        average_of_leaf([x[k] for x in means], _part(vw, field), beta)
        for k, field in enumerate(Factors._fields)
    )
    factors = rows, columns, floors
    roots = matrix_axes.on_matrices(_inverse_roots, axes, *factors, rule=chosen.rule)
    by_factors: list[Call] = []
    for x, where, ab, floor in zip(matrix_gradients, axes, roots, floors, strict=True):
        by = _by_bounded_factors if is_torch else _by_factors
        bounded = leafwise.fixed(by, terms=_terms(x, where))
        by_factors.append((bounded, (x, *ab, floor) if is_torch else (x, *ab)))

    others, floors = leafwise.at((g, least), both.second)
    squares = step.moments["vw"].at(both.second)
    elements, new_elements = average_of_leaf(leafwise.apply(_squares, others), squares, beta)
    by = _by_bounded_elements if is_torch else _by_elements
    by_elements = [(by, x) for x in zip(others, elements, floors, strict=True)]
    u = both.together(by_factors, by_elements)
    return u, both.together(list(map(Factors, new_rows, new_columns)), new_elements)


def _part(moment: Moment, name: str) -> Moment:
    """The rows of all leaves, or their columns."""
    random = None if moment.random is None else moment.random.of_parts()
    old = [getattr(x, name) for x in moment.old]
    return dataclasses.replace(moment, old=old, random=random)


def _beta2(name: str, chosen: _Options, step: Step) -> BetaForms:
    """min(1 - t^-decay, cap), and the rest to 1, which is computed and not the difference."""
    decay = numbers.scalar(name, "beta2_decay", chosen.beta2_decay)
    rest = step.as_float ** -jnp.asarray(decay, step.as_float.dtype)
    if chosen.beta2_cap is not None:
        cap = numbers.beta(name, "beta2_cap", chosen.beta2_cap)
        rest = jnp.maximum(rest, jnp.asarray(cap.complement, rest.dtype))
    rest = numerics.once(rest)
    return BetaForms(1 - rest, rest, None)


def _as_read_in_branches(x: Any) -> Any:
    """In the dtype of the parameter, since XLA writes what a branch reads.

    Not in a layer of `step_in_backward`, where XLA then writes the layer in both dtypes.
    """
    return narrow(x) if told().share is None else x


def _factors(inputs: Inputs, u: Sequence[Call], chosen: _Options) -> list[list[jax.Array]]:
    """Of each array what its direction is multiplied by: its clip and the scale of its weights."""
    name = inputs.function
    factors: list[list[jax.Array]] = [[] for _ in u]
    axes = layer_options.layers(inputs, chosen.mesh_axes, chosen.layer_axes)
    in_order = sorted(range(len(u)), key=lambda i: axes[i].sort_key)
    layers = [axes[i] for i in in_order]
    measured: list[tuple[list[Call], Function, Scalar]] = []
    if chosen.clip_threshold is not None:
        threshold = numbers.scalar(name, "clip_threshold", chosen.clip_threshold)
        measured.append(([u[i] for i in in_order], _clip, threshold))
    if chosen.scale_by_parameter:
        w = inputs.require_params("the scale of the weights")
        weights = [(leafwise.identity, (_as_read_in_branches(w[i]),)) for i in in_order]
        measured.append((weights, _scale, numbers.scalar(name, "epsilon", chosen.epsilon[1])))
    if not (u and measured):
        return factors
    roots = [_inverse_root_of_size(inputs.specs[i], axes[i]) for i in in_order]
    sizes = norms.in_batches(layers, roots)
    sizes_now = norms.layer_norms(layers, *(calls for calls, *_ in measured))
    for (_, rule, bound), batches in zip(measured, sizes_now, strict=True):
        numbers_here = [
            rule(x, jnp.concatenate(size), jnp.asarray(bound))
            for x, size in zip(batches, sizes, strict=True)
        ]
        for i, x in zip(in_order, norms.split(layers, numbers_here), strict=True):
            factors[i].append(x)
    return factors


def _inverse_root_of_size(spec: ArraySpec, layers: LayerAxes) -> jax.Array:
    """1 / sqrt(elements) of each layer, of all devices that have a part of it."""
    shard_axes = () if spec.shard is None else spec.shard.axes
    names = tuple(name for name in layers.mesh_axes if name not in shard_axes)
    devices = jax.lax.psum(1, names) if names else 1
    sizes = [
        max(1, leaf.layer_size * devices)
        for leaf in spec.layers_of_leaves(layers)
        for _ in range(leaf.num_layers)
    ]
    roots = 1 / np.sqrt(np.array(sizes))
    if len(set(sizes)) == 1:  # a scalar: with an array, JAX keeps a trace that fails
        return jnp.full(len(sizes), roots[0], float)
    return jnp.asarray(roots, float)


# ---- transformation ----------------------------------------------------------------------------


@explained
def adafactor(
    learning_rate: LearningRate,
    *,
    momentum: Number | None = None,
    beta2_decay: Scalar = 0.8,
    beta2_cap: Scalar | None = None,
    epsilon: tuple[Scalar | None, Scalar] = (1e-30, 1e-3),
    clip_threshold: Scalar | None = 1.0,
    scale_by_parameter: bool = True,
    min_side: Count = 128,
    weight_decay: Number = 0.0,
    weight_decay_mask: Mask | None = None,
    weight_decay_rule: DecayRule = "decoupled",
    rule: AdafactorRule = "paper",
    output_axes: ArrayAxes = LAST,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    moment_dtype: MomentDType = None,
    full_precision: Mask | None = None,
) -> Transformation[AdafactorState]:
    """Adafactor, which stores the second moments of matrices as averages over rows and columns.

        beta2 = min(1 - t^-beta2_decay, beta2_cap)
        r'    = beta2 r + (1 - beta2) (mean of |g|^2 over inputs + epsilon[0])
        c'    = beta2 c + (1 - beta2) (mean of |g|^2 over outputs + epsilon[0])
        u     = g / sqrt(v),  v = r' c' / (mean of r')
        d     = learning_rate max(epsilon[1], RMS(w)) u / max(1, RMS(u) / clip_threshold)
        m'    = momentum m + (1 - momentum) d                        (without momentum: d)
        w'    = w - m' - learning_rate weight_decay w

    where r has one value per output of a matrix, and c one per input. A leaf that is not a matrix,
    or has a side shorter than `min_side`, keeps all of v instead:
    `v' = beta2 v + (1 - beta2) (|g|^2 + epsilon[0])`. RMS is the root mean square over a layer,
    which is one leaf unless `layer_axes` says otherwise. The averages are in float32 even for
    half-precision weights, and in float64 for float64.

    The paper uses the learning rate `min(0.01, 1 / sqrt(t))`, which is `lambda done:
    jnp.minimum(0.01, (1 + done) ** -.5)`.

    Args:
      learning_rate: a number in [0, inf), an array, or a schedule, which is a function of the
        number of completed updates (0 for the first); or a prefix tree or `by_path` of these.
        `update(..., learning_rate=x)` overrides it for one call; `momentum` and `weight_decay` can
        be overridden in the same way.
      momentum: in [0, 1): a number, a schedule, or a tree of these. With None there is no first
        moment.
      beta2_decay: in [0, inf).
      beta2_cap: upper bound of beta2, in [0, 1); None for no bound. Zhai et al. use 0.999.
      epsilon: a pair of numbers in [0, inf): what is added to squared gradients, and the smallest
        scale.
      clip_threshold: the RMS of u at which it is clipped, above 0; None for no clipping.
      scale_by_parameter: whether steps are proportional to the RMS of their weights.
      min_side: smallest number of outputs, and of inputs, with which a matrix is factored.
      weight_decay: in [0, inf): a number, a schedule, or a tree of these. It is not multiplied by
        the RMS of the weights.
      weight_decay_mask: a prefix tree of bools, or a function that returns one from the parameters'
        `jax.ShapeDtypeStruct`s. Leaves marked False have no weight decay.
      weight_decay_rule: "decoupled" as above. "cautious" decays only the weights that the step
        moves towards zero, as in `adam`. "independent": w' = w - m' - weight_decay w, with a weight
        decay in [0, 1), as in `optax.adafactor`.
      rule: "paper" as above, or "torch" for `torch.optim.Adafactor`. There, epsilon[0] isn't added
        to anything: it is the lower bound of the mean of r', and its square that of v. If it is
        None, it is the machine epsilon of the weights' dtype. Also, d uses min(learning_rate, 1 /
        sqrt(t)) as the learning rate. PyTorch has `min_side=1`.
      output_axes: which axes of a leaf are outputs: an int, a tuple of ints, or a prefix tree of
        these. All others except `layer_axes` are inputs. The default, the last axis, fits flax and
        haiku; use 0 for equinox and PyTorch. This only matters for leaves with three or more axes.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map`, factors need
        PartitionSpecs, as in `muon`.
      layer_axes: axes along which a leaf stacks layers, as for `lax.scan`: an int, a tuple of ints,
        None, or a prefix tree of these. Each layer has its own averages, clipping and scale.
      moment_dtype: dtype of m. None uses the parameter's dtype, but at least float32; "8bit" stores
        `Blocks`, as in `adam`.
      full_precision: with "8bit", the leaves whose m is not stored in 8 bits: a prefix tree of
        bools, or a function that returns one from the parameters' `jax.ShapeDtypeStruct`s.

    Returns:
      A transformation with state `AdafactorState(step, mw, vw)`; `mw` is None without momentum, and
      `vw` has `Factors` for factored leaves, which cannot be packed.

    Raises:
      ValueError: a Python number is out of range, or a matrix is packed.
      TypeError: an option has the wrong type.

    Example:
      >>> params = grads = {"w": jnp.ones((512, 256), jnp.bfloat16), "b": jnp.zeros(256)}
      >>> tx = jgrad.stochastic_rounding(jgrad.adafactor(1e-2))
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> jax.tree.map(jnp.shape, state.inner.vw)
      {'b': (256,), 'w': Factors(rows=(1, 256), columns=(512, 1))}

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
      (2018), algorithms 4 to 6; momentum as in tensor2tensor; the cap: Zhai et al., "Scaling Vision
      Transformers" (2022), section 3.4; "torch": `torch.optim.Adafactor` of 2.5.
    """
    name, buffer = "adafactor", kinds.Beta("momentum", momentum, is_optional=True)
    chosen = _Options(
        beta2_decay=beta2_decay,
        beta2_cap=beta2_cap,
        epsilon=epsilon,
        clip_threshold=clip_threshold,
        scale_by_parameter=scale_by_parameter,
        min_side=min_side,
        rule=rule,
        output_axes=output_axes,
        mesh_axes=mesh_axes,
        layer_axes=layer_axes,
    )
    descent = kinds.DescentOptions.of(
        learning_rate, weight_decay, weight_decay_mask, weight_decay_rule
    )
    descent.check(name)
    buffer.check(name)
    chosen.check(name)

    def compute(inputs: Inputs, step: Step) -> tuple[Any, ...]:
        inputs.check_buffers()
        all_rates = descent.learning_rate.read(inputs, step)
        decay = rules.optional(descent.weight_decay.read(inputs, step))
        u, vw = _direction(inputs, step, chosen)
        rates = leafwise.per_leaf(all_rates, len(u))
        if rule == "torch":
            most = step.as_float**-0.5
            rates = [jnp.minimum(x, most.astype(x.dtype)) for x in rates]
        columns = zip(leafwise.run(u), _factors(inputs, u, chosen), rates, strict=True)
        d = leafwise.run([(rules.scale_by, (x, *by, rate)) for x, by, rate in columns])
        descent_now = Descent(decay, all_rates, weight_decay_rule, has_rate=True)
        if (beta := kinds.momentum_of(buffer, inputs, step)) is None:
            return descent_now.updates(d, inputs.w), vw
        mw = step.moments["mw"]
        updates, mw = average_of_leaf.update(inputs, d, mw, beta, descent=descent_now)
        return updates, mw, vw

    return transformation(
        name,
        compute,
        shapes_of=functools.partial(_shapes, chosen=chosen, mw=momentum is not None),
        moments=MomentOptions(moment_dtype, full_precision, layer_axes, mesh_axes, of_first=True),
        params_for="the scale of the weights" if scale_by_parameter else None,
        state_type=AdafactorState,
    )
