"""Weights that keep their norm: each step moves along a sphere."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._inputs import numbers, options
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.moment import Step
from jgrad._inputs.options import LearningRate, Mask
from jgrad._inputs.state import counter
from jgrad._inputs.transformation import pair
from jgrad._layers.layer_axes import LayerAxes, axis_exists
from jgrad._packed.array_spec import ArraySpec
from jgrad._trees import checks, path_rules, trees, variables
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.made_by import Transformation
from jgrad._trees.other_names import explained
from jgrad._trees.protocols import state_of
from jgrad._trees.told import note, told
from jgrad._trees.trees import PyTree
from jgrad._wrappers import decisions, hypersphere, inside, measures
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "hyperball"


@state_of("hyperball", done="step", radius="like")
class HyperballState(NamedTuple):
    """State of `hyperball`. The field names are a file format: checkpoints hold them.

    Attributes:
      done: number of updates, an int32 scalar; it saturates.
      radius: the norm of each matrix, in float32 or wider: a tree like the parameters, of their
        shapes with size 1 along the axes of a matrix; None for other leaves. 0 is a matrix of
        zeros or without elements, which `tx` alone moves, as it does one of norm NaN.
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
    inner: PyTree

    def describe(self) -> str:
        """A line for each leaf that keeps its norm: its path, its matrices, and their norms."""
        radii = variables.leaves_with_paths(self.radius)
        return path_rules.table([_row(path_rules.shown(path), np.asarray(r)) for path, r in radii])


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
    tx: optax.GradientTransformation,
    learning_rate: LearningRate,
    *,
    leaves: Mask,
    mesh_axes: PyTree = None,
    layer_axes: PyTree = None,
    radius: PyTree | Callable[[tuple[int, ...]], Any] = None,
) -> Transformation:
    """Keeps the norms of chosen matrices fixed, and turns each along the update of `tx`.

        w' = R (w + learning_rate R u / |u|) / |w + learning_rate R u / |u||

    with u the update of `tx`, |.| the 2-norm of a matrix, and R its norm at `init`. The size of u
    cancels, and with it the learning rate of `tx`, so each step turns a matrix by about
    `learning_rate`, in radians. Around `adam` this is AdamH, around `muon` MuonH. A matrix whose
    update is zero stays. All sums are in float32 or wider, and none overflows or underflows. Each
    step sets the norm anew, so it does not drift; but as the update is a difference that is added,
    a matrix that begins 1e7 times too large is rounded to zeros in its first step, and has the norm
    from the next.

    A matrix that is zero at `init` has no norm to keep, so it is moved by the updates of `tx`, with
    the learning rate of `tx`. `state.describe()` shows them; `radius` gives them a norm, which they
    have from the first step.

    Put it around the optimizer, and `master_weights` or `stochastic_rounding` around it: bfloat16
    weights have their norm only to a rounding. Clipping inside or outside only affects chosen
    leaves through the moments of `adam` or `muon`.

    Args:
      tx: any transformation. Weight decay of chosen leaves would act against the norm. In
        transformations of this library it raises an error; in others it is not seen, so switch it
        off.
      learning_rate: of chosen leaves, the angle of a step: a number in [0, inf), or a schedule,
        which is a function of the number of updates done (0 at the first); or a prefix tree or
        `by_path` of those. `update(..., hyperball_learning_rate=x)` overrides it for one call.
        Other leaves keep the learning rate of `tx`.
      leaves: which leaves keep their norm: a prefix tree of bools, or a function of the parameters'
        `jax.ShapeDtypeStruct`s that returns one, such as `hidden_matrices()`. Required. None and
        integers are never chosen. A fused leaf, as of `muon(split=)`, has one norm; separate leaves
        have one each.
      mesh_axes: names of the mesh axes over which the matrices of a leaf are sharded, inside
        `shard_map` or `pmap`, as for `lars`; one all-reduce for each set of axes. An axis over
        which whole layers or experts are sharded is not named.
      layer_axes: axes of a leaf with a matrix for each index, each with a norm of its own: layers
        for `lax.scan`, experts. An int, a tuple of ints, or None, or a prefix tree of those.
      radius: the norms to keep, in (0, inf), in the place of those at `init`: a number, or a
        function of the shape of a matrix; or a prefix tree or `by_path` of those. It is read by
        `init` alone: a state keeps its own.

    Returns:
      A transformation with state `HyperballState(done, radius, inner)`. Its update needs the
      parameters.

    Raises:
      ValueError: a Python number out of range; from `init`, a wrapper inside that belongs outside;
        from an update, a chosen leaf with weight decay, or a state of another choice of leaves.
      TypeError: an option of the wrong kind, or no `leaves`.

    Example:
      >>> params = {"embed": jnp.ones((9, 3)), "w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> grads = {"embed": jnp.ones((9, 3)), "w": jnp.eye(3, 2), "b": jnp.zeros(2)}
      >>> tx = jgrad.hyperball(jgrad.adam(3e-4), 0.02, leaves=jgrad.hidden_matrices())
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> f"{jnp.linalg.norm(params['w']):.4f}", state.radius["w"].shape
      ('2.4495', (1, 1))

    Source: Wen et al., "Hyperball" (2026), arXiv 2606.16899; AdamH, MuonH and NorMuonH there.
    """
    tx = inside.transformation(_NAME, tx)
    if leaves is None:
        expected = "a prefix tree of bools, or a function of the parameters' shapes"
        remedy = "`hidden_matrices()` chooses by names and shapes"
        raise TypeError(f"{_NAME}: `leaves`: None, expected {expected}; {remedy}.")
    options.check(_NAME, numbers.scalars, learning_rate=learning_rate)
    options.check_masks(_NAME, leaves=leaves)
    options.check_axes(_NAME, mesh_axes, layer_axes)
    if radius is not None:
        options.check(_NAME, functools.partial(numbers.scalars, positive=True), radius=radius)

    def init(params: PyTree) -> HyperballState:
        inputs = Parameters(_NAME, params)
        checks.parameters(inputs.reference)
        chosen = _keeping(inputs, leaves)
        # Outside of `shard_map` leaves are whole.
        is_sharded = any(map(axis_exists, decisions.named_axes(_NAME, mesh_axes)))
        axes = options.layers(inputs, mesh_axes if is_sharded else None, layer_axes)
        if radius is None:
            radii = _measured(inputs, axes, chosen)
        else:
            radii = _of_option(inputs, axes, chosen, radius)
        tree = trees.flatten(inputs.shapes)[1].unflatten(radii)
        return HyperballState(counter(params), tree, tx.init(params))

    def update(
        updates: PyTree,
        state: HyperballState,
        params: PyTree = None,
        *,
        hyperball_learning_rate: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, HyperballState]:
        inside.check_state(_NAME, state, HyperballState)
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        w = inputs.require_params("the norm")
        chosen = _keeping(inputs, leaves)
        axes = options.layers(inputs, mesh_axes, layer_axes)
        radii = _of_state(inputs, axes, chosen, state.radius)
        undecayed = told().undecayed | set(itertools.compress(trees.names(inputs.shapes), chosen))
        steps, inner = inputs.hand_over(tx, updates, state.inner, params, undecayed=undecayed)
        done = jnp.asarray(state.done)
        option = "learning_rate", learning_rate
        if hyperball_learning_rate is not None:
            option = "hyperball_learning_rate", hyperball_learning_rate
        rates = options.number_per_array(inputs, Step.of_count(done), *option)
        if not isinstance(rates, list):
            note(told().here.notes, "hyperball_learning_rate", rates)
        u = trees.flatten(steps)[0]
        new = hypersphere.steps(w, u, radii, leafwise.per_leaf(rates, len(u)), axes)
        done = optax.safe_increment(done)
        return inputs.directions(new), HyperballState(done, state.radius, inner)

    return pair(init, update, _NAME)


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
        i: of_leaf
        for spec, of_array in zip(inputs.specs, axes, strict=True)
        for i, of_leaf in zip(spec.positions, spec.layers_of_leaves(of_array), strict=True)
    }


