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
from jgrad._inputs.around import Commit
from jgrad._kernels.leaf_step import Place
from jgrad._kernels.moment import LeafMoment, is_rounded, kept
from jgrad._layers.array_spec import ArraySpec
from jgrad._quantized import codec, encoding
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.geometry import in_rows
from jgrad._quantized.random_bits import ElementKeys, step_keys
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import Blocks, Factors
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import replicated, varying_axes

_SEED = 0
_PURPOSE = 1  # moments; weights are rounded with other bits

# The names of the mesh axes along which some axes of an array are sharded.
MeshAxesOf: TypeAlias = Callable[[Sequence[int]], tuple[str, ...]]


class RandomKeys:
    """What the random bits of one update are a hash of; only computed if something is rounded."""

    def __init__(self, step: jax.Array) -> None:
        self._step = step
        self._known: dict[Any, tuple[ArraySpec, ElementKeys]] = {}

    @functools.cached_property
    def of_step(self) -> jax.Array:
        """Of all elements."""
        return step_keys(self._step)

    def rounding(self, spec: ArraySpec, x: jax.Array | Blocks, place: Place | None) -> Rounding:
        """How the elements of an array are rounded; moments of a leaf share their keys."""
        key = id(spec), x.shape, varying_axes(*jax.tree.leaves(x)), place
        if key not in self._known:
            self._known[key] = spec, spec.element_keys(_SEED, _PURPOSE, x, place)
        return Rounding(self.of_step, self._known[key][1])


@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """A moment of every array in one update.

    Attributes:
      old: as the state has it; a list with an entry per leaf, with `Blocks` for arrays in 8 bits.
      specs: what each array stands for.
      keys: what it is rounded with; None where nothing is.
      commit: whether the update is committed; None where it always is.
      has_form: whether new moments are stored as old ones are; functional updates cast what they
        return.
      places: how each array is sharded, if the user says so; else empty.
    """

    old: list[Any]
    specs: Sequence[ArraySpec] = ()
    keys: RandomKeys | None = None
    commit: Commit | None = None
    has_form: bool = False
    places: Sequence[Place | None] = ()

    def of_leaf(self, i: int) -> LeafMoment:
        """The moment of one leaf, to read and to write."""
        old, rounding, flag, clips = self.old[i], None, None, False
        if self.keys is not None and is_rounded(old):
            place = self.places[i] if self.places else None
            rounding = self.keys.rounding(self.specs[i], old, place)
        if self.commit is not None:
            flag, clips = self.commit.flag, self.commit.clips
        return LeafMoment(old, rounding, flag, clips, self.has_form)

    def has_kernel(self, i: int) -> bool:
        """Whether the leaf is one kernel on accelerators."""
        return isinstance(self.old[i], Blocks) and in_rows(self.old[i])

    def part(self, name: str | None) -> "Moment":
        """Those rows or columns that leaves have, or with None the leaves that are not factored."""
        if name is None:
            old = [None if isinstance(x, Factors) else x for x in self.old]
        else:
            old = [getattr(x, name) if isinstance(x, Factors) else None for x in self.old]
        return dataclasses.replace(self, old=old, places=())

    def written(self, new: list[Any]) -> list[Any]:
        """New moments as the state will hold them, which were written leaf by leaf."""
        if self.has_form and self.commit is not None:
            self.commit.keep(new, self.old)
        return new


class Shapes(NamedTuple):
    """The moments that a method keeps, for given parameters.

    Attributes:
      mw: a tree like the parameters with the shape of each first moment; None for no moment.
      vw: likewise of second moments.
      matrices: where those of each leaf are, or of each array, as the method has it; None for none.
    """

    mw: PyTree
    vw: PyTree
    matrices: list[Any] | None = None


