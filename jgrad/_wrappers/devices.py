"""Over which devices the arrays of an update are sharded, and what all of these agree upon."""

import itertools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._inputs.notes import Notes
from jgrad._layers.layer_axes import existing_mesh_axes, read_mesh_axes
from jgrad._packed import array_spec
from jgrad._trees import checks, shardings, trees
from jgrad._trees.trees import PyTree

T = TypeVar("T")


def mesh_axes_of(inputs: Inputs, mesh_axes: PyTree) -> tuple[str, ...]:
    """All mesh axes over which some leaf is sharded."""
    named = inputs.option("mesh_axes", read_mesh_axes(inputs.function, mesh_axes))
    return tuple(sorted({*existing_mesh_axes(named), *_of_shards(inputs)}))


def _of_shards(inputs: Parameters) -> list[str]:
    """The mesh axes over which `zero` has sharded the rows of buffers."""
    axes = (spec.shard.axes for spec in inputs.specs if spec.shard is not None)
    return list(itertools.chain(*axes))


def agreed(flag: Any, mesh_axes: tuple[str, ...]) -> Any:
    """True where the flag is True on all devices of the mesh axes, so that they act alike."""
    if not (mesh_axes and checks.is_array(flag)):
        return flag
    return jax.lax.pmin(flag.astype(jnp.int32), mesh_axes) == 1


def axes_of_models(function: str, params: PyTree, mesh_axes: PyTree = None) -> tuple[str, ...]:
    """The mesh axes along which each device has a model of its own, as far as types say it.

    All parameters vary along them, and none is said to be sharded over them.
    """
    own = _varying(params)
    if not any(own):
        return ()
    axes = trees.flatten(read_mesh_axes(function, mesh_axes))[0]
    shards = _of_shards(Parameters(function, params))
    named = {name for x in axes for name in x.values} | set(shards)
    return tuple(sorted(set.intersection(*own) - named))


def _varying(params: PyTree) -> list[set[str]]:
    """The mesh axes along which each parameter varies, as its type says."""
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return [set(shardings.varying_axes(x)) for x in filter(checks.is_inexact, arrays)]


def as_updated(
    function: str,
    state: T,
    update: Callable[..., tuple[PyTree, T]],
    params: PyTree,
    mesh_axes: PyTree = None,
) -> T:
    """A state before the first update, typed as updates return it: `lax.scan` takes no other.

    Inside `shard_map`, where devices decide each for itself, all varies along the axes of the mesh
    along which the decision does: counters, too, of all that is inside. What decides may be inside,
    and what devices agree upon is the same on all of them. So updates are traced, where parameters
    vary, until one changes no type: one counter may decide about another. If that needs arguments
    of its own, all varies along the `axes_of_models`.
    """
    if not any(_varying(params)):
        return state

    def dry(params: PyTree, state: T) -> T:
        return update(params, state, params, notes=Notes(None))[1]

    def vary(x: Any, new: Any) -> Any:
        return shardings.varying_over(x, shardings.varying_axes(new))

    try:
        found: T = jax.tree.map(vary, state, jax.eval_shape(dry, params, state))
    except Exception:
        return shardings.varying_over(state, axes_of_models(function, params, mesh_axes))
    if all(map(operator.is_, *map(jax.tree.leaves, (found, state)))):
        return found
    return as_updated(function, found, update, params, mesh_axes)


def holds_shards(state: PyTree, inputs: Inputs) -> bool:
    """Whether a state has shards of buffers that the parameters have whole: that of `zero`."""
    pairs = zip(inputs.reference.leaves, inputs.specs, strict=True)
    shapes = {x.shape for x, spec in pairs if spec.is_buffer}
    return any(
        spec.shape in shapes and not checks.is_nothing(x) and x.shape != spec.shape
        for x, spec in zip(trees.flatten(state)[0], array_spec.specs(state), strict=True)
        if spec.is_buffer and not spec.is_unpacked
    )