def _shape(matrices: LayerAxes) -> tuple[int, ...]:
    """The shape of the radii of a leaf."""
    return tuple(n if axis in matrices.stacked else 1 for axis, n in enumerate(matrices.shape))


def _measured(
    inputs: Parameters, axes: Sequence[LayerAxes], chosen: Sequence[bool]
) -> list[jax.Array | None]:
    """The norms of the parameters."""
    arrays = [
        x if any(chosen[i] for i in spec.positions) else None
        for x, spec in zip(inputs.reference.leaves, inputs.specs, strict=True)
    ]
    _, per_array = measures.norms_per_array(arrays, axes)
    matrices, shapes = _matrices(inputs, axes), inputs.updated_shapes().leaves
    radii: list[jax.Array | None] = [None] * len(chosen)
    for i, norms in per_array.items():
        spec = inputs.specs[i]
        for j, norm in zip(spec.positions, spec.per_leaf(norms, axes[i]), strict=True):
            if chosen[j]:
                # A batch of norms has the widest dtype among them.
                real = numerics.real_dtype(shapes[j])
                radii[j] = norm.reshape(_shape(matrices[j])).astype(real)
    return radii


def _of_option(
    inputs: Parameters, axes: Sequence[LayerAxes], chosen: Sequence[bool], radius: PyTree
) -> list[jax.Array | None]:
    """The norms that a user wants, by `radius`."""
    is_function = trees.may_be_function(radius) and trees.is_function(radius, inputs.shapes)
    arg = inputs.option("radius", True if is_function else radius)
    shapes = inputs.updated_shapes().leaves
    radii: list[jax.Array | None] = [None] * len(chosen)
    for i, matrices in _matrices(inputs, axes).items():
        if not chosen[i]:
            continue
        norm = radius if is_function else arg.leaves[i]
        if callable(norm):
            norm = norm(tuple(matrices.shape[axis] for axis in matrices.within))
        real = numerics.real_dtype(shapes[i])
        radii[i] = jnp.full(_shape(matrices), _positive(arg, i, norm), real)
    return radii


