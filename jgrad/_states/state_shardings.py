"""The sharding of each array of a state, for parameters on a mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jgrad._inputs.transformation import arrays_of
from jgrad._packed import layouts, packing
from jgrad._packed.packing import Packed
from jgrad._quantized.geometry import geometry
from jgrad._trees import checks, host_memory, trees, values, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.other_names import explained
from jgrad._trees.renamed import renamed
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inside

# A path in a tree, as JAX gives it.
Path = tuple[Any, ...]

_NAME = "state_shardings"


@renamed(cut_over="shard_over")
@explained
def state_shardings(
    tx: optax.GradientTransformation,
    params: PyTree,
    params_shardings: PyTree = None,
    *,
    shard_over: str | tuple[str, ...] | None = None,
) -> PyTree:
    """The sharding of each array of a state: moments follow their parameters.

        sharding(mw[leaf]) = sharding(vw[leaf]) = sharding(w[leaf]);  all else is replicated

    With `shard_over`, moments are sharded over one more mesh axis, so that each device along it has
    1/n of the state: ZeRO-1.

    For `jax.jit(tx.init, out_shardings=...)`, for the `out_shardings` of a train step, and for
    restoring a checkpoint.

    Args:
      tx: a transformation whose state holds trees like the parameters.
      params: arrays, or `jax.ShapeDtypeStruct`s.
      params_shardings: tree of `jax.sharding.NamedSharding`, or a prefix of one; None for those of
        `params`.
      shard_over: a mesh axis, or a tuple of axes, over which moments are sharded as well, along the
        first axis of each array that can be divided further; packed buffers along rows. An array
        that cannot be divided, or whose parameter is sharded over it already, has the sharding of
        its parameter. Under `jit`, give the result to `out_shardings`, with the shardings of the
        parameters; in `shard_map` and `pmap`, see `zero`.

    Returns:
      A tree like the state, with a sharding for each array; that of `offload` is in host memory.

    Raises:
      TypeError: something is not a NamedSharding, or `tx` is not a transformation.
      ValueError: trees of different structure, a sharding that does not fit its parameter, or a
        mesh without such an axis.

    Example:
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
      >>> params = {"w": jax.ShapeDtypeStruct((64, 2), jnp.float32)}
      >>> sharding, tx = NamedSharding(mesh, P("data")), jgrad.adam(1e-3)
      >>> shardings = jgrad.state_shardings(tx, params, sharding)
      >>> shardings.mw["w"].spec == P("data"), shardings.step.spec == P()
      (True, True)

    Source: for `shard_over`, Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
      Trillion Parameter Models" (2020), section 5.1.
    """
    tx = inside.transformation(_NAME, tx, may_be_offloaded=True)
    params = arrays_of(params)
    axes = () if shard_over is None else values.axis_names(_NAME, "shard_over", shard_over)
    if params_shardings is None:
        name = "params"
        params_shardings = trees.map_leaves(lambda p: getattr(p, "sharding", None), params)
    else:
        name = "params_shardings"
        checks.same_structure(_NAME, name, params_shardings, "params", params, prefix=True)
    leaves, structure = trees.flatten(params)
    given = trees.broadcast(params_shardings, params)
    _check(ArgLeaves.from_tree(_NAME, name, params), leaves, given, axes)
    meshes = [x.mesh for x in given if x is not None]
    if not meshes:
        raise ValueError(f"{_NAME}: `params`: no array, expected at least one.")
    placed = [
        None if p is None else _Placed(np.shape(p), x) for p, x in zip(leaves, given, strict=True)
    ]
    replicated = NamedSharding(meshes[0], PartitionSpec())
    state = jax.eval_shape(tx.init, params)
    shardings = _Shardings(structure.unflatten(placed), placed, replicated, axes).of_state(
        variables.variables_of_blocks(state)
    )
    shardings = variables.in_form_of(state, shardings)
    if isinstance(tx, inside.Offloaded) and host_memory.is_there(_NAME):
        return jax.tree.map(lambda x: x.with_memory_kind(host_memory.KIND), shardings)
    return shardings


def _check(arg: ArgLeaves, leaves: list[Any], shardings: list[Any], axes: tuple[str, ...]) -> None:
    """Each parameter has a sharding that fits it, on a mesh that has the axes."""
    for i, (p, x) in enumerate(zip(leaves, shardings, strict=True)):
        if p is None:
            continue
        if not isinstance(x, NamedSharding):
            arg.fail(i, TypeError, f"sharding {x!r}, expected a NamedSharding")
        try:
            x.shard_shape(np.shape(p))
        except (ValueError, IndexError):
            arg.fail(i, ValueError, f"{x.spec}, expected a spec that fits shape {np.shape(p)}")
        for axis in axes:
            if axis not in x.mesh.axis_names:
                expected = f"one of the axes of the mesh, {', '.join(map(repr, x.mesh.axis_names))}"
                raise ValueError(f"{_NAME}: `shard_over`: {axis!r}, expected {expected}.")


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A parameter: its shape and its sharding."""

    shape: tuple[int, ...]
    sharding: NamedSharding


