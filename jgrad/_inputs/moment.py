"""The moments of all leaves in one update: their old values, and how new ones are stored."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leaf_moment import LeafMoment, is_rounded
from jgrad._trees import checks, forms, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import replicated

# The names of the mesh axes along which some axes of an array are sharded.
MeshAxesOf: TypeAlias = Callable[[Sequence[int]], tuple[str, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """A moment of every array in one update.

    Attributes:
      old: as the state has it; a list with an entry per leaf.
      random: how it is rounded at random, see `forms.random`; None where nothing is.
      commit: a `Commit`, whether the update is committed; None where it always is.
      has_form: whether new moments are stored as old ones are; functional updates cast what they
        return.
    """

    old: list[Any]
    random: Any = None
    commit: Any = None
    has_form: bool = False

    def of_leaf(self, i: int) -> LeafMoment:
        """The moment of one leaf, to read and to write."""
        old, rounding, flag, clips = self.old[i], None, None, False
        if self.random is not None and is_rounded(old):
            rounding = self.random.of_leaf(i, old)
        if self.commit is not None:
            flag, clips = self.commit.flag, self.commit.clips
        return LeafMoment(old, rounding, flag, clips, self.has_form)

    def at(self, rows: Sequence[int]) -> "Moment":
        """Of some of these arrays, by their positions."""
        random = None if self.random is None else self.random.at(rows)
        return dataclasses.replace(self, old=leafwise.at(self.old, rows), random=random)


class Shapes(NamedTuple):
    """The moments that a method keeps, for given parameters.

    Attributes:
      moments: by its name in the state, for each a tree like the parameters with its shapes.
      matrices: where they are in leaves that have some, by positions in the unpacked tree.
    """

    moments: Mapping[str, PyTree]
    matrices: Mapping[int, Any] = {}


class Step(NamedTuple):
    """What one update of a method starts from.

    Attributes:
      number: of this update, counting from 1.
      done: number of completed updates, as in the state.
      moments: by their names, those of `Shapes`.
      matrices: of `Shapes`.
      numbers: keyword arguments of this call of `update`, such as `learning_rate`.
      more: other fields of the state, as the method reads them.
    """

    number: jax.Array
    done: jax.Array
    moments: Mapping[str, Moment]
    matrices: Mapping[int, Any]
    numbers: Mapping[str, Any]
    more: Any = None

    @property
    def as_float(self) -> jax.Array:
        """The number in the default float dtype, for bias corrections."""
        return jnp.asarray(self.number, dtype=float)

    @classmethod
    def of_count(cls, done: jax.Array) -> "Step":
        """Of a wrapper, for options: they ask a step for its number alone."""
        return cls(done, done, {}, {}, {})


# ---- arrays of moments -------------------------------------------------------------------------


def zeros(
    function: str,
    params: PyTree,
    dtype: DTypeLike | None = None,
    *,
    shapes: PyTree = None,
    mesh_axes: Mapping[int, MeshAxesOf] = {},
    form: forms.Form | None = None,
    layouts: Sequence[Any] | None = None,
    real: bool = False,
) -> PyTree:
    """A tree of zeros like the parameters, in `dtype`, or in theirs but float32 at least.

    None for integers, which have no moments: orbax refuses to save empty arrays. Computed from the
    parameters, so that they are sharded as those are.

    Args:
      function: whose errors they are.
      params: the parameters.
      dtype: see above.
      shapes: those of the zeros where they differ from the parameters'; None in it for none, and in
        a form of shapes what a method stores so.
      mesh_axes: of some arrays, in `shard_map`, along which some of their axes are sharded.
      form: that a user chose.
      layouts: how each array is stored in it; None for those that are not.
      real: whether zeros are real where parameters are complex.
    """
    leaves = checks.parameters(ArgLeaves.from_tree(function, "params", params).with_arrays())
    like, structure = trees.flatten(params if shapes is None else shapes)
    none: list[Any] = [None] * len(like)
    zeros = list(none)
    for i, (p, x, layout) in enumerate(zip(leaves, like, layouts or none, strict=True)):
        if p is None or x is None:
            continue
        names_of = mesh_axes.get(i)
        zeros_of = functools.partial(_zeros, p, names_of, dtype, real)
        if (form_of_method := forms.find(x)) is not None:
            zeros[i] = form_of_method.zeros(p, x, None, zeros_of, real)
        elif form is None or layout is None:
            zeros[i] = zeros_of(x)
        else:
            part = p if np.shape(x) == p.shape else _part(p, x, names_of)
            zeros[i] = form.zeros(part, x, layout, zeros_of, real)
    return structure.unflatten(zeros)


def _part(p: jax.Array, like: Any, names_of: MeshAxesOf | None) -> jax.Array:
    """By a sum where there is one number for each index of some axes: a sharded axis is not cut.

    In `shard_map`, the sum is one of all devices, so that types say, as after an update, that it is
    the same on them.
    """
    shape = np.shape(like)
    pairs = list(zip(p.shape, shape, strict=True))
    if all(b in (a, 1) for a, b in pairs):
        over = tuple(i for i, (a, b) in enumerate(pairs) if a != b)
        total = jnp.sum(p, axis=over, keepdims=True)
        names = () if names_of is None else names_of(over)
        return jax.lax.psum(total, names) if names else total
    return replicated(p)[tuple(map(slice, shape))]


def _zeros(
    p: jax.Array, names_of: MeshAxesOf | None, dtype: DTypeLike | None, real: bool, like: Any
) -> jax.Array | None:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return None
    p = p if np.shape(like) == p.shape else _part(p, like, names_of)
    dtype = numerics.real_dtype(p) if dtype is None else np.dtype(dtype)
    is_complex = jnp.iscomplexobj(p) and not real
    return numerics.zeros_like(p, numerics.complex_dtype(dtype) if is_complex else dtype)
