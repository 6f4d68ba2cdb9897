"""Shampoo's factors of each matrix, as the state stores them, and how a gradient changes them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Call, Function, PerLeaf
from jgrad._inputs.inputs import OTHER_LEAVES, Inputs, Parameters
from jgrad._inputs.matrix_options import unpacked
from jgrad._inputs.moment import Shapes
from jgrad._layers import matrix_axes
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._soap import bases
from jgrad._soap.bases import Side, product
from jgrad._trees import checks, forms, trees, variables
from jgrad._trees.annotations import Count
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import FIRST, SECOND, Leaf, PyTree, state_of
from jgrad._trees.shardings import is_sharded, on_automatic_axes
from jgrad._trees.trees import Structure

# Something of rows and of columns, of those that have a factor.
Sides = dict[str, jax.Array]
_SIDES = ("left", "right")


class SoapFactors(NamedTuple):
    """Averages and bases that `soap` keeps for each leaf that is a matrix or a stack of matrices.

    A side longer than `max_side` has None for both. Field names are part of the checkpoint format.

    Attributes:
      left: average of G G^H, of shape (..., rows, rows).
      right: average of G^H G, of shape (..., columns, columns).
      left_basis: eigenvectors of `left`, as columns.
      right_basis: eigenvectors of `right`.

    Example:
      >>> state = jgrad.soap(3e-3, matrices=True, max_side=4).init({"w": jnp.ones((9, 3))})
      >>> state.factors["w"].left, state.factors["w"].right_basis.shape
      (None, (3, 3))
    """

    left: PyTree
    right: PyTree
    left_basis: PyTree
    right_basis: PyTree


SoapFactors.__module__ = "jgrad"


class Run(NamedTuple):
    """The same of a run of pieces, without what there is not."""

    averages: Sides
    bases: Sides

    @classmethod
    def of(cls, stored: SoapFactors) -> "Run":
        """From the form in which the state has them, None for each that there is not."""
        pairs = stored[:2], stored[2:]
        return cls(
            *({k: x for k, x in zip(_SIDES, pair, strict=True) if x is not None} for pair in pairs)
        )

    def stored(self) -> SoapFactors:
        """In that form."""
        return SoapFactors(*(sides.get(k) for sides in self for k in _SIDES))


Runs = tuple[Run, ...]  # of one leaf; several if it is split into pieces of several sizes


@state_of("moments", step="step", mw=FIRST, vw=SECOND, factors="factors")
class SoapState(NamedTuple):
    """State of `soap`.

    Attributes:
      step: number of completed updates, an int32 scalar; it saturates.
      mw: first moment, as in `OptState`.
      vw: second moment; for matrices, in the basis of their factors.
      factors: a tree like the parameters with `SoapFactors` for matrices, or with `split` a tuple
        of them, in float32 or wider; None for other leaves.

    Example:
      >>> tx = jgrad.soap(3e-3, matrices={"w": True, "b": False})
      >>> state = tx.init({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> jax.tree.map(jnp.shape, state.factors["w"].left_basis), state.factors["b"]
      ((3, 3), None)
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree
    factors: PyTree

    @property
    def count(self) -> jax.Array:  # type: ignore[override]  # hides `tuple.count`
        """optax's name for `step`."""
        return self.step

    @property
    def mu(self) -> PyTree:
        """optax's name for `mw`."""
        return self.mw

    @property
    def nu(self) -> PyTree:
        """optax's name for `vw`."""
        return self.vw


# ---- in a state --------------------------------------------------------------------------------


def init(inputs: Parameters, shapes: Shapes, *, max_side: Count) -> tuple[PyTree]:
    """Before the first update: averages are zero, and each basis is the identity."""
    leaves = unpacked(inputs)
    begun = {i: _begun(leaves[i], axes, max_side) for i, axes in shapes.matrices.items()}
    return (tree_of(inputs, begun),)


def read(inputs: Inputs, shapes: Shapes, state: SoapState, *, max_side: Count) -> dict[int, Runs]:
    """The factors of the matrices, checked against the choice of leaves."""
    leaves, tree = unpacked(inputs), state.factors
    expected_runs = {i: _shapes(axes, leaves[i], max_side) for i, axes in shapes.matrices.items()}
    like = tree_of(inputs, expected_runs)
    function, name = inputs.function, "state.factors"
    checks.same_structure(function, name, tree, "params", like, remedy=OTHER_LEAVES)
    arg = ArgLeaves.from_tree(function, name, tree).with_arrays()
    expected = ArgLeaves.from_tree(function, "params", like)
    for i, pair in enumerate(zip(arg.leaves, expected.leaves, strict=True)):
        inputs.check_kind(arg, i, *pair, True, real=False)
    checks.same_shapes(arg, expected)
    tree = trees.flatten(like)[1].unflatten(arg.leaves)
    entries = _structure(inputs).flatten_up_to(tree)
    return {
        i: tuple(map(Run.of, entries[i] if len(runs) > 1 else entries[i : i + 1]))
        for i, runs in expected_runs.items()
    }


def tree_of(inputs: Parameters, factors: Mapping[int, Runs]) -> PyTree:
    """The factors as the state has them."""
    structure = _structure(inputs)
    stored = {i: tuple(run.stored() for run in runs) for i, runs in factors.items()}
    leaves = {i: runs if len(runs) > 1 else runs[0] for i, runs in stored.items()}
    return structure.unflatten(map(leaves.get, range(structure.num_leaves)))


def _structure(inputs: Parameters) -> Structure:
    """That of the unpacked parameters, with a leaf where a box of flax has one."""

    def is_leaf(x: PyTree) -> bool:
        return trees.is_leaf(x) or variables.is_box(x)

    return jax.tree.structure(inputs.shapes, is_leaf=is_leaf)


def _shapes(axes: MatrixAxes, x: jax.Array, max_side: Count) -> Runs:
    """The shapes of the factors of each run of pieces."""
    real = numerics.real_dtype(x)
    dtype = numerics.complex_dtype(real) if jnp.iscomplexobj(x) else real

    def shapes_of_run(run: MatrixAxes) -> Run:
        *stack, rows, columns = run.as_matrices.shape
        lengths = {"left": rows, "right": columns}
        sides: Any = {
            k: jax.ShapeDtypeStruct((*stack, n, n), dtype)
            for k, n in lengths.items()
            if 0 < n <= max_side
        }
        return Run(sides, sides)

    return tuple(map(shapes_of_run, matrix_axes.axes_of_runs(axes.whole)))


def _begun(x: jax.Array, axes: MatrixAxes, max_side: Count) -> Runs:
    """Computed from the parameter, so that it is on its mesh, with layers sharded as they are."""

    def begun(like: jax.Array, *, is_basis: bool) -> jax.Array:
        size = like.shape[-1]
        one = jnp.eye(size, dtype=like.dtype) if is_basis else jnp.zeros((size, size), like.dtype)
        start = jnp.broadcast_to(one, like.shape)
        within = tuple(axis for axis in range(x.ndim) if axis not in axes.stacked)
        zeros = jnp.sum(numerics.zeros_like(x, like.dtype), axis=within)
        if zeros.shape != like.shape[:-2]:  # pieces are counted there as well
            zeros = jnp.sum(zeros)
        names = axes.sharded_over(within)
        if names:  # types then say, as after an update, that it is whole
            zeros = jax.lax.psum(zeros, names)
        while zeros.ndim < start.ndim:
            zeros = zeros[..., None]
        return start + jnp.broadcast_to(zeros, like.shape)

    return tuple(
        Run(
            {k: begun(like, is_basis=False) for k, like in run.averages.items()},
            {k: begun(like, is_basis=True) for k, like in run.bases.items()},
        )
        for run in _shapes(axes, x, max_side)
    )


# ---- what they make of a gradient --------------------------------------------------------------


class Matrices(NamedTuple):
    """The matrices of an update: an entry for each array that has some.

    Attributes:
      axes: where they are.
      factors: of them.
    """

    axes: Sequence[MatrixAxes]
    factors: Sequence[Runs]

    def rotated(self, arrays: Sequence[jax.Array], *, into: bool) -> list[jax.Array]:
        """P^H X Q of each matrix, or P X Q^H."""
        return self._on_each([leafwise.fixed(_rotated, into=into)] * len(arrays), arrays)

    def noise(self, m: Sequence[jax.Array], stored: Sequence[Leaf]) -> list[jax.Array]:
        """What rounding adds to P^H M Q: of each matrix a number, at each of its elements."""
        functions = [leafwise.fixed(_noise, rounding=_rounding(x)) for x in stored]
        return self._on_each(functions, m)

    def _on_each(
        self, functions: Sequence[Function], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        calls: list[Call] = []
        for f, x, axes, runs in zip(functions, arrays, *self, strict=True):
            arguments = axes.gathered(x), [run.bases for run in runs]
            calls.append((leafwise.fixed(f, axes=axes.whole), arguments))
        pairs = zip(leafwise.run(calls), self.axes, strict=True)
        return [axes.local_part(x) for x, axes in pairs]

    def averaged(self, g: Sequence[jax.Array], beta: PerLeaf, complement: PerLeaf) -> "Matrices":
        """With the averages behind this gradient."""
        calls: list[Call] = []
        numbers = (leafwise.per_leaf(x, len(g)) for x in (beta, complement))
        for x, axes, runs, *both in zip(g, *self, *numbers, strict=True):
            arguments = axes.gathered(x), [run.averages for run in runs], *both
            calls.append((leafwise.fixed(_averages, axes=axes.whole), arguments))
        pairs = zip(self.factors, leafwise.run(calls), strict=True)
        new = [tuple(Run(x, run.bases) for run, x in zip(*pair, strict=True)) for pair in pairs]
        return self._replace(factors=new)

    def refreshed(self, function: str, what: jax.Array, shard_over: tuple[str, ...]) -> "Matrices":
        """With new bases."""
        runs = list(itertools.chain(*self.factors))
        sides = [Side(x, run.bases[k]) for run in runs for k, x in run.averages.items()]
        new = iter(bases.refreshed(function, sides, what, shard_over))
        turned = [
            tuple(run._replace(bases={k: next(new) for k in run.bases}) for run in runs)
            for runs in self.factors
        ]
        return self._replace(factors=turned)


# ---- on the array of one leaf ------------------------------------------------------------------


def _rotated(x: jax.Array, sides: Sequence[Sides], *, axes: MatrixAxes, into: bool) -> jax.Array:
    """Into the bases, P^H X Q, or out of them, P X Q^H."""

    def rotated(y: jax.Array, sides: Sides) -> jax.Array:
        for k, basis in sides.items():
            is_left = k == "left"
            y = (
                product(basis, y, adjoint_x=into)
                if is_left
                else product(y, basis, adjoint_y=not into)
            )
        return y

    return _on_runs(rotated, x, sides, axes)


def _noise(m: jax.Array, sides: Sequence[Sides], *, axes: MatrixAxes, rounding: float) -> jax.Array:
    """A rotation spreads the rounding of large elements over all, by their root mean square."""

    def noise(y: jax.Array, sides: Sides) -> jax.Array:
        if not sides:
            return jnp.zeros_like(y)
        product_rounding = float(jnp.finfo(y.dtype).eps) * max(y.shape[-2:]) ** 0.5
        squares = numerics.abs_squared(jax.lax.stop_gradient(y))
        rms = jnp.sqrt(jnp.mean(squares, axis=(-2, -1), keepdims=True))
        return jnp.broadcast_to(max(rounding, product_rounding) * rms, y.shape).astype(y.dtype)

    return _on_runs(noise, m, sides, axes)


def _rounding(stored: Leaf) -> float:
    """Of a moment in this form, relative to its elements, as it is left after some updates."""
    form = forms.find(stored)
    return 2 * float(jnp.finfo(stored.dtype).eps) if form is None else form.precision


def _on_runs(
    function: Callable[..., jax.Array], x: jax.Array, sides: Sequence[Sides], axes: MatrixAxes
) -> jax.Array:
    """`function(matrices, bases)` of each run of pieces, as an array like `x`."""

    def on_all(x: jax.Array, sides: Sequence[Sides]) -> jax.Array:
        runs = []
        for y, run, of_run in zip(*_runs(x, axes), sides, strict=True):
            real = numerics.real_dtype(y)
            wide = {k: numerics.widen(basis, real) for k, basis in of_run.items()}
            runs.append(run.as_matrices.back(function(y, wide)))
        return matrix_axes.joined(runs, axes, x.shape)

    return _automatic(on_all, jax.typeof(x).sharding, x, sides)


def _averages(
    g: jax.Array,
    sides: Sequence[Sides],
    beta: jax.Array,
    complement: jax.Array,
    *,
    axes: MatrixAxes,
) -> list[Sides]:
    def average(k: str, old: jax.Array, y: jax.Array) -> jax.Array:
        square = product(y, y, adjoint_x=k == "right", adjoint_y=k == "left")
        new: jax.Array = rules.average(square, old, beta, complement)
        return new.astype(old.dtype)  # a gradient may be wider

    def averages(g: jax.Array, sides: Sequence[Sides]) -> list[Sides]:
        return [
            {k: average(k, x, y) for k, x in of_run.items()}
            for y, _, of_run in zip(*_runs(g, axes), sides, strict=True)
        ]

    return _automatic(averages, jax.tree.map(lambda x: jax.typeof(x).sharding, sides), g, sides)


def _runs(x: jax.Array, axes: MatrixAxes) -> tuple[list[jax.Array], list[MatrixAxes]]:
    """The matrices of each run of pieces, in float32 or wider, and where they are in it."""
    runs = matrix_axes.axes_of_runs(axes)
    wide = numerics.wide(x)
    pairs = zip(matrix_axes.cut(wide, axes), runs, strict=True)
    return [run.as_matrices.of(y) for y, run in pairs], runs


def _automatic(f: Function, shardings: PyTree, *args: PyTree) -> PyTree:
    """With explicit axes as automatic ones, since products contract axes that are sharded."""
    if jax.tree.leaves(shardings) and any(map(is_sharded, jax.tree.leaves(args))):
        return on_automatic_axes(f, shardings, *args)
    return f(*args)
