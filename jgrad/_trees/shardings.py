"""What the type of an array says about its sharding, and what to do about it.

On meshes with explicit axes, the type says how an array is sharded, and JAX raises an error for
operations whose result could be sharded in several ways. With automatic axes, it only says that
there is a mesh. Inside `shard_map`, it may say along which axes an array varies. Everything here
works in each supported version of JAX.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree

# For each axis of an array the mesh axes over which it is sharded.
MeshAxesPerAxis: TypeAlias = tuple[tuple[str, ...], ...]

# JAX's name for the axis of a `pmap` without one. Private; checked in JAX 0.8 to 0.12.
_WITHOUT_NAME = "_internal_pmap"


# ---- as users say it ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a leaf lies on a mesh, by the word of a user, or by its type.

    Attributes:
      per_axis: for each axis of the leaf the mesh axes that shard it; axes at the end may be left
        out. None where nobody says which axis is sharded.
      anywhere: mesh axes over which it is sharded, along an axis that nobody names.
      mesh: the one with these axes, once a program is traced there.
      is_for_all: whether one entry says it of all leaves, which types may overrule.
    """

    per_axis: MeshAxesPerAxis | None = None
    anywhere: tuple[str, ...] = ()
    mesh: Any = None
    is_for_all: bool = False

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The mesh axes over which the leaf is sharded."""
        return self.within(())

    def within(self, stacked: Collection[int]) -> tuple[str, ...]:
        """Those over which a layer is sharded, of those that a leaf stacks along some axes."""
        if self.per_axis is None:
            return self.anywhere
        rows = (names for axis, names in enumerate(self.per_axis) if axis not in stacked)
        return tuple(sorted(itertools.chain(*rows)))


def read_mesh_axes(function: str, mesh_axes: PyTree) -> PyTree:
    """A tree with a `Placement` for each entry of an option."""
    if mesh_axes is None:
        return Placement()
    expected = "None, an axis name, a tuple of names, or a PartitionSpec"
    tree = read_leaves(function, "mesh_axes", mesh_axes, _placement, expected)
    return dataclasses.replace(tree, is_for_all=True) if isinstance(tree, Placement) else tree


def _placement(x: PyTree) -> Placement | None:
    if x is None or isinstance(x, Placement):  # one that was read already
        return Placement() if x is None else x
    if not isinstance(x, PartitionSpec):
        names = x if type(x) is tuple else (x,)
        return Placement(anywhere=names) if all(isinstance(name, str) for name in names) else None
    per_axis = axes_of_spec(x)
    is_named = all(isinstance(name, str) for name in itertools.chain(*per_axis))
    return Placement(per_axis) if is_named else None


def read_leaves(
    function: str, name: str, tree: PyTree, read: Callable[[PyTree], Any], expected: str
) -> PyTree:
    """`tree` with each leaf as `read` understands it, which returns None for what is no leaf."""
    if tree is None and (none := read(tree)) is not None:
        return none
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        trees.opened(tree), is_leaf=lambda x: x is None or read(x) is not None
    )
    entries = [read(x) for _, x in leaves]
    if None in entries:
        path, x = leaves[entries.index(None)]
        if isinstance(x, jax.Array):
            expected += f"; {checks.INJECTED}"
        arg = ArgLeaves(function, name, [x], lambda: [jax.tree_util.keystr(path)])
        arg.fail(0, TypeError, f"{checks.describe(x)}, expected {expected}")
    return jax.tree.unflatten(structure, entries)


# ---- explicit and automatic axes ---------------------------------------------------------------


def is_sharded(x: jax.Array) -> bool:
    """Whether the type of `x` says that it is sharded: its mesh has explicit axes."""
    return not {None}.issuperset(jax.typeof(x).sharding.spec)


def automatic_mesh(x: jax.Array) -> Mesh | AbstractMesh | None:
    """The mesh of `x`, or that of `jax.set_mesh`, if all its axes are automatic; else None."""
    for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if _is_automatic(mesh):
            return mesh
    return None


def _is_automatic(mesh: Mesh | AbstractMesh) -> bool:
    return bool(mesh.axis_types) and all(kind == AxisType.Auto for kind in mesh.axis_types)


def axes_in_type(x: jax.Array) -> MeshAxesPerAxis | None:
    """For each axis the mesh axes over which it is sharded, if the type of `x` says all of them."""
    sharding = jax.typeof(x).sharding
    kinds = sharding.mesh.axis_types
    if not kinds or any(kind != AxisType.Explicit for kind in kinds):
        return None
    return axes_of_spec(sharding.spec)


def axes_of_spec(spec: PartitionSpec) -> MeshAxesPerAxis:
    """The names of mesh axes, as a tuple for each axis of an array."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return tuple(tuple(name for name in part if name is not None) for part in parts)


def is_on_mesh(x: jax.Array) -> bool:
    """Whether `x` may be sharded, as far as its type says it: with automatic axes not how it is.

    Nothing says it of arrays that only `in_shardings` puts there.
    """
    return any(kind != AxisType.Manual for kind in jax.typeof(x).sharding.mesh.axis_types)


