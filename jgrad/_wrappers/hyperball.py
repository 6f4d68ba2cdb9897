"""Matrices that keep their norm, so that each step moves them along a sphere.

With r the norm that a layer keeps, u the direction and eta the learning rate,

    w' = r n / |n|,  n = w + a u,  a = eta r / |u|

is computed as w' - w = (s - 1) w + s a u with s = r / |n|. The norms |w| and |u| and <w, u> give
d = (|n|^2 - r^2) / r^2, and s - 1 = -d / (sqrt(1 + d) (1 + sqrt(1 + d))), without cancellation;
and a norm that has drifted from r comes back. `_layers/products.py` has them at every scale.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import on_leaf
from jgrad._inputs import kinds, layer_options, numbers, options
from jgrad._inputs.inputs import OTHER_LEAVES, Inputs, Parameters
from jgrad._inputs.moment import Step
from jgrad._inputs.pair import counter, pair
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes, all_names, axis_exists
from jgrad._layers.products import norms_and_products
from jgrad._trees import checks, leaf_names, trees, variables
from jgrad._trees.annotations import ArrayAxes, Inner, LearningRate, Mask, MeshAxes, Prefix, Scalar
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import Leaf, PyTree, state_of
from jgrad._trees.told import note, told
from jgrad._wrappers import inside, watch
from jgrad._wrappers.hand_over import WrapperInputs


def steps_on_sphere(
    w: Sequence[Leaf],
    u: Sequence[Leaf],
    radii: Mapping[int, jax.Array],
    rates: Sequence[ArrayLike],
    layers: Sequence[LayerAxes],
) -> list[Leaf]:
    """What is added to each array.

    Args:
      w: weights.
      u: directions, as they are added; None where there is none.
      radii: by position, for some arrays the norms of their layers. A layer with 0, and any other
        array, takes `u` as it is.
      rates: an entry per array.
      layers: where the layers are.
    """
    chosen = [i for i in radii if checks.is_array(u[i])]
    chosen.sort(key=lambda i: layers[i].sort_key)
    results = list(u)
    # Batches have the same precision, because units in float64 say nothing about squares in
    # float32. And they vary alike, because one condition serves all of them: see `layer_norms`.
    groups: dict[tuple[np.dtype, tuple[str, ...]], list[int]] = {}
    for i in chosen:
        key = numerics.real_dtype(w[i], u[i]), layers[i].varying
        groups.setdefault(key, []).append(i)
    for members in groups.values():
        columns: list[Any] = [[x[i] for i in members] for x in (w, u, radii, rates, layers)]
        for i, step in zip(members, _steps_alike(*columns), strict=True):
            results[i] = step
    return results


def _steps_alike(
    w: Sequence[jax.Array],
    u: Sequence[jax.Array],
    radii: Sequence[jax.Array],
    rates: Sequence[ArrayLike],
    layers: Sequence[LayerAxes],
) -> list[jax.Array]:
    """What is added to arrays with the same precision, which vary alike and all have radii."""
    real = numerics.real_dtype(w[0], u[0])
    radius = list(map(norms.concatenate, norms.in_batches(layers, [r.astype(real) for r in radii])))
    if real == jnp.float64:
        w, u = ([numerics.widen(x, real) for x in arrays] for arrays in (w, u))
    batches = norms_and_products(list(w), list(u), layers=tuple(layers))
    factors = [
        _factors(*of_w, *of_u, product, r, rate)
        for (of_w, of_u, product), r, rate in zip(
            batches, radius, norms.join(layers, rates), strict=True
        )
    ]
    per_factor = [norms.split(layers, vectors) for vectors in zip(*factors, strict=True)]
    return leafwise.run([(_moved, args) for args in zip(w, u, *per_factor, strict=True)])


@on_leaf(arrays=2)
def _moved(w: jax.Array, u: jax.Array, shrink: jax.Array, *factors: jax.Array) -> jax.Array:
    """(s - 1) w + (product of factors) u, one after the other: their product may overflow"""
    return numerics.scaled(w, shrink) + functools.reduce(numerics.scaled, factors, u)


@on_leaf(arrays=2)
def _factors(
    w_norm: jax.Array,
    w_scale: jax.Array,
    u_norm: jax.Array,
    u_scale: jax.Array,
    product: jax.Array,
    radius: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, ...]:
    """s - 1, and the factors of u, layer by layer, from norms and products in their scales."""
    is_kept = radius > 0
    # Where no norm is kept, a number with finite derivatives, which are then multiplied by 0.
    r = jnp.where(is_kept, radius, jnp.ones_like(radius))
    # Bounds that only affect rounding, and prevent overflow: if |w| is 2 / eps times the radius, a
    # sum with w rounds new weights to zeros, and with a rate that is the square of this, only the
    # direction of u is left. By a power of two, s - 1 is -1.
    info = jnp.finfo(w_norm.dtype)
    far = 2 / float(info.eps)
    rate = jnp.minimum(rate, far**2)
    w_value = norms.ScaledNorm(w_norm, w_scale).value()
    old = jnp.minimum(w_value / r, far)
    excess = jnp.minimum((w_value - r) / r, far) * (old + 1)
    cosine = numerics.safe_divide(numerics.safe_divide(product, w_norm), u_norm)
    moved = 2 * rate * old * cosine + rate * rate
    d = excess + moved
    # 1 + d, in which small weights and a small rate are not lost beside 1. A new weight that
    # vanishes has no direction: below this bound, it would be rounding noise.
    squares = old * old
    norm = jnp.sqrt(jnp.maximum(squares + moved, info.eps * (squares + rate * rate) + info.tiny))
    shrink = jnp.where(is_kept & (u_norm != 0), -d / (norm * (1 + norm)), jnp.zeros_like(d))
    along = numerics.safe_divide(rate, u_norm)  # 0 without a direction
    factors = (1 / u_scale, along / norm, radius)
    return shrink, *(jnp.where(is_kept, x, jnp.ones_like(d)) for x in factors)


_NAME = "hyperball"


@state_of("hyperball", done="step", radius="like")
class HyperballState(NamedTuple, Generic[Inner]):
    """State of `hyperball`. Field names are part of the checkpoint format.

    Attributes:
      done: number of completed updates, an int32 scalar; it saturates.
      radius: the norm of each matrix, in float32 or wider: a tree like the parameters, in their
        shapes but with size 1 along the axes of a matrix; None for other leaves. A matrix whose
        norm is 0 or NaN gets the plain updates of `tx`.
      inner: state of the transformation inside.

    Example:
      >>> tx = jgrad.hyperball(jgrad.adam(1e-3), 0.02, leaves={"w": True, "b": False}, layer_axes=0)
      >>> state = tx.init({"w": jnp.ones((12, 3, 2)), "b": jnp.zeros((12, 2))})
      >>> int(state.done), state.radius["w"].shape, state.radius["b"]
      (0, (12, 1, 1), None)
      >>> print(state.describe())
      w  12 matrices  2.45 to 2.45
    """

    done: jax.Array
    radius: PyTree
    inner: Inner

    def describe(self) -> str:
        """A line for each leaf that keeps its norm: its path, its matrices, and their norms."""
        radii = variables.leaves_with_paths(self.radius)
        return leaf_names.table([_row(leaf_names.shown(path), np.asarray(r)) for path, r in radii])


def _row(name: str, radius: np.ndarray) -> tuple[str, ...]:
    kept = radius[radius > 0]
    count = f"{radius.size} {'matrix' if radius.size == 1 else 'matrices'}"
    words = [f"{kept.min():.3g} to {kept.max():.3g}"] if kept.size else []
    for norm, those in (("0", radius == 0), ("nan", np.isnan(radius))):
        if np.any(those):
            words.append(f"{np.count_nonzero(those)} of norm {norm}, moved by `tx` alone")
    return name, count, "; ".join(words)


@explained
def hyperball(
    tx: AnyTransformation[Inner],
    learning_rate: LearningRate,
    *,
    leaves: Mask,
    mesh_axes: MeshAxes = None,
    layer_axes: ArrayAxes = None,
    radius: Scalar | Prefix | Callable[[tuple[int, ...]], PyTree] | None = None,
) -> Transformation[HyperballState[Inner]]:
    """Keeps the norms of chosen matrices fixed, and rotates each towards the update of `tx`.

        w' = R (w + learning_rate R u / |u|) / |w + learning_rate R u / |u||

    where u is the update of `tx`, |.| the 2-norm of a matrix, and R its norm at `init`. The
    magnitude of u cancels, and with it the learning rate of `tx`: each step rotates a matrix by
    about `learning_rate`, in radians. Around `adam` this is AdamH, around `muon` MuonH. A matrix
    whose update is zero does not move. All sums are in float32 or wider, and none overflows or
    underflows. Each step corrects the norm, so it does not drift. Since the update is added as a
    difference, a matrix that starts out 1e7 times too large is rounded to zeros in its first step,
    and has the right norm from the second.

    A matrix that is zero at `init` has no norm to keep, so it gets the plain updates of `tx`, with
    the learning rate of `tx`. `state.describe()` shows such matrices; `radius` gives them a norm,
    which they have from the first step.

    Put it around the optimizer, and `master_weights` or `stochastic_rounding` around it. The norm
    of bfloat16 weights is only exact up to rounding. Clipping, inside or outside, affects the
    chosen leaves only through the moments of `adam` or `muon`.

    Args:
      tx: any transformation. Weight decay makes no sense for chosen leaves, because their norm is
        fixed. In jgrad's own transformations it raises an error; in others it cannot be detected,
        so turn it off.
      learning_rate: the angle of each step for chosen leaves: a number in [0, inf), or a schedule,
        which is a function of the number of completed updates (0 for the first); or a prefix tree
        or `by_path` of these. `update(..., hyperball_learning_rate=x)` overrides it for one call.
        Other leaves use the learning rate of `tx`.
      leaves: which leaves keep their norm: a prefix tree of bools, or a function that returns one
        from the parameters' `jax.ShapeDtypeStruct`s, such as `hidden_matrices()`. Required. None
        and integers are never chosen. A fused leaf, such as one that `muon(split=...)` splits, has
        a single norm.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, norms are
        then those of whole matrices. Don't name axes over which whole layers or experts are
        sharded; a PartitionSpec may have them. Each set of axes costs one all-reduce.
      layer_axes: axes along which a leaf stacks matrices, such as layers for `lax.scan` or experts,
        each with its own norm: an int, a tuple of ints, None, or a prefix tree of these.
      radius: the norms to keep, in (0, inf), instead of those at `init`: a number, a function of
        the shape of a matrix, or a prefix tree or `by_path` of these. Only `init` reads it;
        existing states keep their norms.

    Returns:
      A transformation with state `HyperballState(done, radius, inner)`. `update` needs the
      parameters.

    Raises:
      ValueError: a Python number is out of range; from `init`, a wrapper that belongs outside is
        inside, or a `scale_by_*` without a learning rate after it; from `update`, a chosen leaf has
        weight decay, or the state was made for another choice of leaves.
      TypeError: an option has the wrong type, or `leaves` is missing.

    Example:
      >>> params = {"embed": jnp.ones((9, 3)), "w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = {"embed": jnp.ones((9, 3)), "w": jnp.eye(3, 2), "b": jnp.zeros(2)}
      >>> tx = jgrad.hyperball(jgrad.adam(3e-4), 0.02, leaves=jgrad.hidden_matrices())
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> f"{jnp.linalg.norm(params['w']):.4f}", state.radius["w"].shape
      ('2.4495', (1, 1))

    Source: Wen et al., "Hyperball" (2026), arXiv 2606.16899, as AdamH, MuonH and NorMuonH.
    """
    tx = inside.transformation(_NAME, tx)
    if leaves is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes"
        raise TypeError(f"{_NAME}: `leaves`: None, expected {expected}; {remedy}.")
    kinds.Number("learning_rate", learning_rate).check(_NAME)
    options.check_masks(_NAME, leaves=leaves)
    layer_options.check_axes(_NAME, mesh_axes, layer_axes)
    if radius is not None:
        options.check(_NAME, functools.partial(numbers.scalars, positive=True), radius=radius)

    def init(params: PyTree) -> HyperballState:
        inputs = Parameters(_NAME, params)
        checks.parameters(inputs.reference)
        chosen = _keeping(inputs, leaves)
        # Outside of `shard_map`, leaves are whole.
        is_sharded = any(map(axis_exists, all_names(_NAME, mesh_axes)))
        axes = layer_options.layers(inputs, mesh_axes if is_sharded else None, layer_axes)
        if radius is None:
            radii = _measured(inputs, axes, chosen)
        else:
            radii = _radii_of_option(inputs, axes, chosen, radius)
        tree = trees.flatten(inputs.shapes)[1].unflatten(map(radii.get, range(len(chosen))))
        return HyperballState(counter(params), tree, tx.init(params))

    def update(
        updates: PyTree,
        state: HyperballState,
        params: PyTree = None,
        *,
        hyperball_learning_rate: PyTree = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, HyperballState]:
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        w = inputs.require_params("the norm")
        chosen = _keeping(inputs, leaves)
        axes = layer_options.layers(inputs, mesh_axes, layer_axes)
        radii = _radii_of_state(inputs, axes, chosen, state.radius)
        undecayed = _Undecayed(inputs, chosen, told().undecayed)
        steps, inner = inputs.hand_over(tx, updates, state.inner, params, undecayed=undecayed)
        done = jnp.asarray(state.done)
        rate = kinds.Number("learning_rate", learning_rate)
        if hyperball_learning_rate is not None:
            rate = kinds.Number("hyperball_learning_rate", hyperball_learning_rate)
            rate.check(_NAME)
        rates = rate.read(inputs, Step.of_count(done))
        if not isinstance(rates, list):
            note(told().notes, "hyperball_learning_rate", rates)
        u = trees.flatten(steps)[0]
        new = steps_on_sphere(w, u, radii, leafwise.per_leaf(rates, len(u)), axes)
        done = optax.safe_increment(done)
        return inputs.directions(new), HyperballState(done, state.radius, inner)

    return pair(init, update, _NAME, HyperballState)


class _Undecayed:
    """The leaves whose norm is kept, where weight decay makes no sense."""

    def __init__(self, inputs: Inputs, chosen: Sequence[bool], outer: _Undecayed | None) -> None:
        """Those that are chosen, and those of a wrapper around."""
        names = itertools.compress(leaf_names.names(inputs.shapes), chosen)
        self._names: set[str] = {*names, *(outer._names if outer is not None else ())}

    def check(self, inputs: Inputs, name: str, decays: Sequence[Leaf]) -> None:
        """An error for a decay of one of them."""
        for path, x in zip(leaf_names.names(inputs.shapes), decays, strict=True):
            number = numbers.as_python_number(x)
            if path in self._names and not rules.is_zero(number):
                expected = "0 for a leaf whose norm `hyperball` keeps, as by `weight_decay_mask`"
                came = f"{number:g}" if checks.is_number(number) else checks.describe(x)
                if isinstance(x, jax.Array):
                    expected += f"; {checks.INJECTED}"
                came = f"{came} at {path!r}"
                raise ValueError(f"{inputs.function}: `{name}`: {came}, expected {expected}.")


def _keeping(inputs: Parameters, leaves: Mask) -> list[bool]:
    """Whether each leaf keeps its norm; those that have none, None and integers, do not."""
    shapes = trees.flatten(inputs.shapes)[0]
    return [
        use and x is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        for use, x in zip(options.mask(inputs, "leaves", leaves), shapes, strict=True)
    ]


# ---- radii, with an entry per leaf of the unpacked tree ----------------------------------------


def _matrices(inputs: Parameters, axes: Sequence[LayerAxes]) -> dict[int, LayerAxes]:
    """Where the matrices of each leaf are; packed trees may have leaves that are None."""
    return {
        i: layers_of_leaf
        for spec, layers_of_array in zip(inputs.specs, axes, strict=True)
        for i, layers_of_leaf in zip(
            spec.positions, spec.layers_of_leaves(layers_of_array), strict=True
        )
    }


def _shape(matrices: LayerAxes) -> tuple[int, ...]:
    """The shape of the radii of a leaf."""
    return tuple(n if axis in matrices.stacked else 1 for axis, n in enumerate(matrices.shape))


def _measured(
    inputs: Parameters, axes: Sequence[LayerAxes], chosen: Sequence[bool]
) -> dict[int, jax.Array]:
    """The norms of the parameters."""
    specs = enumerate(inputs.specs)
    measured = [k for k, spec in specs if any(chosen[i] for i in spec.positions)]
    _, per_array = watch.norms_per_array(inputs.reference.leaves, axes, measured)
    matrices, shapes = _matrices(inputs, axes), inputs.updated_shapes().leaves
    radii: dict[int, jax.Array] = {}
    for i, layers_of_array in per_array.items():
        spec = inputs.specs[i]
        for j, norm in zip(spec.positions, spec.per_leaf(layers_of_array, axes[i]), strict=True):
            if chosen[j]:
                # A batch of norms has the widest dtype among them.
                real = numerics.real_dtype(shapes[j])
                radii[j] = norm.reshape(_shape(matrices[j])).astype(real)
    return radii


def _radii_of_option(
    inputs: Parameters, axes: Sequence[LayerAxes], chosen: Sequence[bool], radius: PyTree
) -> dict[int, jax.Array]:
    """The norms that a user gives by `radius`."""
    is_function = trees.may_be_function(radius) and trees.is_function(radius, inputs.shapes)
    arg = inputs.option("radius", True if is_function else radius)
    shapes = inputs.updated_shapes().leaves
    radii: dict[int, jax.Array] = {}
    for i, matrices in _matrices(inputs, axes).items():
        if not chosen[i]:
            continue
        norm = radius if is_function else arg.leaves[i]
        if callable(norm):
            shape = tuple(matrices.shape[axis] for axis in matrices.within)
            norm = options.result_of(_NAME, "radius", "the shape of a layer", norm, shape)
        real = numerics.real_dtype(shapes[i])
        radii[i] = jnp.full(_shape(matrices), _positive(arg, i, norm), real)
    return radii


def _positive(arg: ArgLeaves, i: int, x: Leaf) -> Leaf:
    """One number; an array of one element passes, since it may be traced."""
    x = numbers.as_python_number(x)
    is_array = checks.is_array(x) and x.size == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    if not (is_array or (checks.is_number(x) and 0 < x < math.inf)):
        error, came = (ValueError, x) if checks.is_number(x) else (TypeError, checks.describe(x))
        arg.fail(i, error, f"{came}, expected a number in (0, inf)")
    return x.reshape(()) if is_array else x


def _radii_of_state(
    inputs: Inputs, axes: Sequence[LayerAxes], chosen: Sequence[bool], tree: PyTree
) -> dict[int, jax.Array]:
    """The radii of the matrices of each array, as a vector; 0 for leaves that keep no norm.

    By position; none for an array of which no leaf keeps it.
    """
    name = "state.radius"
    checks.same_structure(_NAME, name, tree, "params", inputs.shapes, remedy=OTHER_LEAVES)
    arg = ArgLeaves.from_tree(_NAME, name, tree).with_arrays()
    matrices = _matrices(inputs, axes)
    for i, (r, use) in enumerate(zip(arg.leaves, chosen, strict=True)):
        shape = _shape(matrices[i]) if use else None
        if getattr(r, "shape", None) != shape:
            expected = f"an array of shape {shape}" if use else "None for a leaf that is not chosen"
            arg.fail(i, ValueError, f"{checks.describe(r)}, expected {expected}; {OTHER_LEAVES}")

    radii: dict[int, jax.Array] = {}
    for k, spec in enumerate(inputs.specs):
        if dtypes := {arg.leaves[i].dtype for i in spec.positions if chosen[i]}:
            (real,) = dtypes
            vectors = [
                arg.leaves[i].reshape(-1) if chosen[i] else jnp.zeros(matrices[i].num_layers, real)
                for i in spec.positions
            ]
            radii[k] = jax.lax.concatenate(vectors, 0)
    return radii
