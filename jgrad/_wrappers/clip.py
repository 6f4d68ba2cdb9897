"""Clipping by the norm of all gradients together."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import on_leaf
from jgrad._inputs import numbers
from jgrad._inputs.around import narrow, run_and_say
from jgrad._inputs.inputs import Parameters
from jgrad._inputs.pair import counter, pair
from jgrad._layers import norms
from jgrad._layers.layer_axes import LayerAxes, as_typed, in_shard_map
from jgrad._trees import checks, trees
from jgrad._trees.annotations import MeshAxes, Scalar
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import Transformation, explained
from jgrad._trees.protocols import PyTree, state_of
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import note, over_shares, told
from jgrad._wrappers import decisions


@on_leaf(arrays=2)
def _ratio(
    mantissa: jax.Array, scale: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """min(1, largest / norm), norm = mantissa scale, as its square root twice.

    NaN for infinite norms. The ratio itself may vanish where its product with a gradient is an
    ordinary number.
    """
    above = ~(mantissa * scale <= largest)  # of NaN too
    one = jnp.ones_like(mantissa)
    root = numerics.safe_sqrt(largest) / jnp.sqrt(jnp.where(above, mantissa, one))
    root = jnp.where(mantissa == jnp.inf, jnp.full_like(root, jnp.nan), root)
    # The division comes last: XLA computes it once, but what follows it for every leaf.
    factor = jnp.where(above, root, one) / jnp.where(above, jnp.sqrt(scale), one)
    return factor, factor


@state_of("clip_by_global_norm", norm="measured")
class ClipState(NamedTuple):
    """State of `clip_by_global_norm(..., of="previous")`.

    Attributes:
      norm: the norm of the last finite updates, a float32 scalar; 0 before there are any.

    Example:
      >>> tx = jgrad.clip_by_global_norm(1.0, of="previous")
      >>> state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init({"w": jnp.zeros(2)}))[1]
      >>> float(state.norm)
      5.0
    """

    norm: jax.Array


@overload
def clip_by_global_norm(
    max_norm: Scalar, *, mesh_axes: MeshAxes = None, of: Literal["current"] = "current"
) -> Transformation[optax.EmptyState]: ...
@overload
def clip_by_global_norm(
    max_norm: Scalar, *, mesh_axes: MeshAxes = None, of: Literal["previous"]
) -> Transformation[ClipState]: ...
@overload
def clip_by_global_norm(
    max_norm: Scalar, *, mesh_axes: MeshAxes = None, of: Literal["current", "previous"]
) -> Transformation: ...
@explained
def clip_by_global_norm(
    max_norm: Scalar, *, mesh_axes: MeshAxes = None, of: Literal["current", "previous"] = "current"
) -> Transformation:
    """Scales all updates down together if their global norm exceeds `max_norm`.

        updates' = min(1, max_norm / |updates|) updates

    where |.| is the 2-norm over all leaves, computed without overflow or underflow, as in
    `global_norm`. If any update is NaN or infinite, all become NaN. Dtypes are preserved; integer
    leaves, float0 and None are left unchanged.

    With `of="previous"`, |.| is the norm of the previous step, or of the last one that was finite.
    The first step is then not clipped, a sudden spike only shortens the step after it, and NaN or
    infinity does not spread to other elements. Because no update has to wait for the others,
    `step_in_backward` then needs no first pass.

    With either norm, a `skip_nonfinite` around it detects updates that are not finite.

    Args:
      max_norm: the largest global norm, in [0, inf).
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, the norm is
        then that of whole leaves; if some are replicated, see `lars`.
      of: whether the norm of the "current" or of the "previous" step decides.

    Returns:
      A transformation, stateless or, with `of="previous"`, with state `ClipState(norm)`.

    Raises:
      ValueError: a Python number is out of range.
      TypeError: an option has the wrong type.

    Example:
      >>> grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = optax.chain(jgrad.clip_by_global_norm(1.0), jgrad.gradient_descent(0.1))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(grads))
      >>> bool(jgrad.global_norm(updates) < 0.11)
      True

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
      (2013), algorithm 1.
    """
    name = "clip_by_global_norm"
    numbers.scalar(name, "max_norm", max_norm)
    checks.one_of(name, "of", of, ("current", "previous"))
    read_mesh_axes(name, mesh_axes)

    def init(params: PyTree) -> optax.EmptyState | ClipState:
        if of == "current":
            return optax.EmptyState()
        state = ClipState(counter(params).astype(jnp.float32))
        return decisions.as_updated(name, state, update, params, mesh_axes)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        inputs = _inexact(name, "updates", updates)
        inexact, (others, structure) = inputs.reference.leaves, trees.flatten(updates)
        layers = _layers(inputs, mesh_axes, params)
        norm = norms.global_norm(list(map(narrow, inexact)), layers)
        norm = over_shares(name, norms.OF_SHARES, norm)
        bound = norm
        if of == "previous":
            bound = norms.ScaledNorm(state.norm, jnp.ones_like(state.norm))
            state = ClipState(_last_finite(norm, state.norm))
        factors = _ratio(*bound, numbers.scalar(name, "max_norm", max_norm))
        leaves = run_and_say([(clipped, (x, *factors)) for x in inexact])
        around = told()
        note(around.notes, "clip_factor", factors[0] * factors[1])
        if around.commit is not None:
            # A norm is finite if all elements are: its mantissa does not overflow.
            around.commit.take_finite(jnp.isfinite(norm.mantissa), others)
        return structure.unflatten(inputs.put_back(leaves, others)), state

    return pair(init, update, name, ClipState if of == "previous" else None)


def _last_finite(norm: norms.ScaledNorm, old: jax.Array) -> jax.Array:
    """The norm to compare the next updates with."""
    new = numerics.saturating_float32(norm.value())
    return jnp.where(jnp.isfinite(norm.mantissa), new, old)


def clipped(x: jax.Array, *factors: jax.Array) -> jax.Array:
    """An update, scaled; `run_and_say` tells a kernel that it was made so."""
    return rules.scale_by(x, *factors).astype(x.dtype)


@explained
def global_norm(tree: PyTree, *, mesh_axes: MeshAxes = None) -> jax.Array:
    """Computes the 2-norm of all floating leaves together.

        norm = sqrt(sum over leaves and elements of |x|^2)

    It is computed in float32 or wider, and no intermediate result overflows or underflows. A norm
    above the largest finite number is infinite. The derivative at zero is zero.

    Args:
      tree: floating or complex leaves; None and arrays of other dtypes are ignored.
      mesh_axes: how leaves are sharded: a PartitionSpec, the name of a mesh axis, a tuple of names,
        or None; or a prefix tree or `by_path` of these. Inside `shard_map` and `pmap`, the norm is
        then that of whole leaves; if some are replicated, see `lars`.

    Returns:
      A scalar in float32, or in float64 if a leaf is.

    Raises:
      TypeError: a leaf is neither an array nor a float.
      ValueError: `mesh_axes` does not fit the tree.

    Example:
      >>> norm = jgrad.global_norm({"w": jnp.full((3, 2), 1e30), "b": jnp.zeros(2)})
      >>> norm.shape, bool(jnp.isfinite(norm))
      ((), True)
    """
    inputs = _inexact("global_norm", "tree", tree)
    norm = norms.global_norm(inputs.reference.leaves, _layers(inputs, mesh_axes))
    return norm.mantissa * norm.scale


def _inexact(function: str, name: str, tree: PyTree) -> Parameters:
    """What is known about the leaves that count."""
    tree = checks.values_of(tree)
    arg = ArgLeaves.from_tree(function, name, tree)
    for i, x in enumerate(arg.leaves):
        is_no_number = getattr(x, "dtype", None) == jax.dtypes.float0 or x is None
        if not (is_no_number or isinstance(x, float) or checks.is_numeric(x)):
            number = "a float" if checks.is_number(x) else "a number"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected an array or {number}")
    return Parameters(function, tree, name).updated()


def _layers(inputs: Parameters, mesh_axes: PyTree, params: PyTree = None) -> list[LayerAxes]:
    """One layer for each array, since only the norm of all is asked for.

    A gradient may be the same on all devices where its parameter, if it is there, is not.
    """
    arg, sharded = inputs.reference, inputs.placements(mesh_axes)
    here = in_shard_map(sharded, trees.flatten(inputs.shapes)[0])
    names = [x.names for x in here.leaves]
    pairs = zip(arg.leaves, inputs.specs, strict=True)
    whole = (LayerAxes(np.shape(x), mesh_axes=spec.mesh_axes(names, here)) for x, spec in pairs)
    beside, structure = trees.flatten(params)
    fits = structure == trees.flatten(inputs.tree)[1]
    typed = leafwise.at(beside, inputs.rows) if fits else arg.leaves
    return as_typed(whole, sharded, zip(arg.leaves, typed, strict=True))