def _positive(arg: ArgLeaves, i: int, x: Any) -> Any:
    """One number; an array of one element passes, since it may be traced."""
    x = numbers.as_python_number(x)
    is_array = checks.is_array(x) and x.size == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    if not (is_array or (checks.is_number(x) and 0 < x < math.inf)):
        error, came = (ValueError, x) if checks.is_number(x) else (TypeError, checks.describe(x))
        arg.fail(i, error, f"{came}, expected a number in (0, inf)")
    return x.reshape(()) if is_array else x


def _of_state(
    inputs: Inputs, axes: Sequence[LayerAxes], chosen: Sequence[bool], tree: PyTree
) -> list[jax.Array | None]:
    """The radii of the matrices of each array, as a vector; 0 for leaves that keep no norm."""
    remedy = "a state only fits the choice of leaves for which `init` made it"
    name = "state.radius"
    checks.same_structure(_NAME, name, tree, "params", inputs.shapes, remedy=remedy)
    arg = ArgLeaves.from_tree(_NAME, name, tree).with_arrays()
    matrices = _matrices(inputs, axes)
    for i, (r, use) in enumerate(zip(arg.leaves, chosen, strict=True)):
        shape = _shape(matrices[i]) if use else None
        if getattr(r, "shape", None) != shape:
            expected = f"an array of shape {shape}" if use else "None for a leaf that is not chosen"
            arg.fail(i, ValueError, f"{checks.describe(r)}, expected {expected}; {remedy}")

    def of_array(spec: ArraySpec) -> jax.Array | None:
        kept = [arg.leaves[i] for i in spec.positions]
        dtypes = {r.dtype for r in kept if r is not None}
        if not dtypes:
            return None
        (real,) = dtypes
        return jax.lax.concatenate(
            [
                jnp.zeros(matrices[i].num_layers, real) if r is None else r.reshape(-1)
                for i, r in zip(spec.positions, kept, strict=True)
            ],
            0,
        )

    return list(map(of_array, inputs.specs))
