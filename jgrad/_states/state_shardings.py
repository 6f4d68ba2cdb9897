"""The shardings of a state, for parameters on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jgrad._inputs.pair import arrays_of
from jgrad._packed.packing import Packed
from jgrad._trees import checks, forms, host_memory, trees, variables
from jgrad._trees.annotations import Prefix
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, explained
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._wrappers import inside

_NAME = "state_shardings"
_FACTORS = "factors"  # the field of a state with averages and bases of each matrix
_Axes = str | tuple[str, ...] | None  # of a mesh, along one axis of an array


@explained
def state_shardings(
    tx: AnyTransformation,
    params: PyTree,
    params_shardings: NamedSharding | Prefix | None = None,
    *,
    shard_over: str | tuple[str, ...] | None = None,
) -> PyTree:
    """Returns the shardings of a state, in which moments are sharded like their parameters.

        sharding(mw[leaf]) = sharding(vw[leaf]) = sharding(w[leaf]);  all else is replicated

    With `shard_over`, moments are sharded over an additional mesh axis, so that each of the n
    devices along it holds 1/n of the state, as in ZeRO-1.

    Use it for `out_shardings` of `jax.jit(tx.init)` and of a train step, and to restore a
    checkpoint. Each sharding says in which memory its array lies, so what `offload` puts on the
    host is restored there.

    Args:
      tx: a transformation whose state holds trees like the parameters.
      params: arrays, or `jax.ShapeDtypeStruct`s.
      params_shardings: a tree of `jax.sharding.NamedSharding`, or a prefix of one; None uses the
        shardings of `params`. On one device, shardings may be `SingleDeviceSharding`.
      shard_over: a mesh axis, or a tuple of axes, over which moments are also sharded, along the
        first axis of each array that can be divided further; packed buffers along their rows. An
        array that cannot be divided, or whose parameter is already sharded over this mesh axis, has
        the sharding of its parameter. Under `jit`, pass the result to `out_shardings`, together
        with the shardings of the parameters. In `shard_map` and `pmap`, see `zero`.

    Returns:
      A tree like the state, with a sharding for each array.

    Raises:
      TypeError: a sharding is not a NamedSharding, or `tx` is not a transformation.
      ValueError: tree structures do not match, a sharding does not fit its parameter, or the mesh
        does not have the axis.

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
    axes = () if shard_over is None else checks.axis_names(_NAME, "shard_over", shard_over)
    name = "params" if params_shardings is None else "params_shardings"
    if params_shardings is None:
        params_shardings = trees.map_leaves(lambda p: getattr(p, "sharding", None), params)
    arg = ArgLeaves.from_prefix(_NAME, name, params_shardings, "params", params)
    leaves, structure = trees.flatten(params)
    shardings = [x for x in arg.leaves if x is not None]
    devices = {d for x in shardings if isinstance(x, SingleDeviceSharding) for d in x.device_set}
    is_alone = len(devices) == 1 and all(isinstance(x, SingleDeviceSharding) for x in shardings)
    if is_alone:  # for which a mesh may stand
        mesh = Mesh(np.array([*devices]), ("device",))
        arg = arg._replace(leaves=[x and _on_mesh(x, mesh) for x in arg.leaves])
    sharded = [_sharded(arg, i, p, axes) for i, p in enumerate(leaves)]
    first = next((x for x in sharded if x is not None), None)
    if first is None:
        raise ValueError(f"{_NAME}: `params`: no array, expected at least one.")
    replicated = NamedSharding(first.sharding.mesh, PartitionSpec())
    program, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    tree = structure.unflatten(sharded)
    nodes = dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=trees.is_packed))
    followed = _Shardings(nodes, sharded, replicated, axes)
    shardings = followed.for_state(variables.variables_of_blocks(state))
    shardings = jax.tree.map(_as_returned, variables.in_form_of(state, shardings), state)
    types = zip(jax.tree.leaves(shardings), program.out_avals, strict=True)
    placed = [host_memory.sharded_where(x, array_type) for x, array_type in types]
    if is_alone:
        (device,) = devices
        placed = [SingleDeviceSharding(device, memory_kind=x.memory_kind) for x in placed]
    return jax.tree.unflatten(jax.tree.structure(shardings), placed)


