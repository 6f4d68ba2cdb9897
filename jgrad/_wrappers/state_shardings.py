"""Where the state of a transformation lives, for parameters that are spread over a mesh."""

import math
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jgrad._packed import layouts
from jgrad._trees import checks, trees, values
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping

_NAME = "state_shardings"


def state_shardings(
    tx: optax.GradientTransformation,
    params: PyTree,
    params_shardings: PyTree = None,
    *,
    cut_over: str | tuple[str, ...] | None = None,
) -> PyTree:
    """The sharding of each array of a state: moments follow their parameters.

        sharding(mw[leaf]) = sharding(vw[leaf]) = sharding(w[leaf]);  all else is on every device

    With `cut_over`, they are cut once more, so that each device along that axis has a share of the
    state: ZeRO-1.

    For `jax.jit(tx.init, out_shardings=...)`, for the `out_shardings` of a train step, and for
    restoring a checkpoint.

    Args:
      tx: a transformation whose state holds trees like the parameters.
      params: arrays, or `jax.ShapeDtypeStruct`s.
      params_shardings: tree of `jax.sharding.NamedSharding`, or a prefix of one; None for those of
        `params`.
      cut_over: a mesh axis, or a tuple of axes, over which moments are cut as well, along the first
        axis of each array that can be divided further. Those that cannot lie as their parameters
        do, and so do those of parameters that are cut over it already. Under `jit`, give the
        result to `out_shardings`, with the shardings of the parameters; in `shard_map` and `pmap`,
        see `zero`.

    Returns:
      A tree like the state, with a sharding for each array.

    Raises:
      TypeError: something that is not a NamedSharding, or `tx` is no transformation.
      ValueError: trees of different structure, a sharding that does not fit its parameter, or a
        mesh without such an axis.

    Source: for `cut_over`, Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
      Parameter Models" (2020), section 5.1.
    """
    tx = wrapping.inner(_NAME, tx)
    axes = () if cut_over is None else values.axis_names(_NAME, "cut_over", cut_over)
    if params_shardings is None:
        name = "params"
        params_shardings = trees.map_leaves(lambda p: getattr(p, "sharding", None), params)
    else:
        name = "params_shardings"
        checks.same_structure(_NAME, name, params_shardings, "params", params, prefix=True)
    leaves, _ = trees.flatten(params)
    given = trees.broadcast(params_shardings, params)
    row = checks.Row.of(_NAME, name, params)
    for i, (p, x) in enumerate(zip(leaves, given, strict=True)):
        if p is None:
            continue
        if not isinstance(x, NamedSharding):
            row.fail(i, TypeError, f"sharding {x!r}, expected a NamedSharding")
        try:
            x.shard_shape(p.shape)
        except (ValueError, IndexError):
            row.fail(i, ValueError, f"{x.spec}, expected a spec that fits shape {p.shape}")
        for axis in axes:
            if axis not in x.mesh.axis_names:
                expected = f"one of the axes of the mesh, {', '.join(map(repr, x.mesh.axis_names))}"
                raise ValueError(f"{_NAME}: `cut_over`: {axis!r}, expected {expected}.")
    meshes = [x.mesh for x in given if x is not None]
    if not meshes:
        raise ValueError(f"{_NAME}: `params`: no array, expected at least one.")
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=trees.is_none)]
    named = {jax.tree_util.DictKey(layouts.whole_name(i)): path for i, path in enumerate(paths)}
    own = {path: (p, x) for path, p, x in zip(paths, leaves, given, strict=True) if p is not None}

    def find(path: tuple[Any, ...], part: Any) -> Sharding:
        """That of the parameter whose path ends the path in the state, if the shapes agree.

        Where `pack_small` leaves one as it is, a buffer has a name that says which.
        """
        in_buffer = path[-2:-1] == (jax.tree_util.GetAttrKey("buffers"),)
        rows = in_buffer and not layouts.is_whole_name(path[-1].key)
        ends = [path[start:] for start in range(len(path) + 1)]
        if in_buffer and path[-1] in named:
            ends.append(named[path[-1]])
        for end in ends:
            if end in own:
                p, sharding = own[end]
                return _cut(sharding, p.shape, axes, rows) if part.shape == p.shape else everywhere
        return everywhere

    return jax.tree_util.tree_map_with_path(find, jax.eval_shape(tx.init, params))


def _cut(
    sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[str, ...], rows: bool
) -> NamedSharding:
    """Cut over more mesh axes, along the first axis of the array that can be; `rows`, no other."""
    missing = len(shape) - len(sharding.spec)
    parts = [
        part if isinstance(part, tuple) else () if part is None else (part,)
        for part in (*sharding.spec, *[None] * missing)
    ]
    if not axes or 0 in shape or any(axis in part for axis in axes for part in parts):
        return sharding
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    for i, here in enumerate(sharding.shard_shape(shape)[: 1 if rows else None]):
        if here % devices == 0:
            parts[i] = (*parts[i], *axes)
            spec = [part[0] if len(part) == 1 else part or None for part in parts]
            while spec[-1] is None:
                spec.pop()
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=kind)
    return sharding