class _Shardings:
    """Finds for each array of a state the parameter that it follows.

    Args:
      params: the tree of `_Placed`.
      leaves: its leaves, `None` among them.
      replicated: the sharding of everything that follows no parameter.
      axes: mesh axes over which the state is sharded further.
    """

    def __init__(
        self,
        params: PyTree,
        leaves: list[_Placed | None],
        replicated: NamedSharding,
        axes: tuple[str, ...],
    ) -> None:
        nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=packing.is_packed)
        self._nodes = dict(nodes)
        self._leaves, self._replicated, self._axes = leaves, replicated, axes

    def of_state(self, state: PyTree) -> PyTree:
        """The sharding of each array of a state."""

        def of_node(path: Path, x: Any) -> Any:
            return self._of_packed(path, x) if packing.is_packed(x) else self._of_array(path, x)

        def is_leaf(x: Any) -> bool:
            return packing.is_packed(x) or isinstance(x, Blocks)

        return jax.tree_util.tree_map_with_path(of_node, state, is_leaf=is_leaf)

    def _followed(self, path: Path) -> Any:
        """The parameter, or packed part of the parameters, whose path ends a path in the state."""
        ends = (path[start:] for start in range(len(path) + 1))
        return next((self._nodes[end] for end in ends if end in self._nodes), None)

    def _of_array(self, path: Path, x: Any) -> Sharding:
        node = self._followed(path)
        placed = _without_axes(node, x.shape) if isinstance(node, _Placed) else None
        return self._like(placed, x, rows_only=False)

    def _of_packed(self, path: Path, packed: Packed) -> Packed:
        """The shardings of buffers: those of packed parameters, or of what `pack_small` packed."""
        node, layout = self._followed(path), packed.layout
        shardings = {}
        for name, buffer in packed.buffers.items():
            leaf = layouts.unpacked_leaf(layout, name)
            if packing.is_packed(node):
                followed = node.buffers.get(name)
                if leaf is None:  # moments of some leaves alone have fewer rows
                    followed = _with_rows_of(followed, buffer)
            else:
                followed = None if leaf is None else self._leaves[leaf]
            like = functools.partial(self._like, followed, rows_only=leaf is None)
            shardings[name] = jax.tree.map(like, buffer, is_leaf=lambda x: isinstance(x, Blocks))
        return Packed(shardings, layout)

    def _like(self, followed: _Placed | None, x: Any, *, rows_only: bool) -> Any:
        """The sharding of the parameter, sharded further, where the shapes agree."""
        if isinstance(x, Blocks):
            array = jax.ShapeDtypeStruct(x.shape, x.dtype)
            codes = self._like(followed, array, rows_only=rows_only)
            return x._replace(codes=codes, scale=geometry(x).sharding_of_scale(codes))
        if followed is None or followed.shape != x.shape:
            return self._replicated
        return _sharded_further(followed.sharding, x.shape, self._axes, rows_only=rows_only)


def _without_axes(followed: _Placed, shape: tuple[int, ...]) -> _Placed:
    """The same sharding for an array that has one number for each index of some axes."""
    pairs = list(zip(followed.shape, shape, strict=False))
    fits = len(followed.shape) == len(shape) and all(b in (a, 1) for a, b in pairs)
    if followed.shape == shape or not fits:
        return followed
    sharding = followed.sharding
    parts = [part if a == b else None for part, (a, b) in zip(sharding.spec, pairs, strict=False)]
    while parts and parts[-1] is None:
        parts.pop()
    return _Placed(shape, NamedSharding(sharding.mesh, PartitionSpec(*parts)))


def _with_rows_of(followed: _Placed | None, buffer: Any) -> _Placed | None:
    """The same sharding for a buffer of another number of rows, if they can be divided so."""
    if followed is None or buffer is None or followed.shape[1:] != buffer.shape[1:]:
        return followed
    try:
        followed.sharding.shard_shape(buffer.shape)
    except ValueError:
        return followed
    return dataclasses.replace(followed, shape=buffer.shape)


def _sharded_further(
    sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[str, ...], *, rows_only: bool
) -> NamedSharding:
    """Sharded over more mesh axes, along the first axis of the array that can be divided."""
    missing = len(shape) - len(sharding.spec)
    parts = [
        part if isinstance(part, tuple) else () if part is None else (part,)
        for part in (*sharding.spec, *[None] * missing)
    ]
    if not axes or 0 in shape or any(axis in part for axis in axes for part in parts):
        return sharding
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    for i, size in enumerate(sharding.shard_shape(shape)[: 1 if rows_only else None]):
        if size % devices == 0:
            parts[i] = (*parts[i], *axes)
            spec = [part[0] if len(part) == 1 else part or None for part in parts]
            while spec[-1] is None:
                spec.pop()
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=kind)
    return sharding