def _on_mesh(x: SingleDeviceSharding, mesh: Mesh) -> NamedSharding:
    """A sharding on one device as one on a mesh of it."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind=x.memory_kind)


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """A parameter: its shape and its sharding."""

    shape: tuple[int, ...]
    sharding: NamedSharding


def _sharded(arg: ArgLeaves, i: int, p: Leaf, axes: tuple[str, ...]) -> _Sharded | None:
    """A parameter with its sharding, which fits it, on a mesh that has the axes."""
    if p is None:
        return None
    sharding, shape = arg.leaves[i], np.shape(p)
    if not isinstance(sharding, NamedSharding):
        arg.fail(i, TypeError, f"sharding {sharding!r}, expected a NamedSharding")
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        arg.fail(i, ValueError, f"{sharding.spec}, expected a spec that fits shape {shape}")
    names = sharding.mesh.axis_names
    if missing := [axis for axis in axes if axis not in names]:
        expected = f"one of the axes of the mesh, {', '.join(map(repr, names))}"
        raise ValueError(f"{_NAME}: `shard_over`: {missing[0]!r}, expected {expected}.")
    return _Sharded(shape, sharding)


@dataclasses.dataclass(frozen=True)
class _Shardings:
    """Finds for each array of a state the parameter that it follows.

    Attributes:
      params: the parameters, or packed trees of them, by their paths.
      leaves: of the parameters, `None` among them.
      replicated: the sharding of everything that follows no parameter.
      axes: mesh axes over which the state is sharded further.
    """

    params: Mapping[KeyPath, Leaf]
    leaves: Sequence[_Sharded | None]
    replicated: NamedSharding
    axes: tuple[str, ...]

    def for_state(self, state: PyTree) -> PyTree:
        """The sharding of each array of a state."""

        def sharding(path: KeyPath, x: Leaf) -> Leaf:
            if trees.is_packed(x):
                return self._packed_shardings(path, x)
            is_factor = any(getattr(key, "name", None) == _FACTORS for key in path[:-1])
            ends = (path[:-1], path[:-2]) if is_factor else (path,)
            params = (p for p in map(self._followed, ends) if isinstance(p, _Sharded))
            param = next(params, None)
            return self._like(_factor_sharding(param, x.shape) if param and is_factor else param, x)

        def is_leaf(x: PyTree) -> bool:
            return trees.is_packed(x) or (x is not None and trees.is_leaf(x))

        return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=is_leaf)

    def _followed(self, path: KeyPath) -> Leaf:
        """The parameter, or packed part of the parameters, whose path ends a path in the state."""
        ends = (path[start:] for start in range(len(path) + 1))
        return next((self.params[end] for end in ends if end in self.params), None)

    def _packed_shardings(self, path: KeyPath, packed: Packed[Any]) -> Packed[Any]:
        """The shardings of buffers: those of packed parameters, or of what `pack_small` packed."""
        params, layout = self._followed(path), packed.layout
        shardings = dict.fromkeys(packed.buffers)
        for name, buffer in packed.buffers.items():
            leaf = layout.unpacked_leaf(name)
            if buffer is None:
                continue
            if trees.is_packed(params):
                followed = params.buffers.get(name)
                if leaf is None:  # moments of only some leaves have fewer rows
                    followed = _with_rows_of(followed, buffer.shape)
            else:
                followed = None if leaf is None else self.leaves[leaf]
            shardings[name] = self._like(followed, buffer, rows_only=leaf is None)
        return Packed(shardings, layout)

    def _like(self, followed: _Sharded | None, x: Leaf, *, rows_only: bool = False) -> Leaf:
        """The sharding of the parameter, sharded further, where the shapes agree."""
        if (form := forms.find(x)) is not None:

            def part_sharding(part: Leaf, leaf: Leaf = None, axis: int | None = None) -> Leaf:
                whole = followed if axis is None else _in_words(followed, part, leaf, axis)
                return self._like(whole, part, rows_only=rows_only)

            return form.shardings(x, part_sharding)
        sharding = None if followed is None else _fitted(followed, x.shape)
        if sharding is None:
            return self.replicated
        return _sharded_further(sharding, x.shape, self.axes, rows_only=rows_only)


def _in_words(followed: _Sharded | None, words: Leaf, x: Leaf, axis: int) -> _Sharded | None:
    """The parameter, with four rows in one where those of codes are, if shards have whole ones."""
    shape = words.shape
    if followed is None or followed.shape != x.shape:
        return followed
    sharding = followed.sharding
    names = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    if shape[axis] % (x.shape[axis] // sharding.shard_shape(x.shape)[axis]):
        names[axis] = None
    return _Sharded(shape, _along(sharding, names))


def _fitted(followed: _Sharded, shape: tuple[int, ...]) -> NamedSharding | None:
    """The same for an array that has one number for each index of some axes; None for others."""
    sharding, sizes = followed.sharding, list(zip(shape, followed.shape, strict=False))
    if followed.shape == shape:
        return sharding
    if len(followed.shape) != len(shape) or not all(a in (b, 1) for a, b in sizes):
        return None
    axes = [x if a == b else None for x, (a, b) in zip(sharding.spec, sizes, strict=False)]
    return _along(sharding, axes)


def _factor_sharding(followed: _Sharded, shape: tuple[int, ...]) -> _Sharded:
    """Matrices of (..., n, n) for those of a parameter: first axes that both have are alike.

    The matrices themselves are whole, as they have to be inside of `shard_map`.
    """
    names: list[_Axes] = []
    for n, size, x in zip(shape[:-2], followed.shape, followed.sharding.spec, strict=False):
        if n != size:
            break
        names.append(x)
    return _Sharded(shape, _along(followed.sharding, names))


def _names(x: _Axes) -> tuple[str, ...]:
    return x if isinstance(x, tuple) else () if x is None else (x,)


def _with_rows_of(followed: _Sharded | None, shape: tuple[int, ...]) -> _Sharded | None:
    """The same sharding for a buffer of another number of rows, if they can be divided so."""
    if followed is None or followed.shape[1:] != shape[1:]:
        return followed
    try:
        followed.sharding.shard_shape(shape)
    except ValueError:
        return followed
    return _Sharded(shape, followed.sharding)


def _sharded_further(
    sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[str, ...], *, rows_only: bool
) -> NamedSharding:
    """Sharded over more mesh axes, along the first axis of the array that can be divided."""
    used = {name for x in sharding.spec for name in _names(x)}
    if not axes or 0 in shape or not used.isdisjoint(axes):
        return sharding
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    for i, size in enumerate(sharding.shard_shape(shape)[: 1 if rows_only else None]):
        if size % devices == 0:
            names: list[_Axes] = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
            names[i] = (*_names(names[i]), *axes)
            return _along(sharding, names)
    return sharding


def _as_returned(sharding: NamedSharding, x: jax.ShapeDtypeStruct) -> NamedSharding:
    """As an update returns it: JAX compiles once more for the same placement in other words.

    Types of explicit axes have an entry for each axis of an array.
    """
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return sharding
    spec = PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _along(sharding: NamedSharding, axes: Sequence[_Axes]) -> NamedSharding:
    """The same along other axes; without None at their end, as JAX compares specs."""
    count = max((i + 1 for i, x in enumerate(axes) if x is not None), default=0)
    spec = PartitionSpec(*axes[:count])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