class Step(NamedTuple):
    """What one update of a method starts from.

    Attributes:
      number: of this update, counting from 1.
      done: number of completed updates, as in the state.
      mw: first moment; empty if the method has none.
      vw: second moment; likewise.
      matrices: of `Shapes`.
      numbers: keyword arguments of this call of `update`, such as `learning_rate`.
      more: other fields of the state, as the method reads them.
    """

    number: jax.Array
    done: jax.Array
    mw: Moment
    vw: Moment
    matrices: list[Any]
    numbers: Mapping[str, Any]
    more: Any = None

    @property
    def as_float(self) -> jax.Array:
        """The number in the default float dtype, for bias corrections."""
        return jnp.asarray(self.number, dtype=float)

    @classmethod
    def of_count(cls, done: jax.Array) -> "Step":
        """Of a wrapper, for options: they ask a step for its number alone."""
        nothing = Moment([], [])
        return cls(done, done, nothing, nothing, [], {})


# ---- arrays of moments -------------------------------------------------------------------------


def zeros(
    function: str,
    params: PyTree,
    dtype: DTypeLike | None = None,
    *,
    shapes: PyTree = None,
    mesh_axes: Sequence[MeshAxesOf | None] = (),
    stacked: Sequence[tuple[int, ...] | None] | None = None,
    real: bool = False,
) -> PyTree:
    """A tree of zeros like the parameters, in `dtype`, or in theirs but float32 at least.

    None for integers, which have no moments: orbax refuses to save empty arrays. Computed from the
    parameters, so that they are sharded as those are.

    Args:
      function: whose errors they are.
      params: the parameters.
      dtype: see above.
      shapes: those of the zeros where they differ from the parameters'; None in it for none,
        `Factors` of shapes for those.
      mesh_axes: of each array, in `shard_map`, along which some of its axes are sharded.
      stacked: for each array the axes of its layers if it is in 8 bits, else None.
      real: whether zeros are real where parameters are complex.
    """
    leaves = checks.parameters(ArgLeaves.from_tree(function, "params", params).with_arrays())
    like, structure = trees.flatten(params if shapes is None else shapes)
    axes = [None] * len(like) if stacked is None else stacked
    zeros: list[Any] = [None] * len(like)
    # If leaves are packed, some methods pass this per leaf and not per array; none is whole there.
    names = mesh_axes if len(mesh_axes) == len(like) else [None] * len(like)
    for i, (p, x, names_of, stacked_axes) in enumerate(zip(leaves, like, names, axes, strict=True)):
        if p is not None and isinstance(x, Factors):
            zeros[i] = Factors(*(_zeros(_part(p, of, names_of), dtype, real) for of in x))
        elif p is not None and x is not None:
            part = p if np.shape(x) == p.shape else _part(p, x, names_of)
            if stacked_axes is None:
                zeros[i] = _zeros(part, dtype, real)
            else:
                x = numerics.zeros_like(part, np.dtype(np.float32))
                zeros[i] = encoding.zeros(x, stacked_axes, codec.of_moments(second=real))
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


def _zeros(p: jax.Array, dtype: DTypeLike | None, real: bool) -> jax.Array | None:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return None
    dtype = numerics.real_dtype(p) if dtype is None else np.dtype(dtype)
    is_complex = jnp.iscomplexobj(p) and not real
    return numerics.zeros_like(p, numerics.complex_dtype(dtype) if is_complex else dtype)


def check_form(function: str, new: Sequence[Any], old: Sequence[Any]) -> None:
    """No array is written where the state has codes: it would be cast to their dtype."""
    for n, o in zip(new, old, strict=True):
        if n is not None and isinstance(o, Blocks) and not isinstance(n, Blocks):
            expected = "expected Blocks, as `Moment.write` makes them"
            raise TypeError(f"{function}: a moment in 8 bits: {checks.describe(n)}, {expected}.")


def kept_arrays(new: Sequence[Any], old: Sequence[Any], commit: Commit | None) -> list[Any]:
    """The old arrays where the update is not committed."""
    if commit is None:
        return list(new)
    return leafwise.run(
        [
            None if n is None else (kept(o.dtype, commit.clips), (n, o, commit.flag))
            for n, o in zip(new, old, strict=True)
        ]
    )