def may_be_sharded(x: jax.Array) -> bool:
    """Whether `x` may be sharded by anything, `in_shardings` among it.

    Nothing shards an array on the only device, nor the part of one inside `shard_map`.
    """
    kinds = jax.typeof(x).sharding.mesh.axis_types
    return any(kind != AxisType.Manual for kind in kinds) if kinds else jax.device_count() > 1


def replicated(x: jax.Array) -> jax.Array:
    """`x` replicated on a mesh with explicit axes, so that it can be reshaped and concatenated."""
    if not is_sharded(x):
        return x
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()))


def whole_matrices(x: jax.Array) -> jax.Array:
    """A stack of matrices, none of which is sharded; automatic axes may shard their count alone."""
    mesh = jax.typeof(x).sharding.mesh
    if not _is_automatic(mesh):
        return x
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, None, None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def sharded_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` sharded as `like`, if the type of that says how."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding) if is_sharded(like) else x


def on_automatic_axes(f: Callable[..., PyTree], shardings: PyTree, *args: PyTree) -> PyTree:
    """`f(*args)` with explicit axes as automatic ones, its results sharded as `shardings` says."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    return jax.sharding.auto_axes(f, axes=explicit, out_sharding=shardings)(*args)


# ---- inside `shard_map` and `pmap` -------------------------------------------------------------


def all_gather(x: jax.Array, names: tuple[str, ...], axis: int = 0) -> jax.Array:
    """All parts on each device; typed as invariant over devices where JAX keeps account of that.

    The transpose of an invariant gather is a slice, which is right only where JAX knows of each
    cotangent whether it is invariant.
    """
    if not any(is_known_to_be_invariant(name) for name in names):
        return jax.lax.all_gather(x, names, axis=axis, tiled=True)
    if (gather := getattr(jax.lax, "all_gather_invariant", None)) is not None:  # JAX 0.8
        return gather(x, names, axis=axis, tiled=True)
    return jax.lax.all_gather(x, names, axis=axis, tiled=True, to="invarying")


def is_known_to_be_invariant(name: str, *arrays: jax.Array) -> bool:
    """Whether `shard_map` with `check_vma=True` knows that arrays are the same along a mesh axis.

    Without that check JAX knows nothing.
    """
    return name in invariant_axes(*arrays)


def invariant_axes(*arrays: jax.Array) -> tuple[str, ...]:
    """All such axes of the `shard_map` around."""
    varying = varying_axes(*arrays)
    same = tuple(name for name in _manual_axes() if name not in varying)
    return same if same and varying_axes(jax.eval_shape(_probe(same[0]))) else ()


@functools.cache  # one function object for each axis, so that JAX's caches find it again
def _probe(name: str) -> Callable[[], jax.Array]:
    """Without a check nothing can be made to vary. Traced apart: it is no part of the program."""
    return lambda: _varying(jnp.zeros(()), (name,))


def varying_axes(*arrays: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """The mesh axes along which some array varies, as its type says; none without a check.

    Also of a `jax.ShapeDtypeStruct`.
    """
    varying: set[str] = set()
    for x in arrays:  # what types say about it is undocumented; checked in JAX 0.8 to 0.12
        kind: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        if hasattr(jax.ShapeDtypeStruct, "manual_axis_type"):
            varying.update(() if kind.manual_axis_type is None else kind.manual_axis_type.varying)
        else:
            varying.update(kind.vma or ())  # JAX 0.8
    return tuple(sorted(varying))


def varying_over(tree: PyTree, names: Sequence[str]) -> PyTree:
    """The same numbers, each array typed as varying along these mesh axes, too."""

    def varied(x: Leaf) -> Leaf:
        if not isinstance(x, jax.Array):
            return x
        missing = tuple(name for name in names if name not in varying_axes(x))
        return _varying(x, missing) if missing else x

    return jax.tree.map(varied, tree) if names else tree


def varying_as(arrays: Sequence[jax.Array]) -> dict[str, Any]:
    """How a `jax.ShapeDtypeStruct` says along which axes that varies which is made of these."""
    axes = frozenset(varying_axes(*arrays))
    if hasattr(jax.ShapeDtypeStruct, "manual_axis_type"):
        return {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return {"vma": axes}  # JAX 0.8


def unknown_axes(*arrays: jax.Array) -> tuple[str, ...]:
    """The mesh axes of the `shard_map` or `pmap` around, along which some array may vary.

    None outside of both, and none in a `pmap` without a name: there each device has its own model.
    """
    if not (named := _manual_axes()):
        return ()
    known = invariant_axes(*arrays)
    return tuple(name for name in named if name not in known)


def barrier(tree: PyTree) -> PyTree:
    """`jax.lax.optimization_barrier`, with a barrier of its own for arrays that vary alike.

    Joined, all results would be typed as varying over the mesh axes over which one does.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        alike.setdefault(unknown_axes(x), []).append(i)
    for positions in alike.values():
        new = jax.lax.optimization_barrier([leaves[i] for i in positions])
        for i, x in zip(positions, new, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _manual_axes() -> list[str]:
    """Those of the `shard_map` or `pmap` around that have a name."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return []
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = (name for name, kind in kinds if kind == AxisType.Manual)
    return [name for name in manual if not str(name).startswith(_WITHOUT_NAME)]


def _varying(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, names, to="varying")
    return jax.lax.pvary(x, names)  # type: ignore[attr-defined]  # JAX 0.8
