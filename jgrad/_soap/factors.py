"""Shampoo's factors of each matrix, as the state has them, and what they make of a gradient."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import leafwise, numerics, rules
from jgrad._arithmetic.leafwise import Function
from jgrad._inputs.inputs import OTHER_LEAVES, Inputs, Parameters
from jgrad._layers import layer_axes as layer_axes_of
from jgrad._muon import matrix_axes
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._soap import bases
from jgrad._soap.bases import Side, product
from jgrad._trees import checks, trees, variables
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import state_of
from jgrad._trees.shardings import is_sharded, on_automatic_axes
from jgrad._trees.trees import PyTree

Array = jax.Array | None


class Factors(NamedTuple):
    """Those of one leaf: a matrix, or a stack of them along first axes.

    A side above `max_side` has neither average nor basis.

    Attributes:
      left: average of G G^H, of shape (..., rows, rows).
      right: average of G^H G, of shape (..., columns, columns).
      left_basis: eigenvectors of `left`, as columns.
      right_basis: eigenvectors of `right`.
    """

    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


Factors.__module__ = "jgrad"
# Of one leaf: one, or of a leaf that is split in blocks of several sizes a tuple of them.
OfLeaf = tuple[Factors, ...]
_FIELDS = Factors._fields


@state_of("moments", step="step", mw="moment", vw="moment", factors="factors")
class SoapState(NamedTuple):
    """State of `soap`.

    Attributes:
      step: number of updates done, an int32 scalar; it saturates.
      mw: first moment, as in `OptState`.
      vw: second moment; that of a matrix is in the basis of its factors.
      factors: a tree like the parameters, with `left`, `right`, `left_basis` and `right_basis` of
        each matrix, in float32 or wider; None for other leaves.

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
        """The step, by optax's name."""
        return self.step

    @property
    def mu(self) -> PyTree:
        """The first moment, by optax's name."""
        return self.mw

    @property
    def nu(self) -> PyTree:
        """The second moment, by optax's name."""
        return self.vw


# ---- in a state --------------------------------------------------------------------------------


def init(inputs: Parameters, matrices: Sequence[MatrixAxes | None], max_side: int) -> PyTree:
    """Before the first update: averages are zero, and each basis is the identity."""
    entries: list[Any] = []
    arrays = {i: x for spec, x in zip(inputs.specs, inputs.reference.leaves, strict=True) for i in spec.positions}
    for i, axes in enumerate(matrices):
        if axes is None:
            entries.append(None)
            continue
        shapes = _shapes(axes, arrays[i], max_side)
        made = [Factors(*(_begun(arrays[i], axes, of, name) for of, name in zip(run, _FIELDS, strict=True))) for run in shapes]
        entries.append(_as_entry(made))
    return _structure(inputs).unflatten(entries)


def read(
    inputs: Inputs, matrices: Sequence[MatrixAxes | None], max_side: int, tree: PyTree
) -> list[OfLeaf | None]:
    """The factors of each leaf, checked against the choice of leaves."""
    expected: list[Any] = []
    arrays = {i: x for spec, x in zip(inputs.specs, inputs.reference.leaves, strict=True) for i in spec.positions}
    for i, axes in enumerate(matrices):
        expected.append(None if axes is None else _as_entry(_shapes(axes, arrays[i], max_side)))
    structure = _structure(inputs)
    like = structure.unflatten(expected)
    function, name = inputs.function, "state.factors"
    checks.same_structure(function, name, tree, "params", like, remedy=OTHER_LEAVES)
    arg = ArgLeaves.from_tree(function, name, tree).with_arrays()
    of_params = ArgLeaves.from_tree(function, "params", like)
    for i, (x, y) in enumerate(zip(arg.leaves, of_params.leaves, strict=True)):
        is_kind = y is not None and checks.is_inexact(x) and checks.is_of_kind(x, y)
        if (x is None) != (y is None) or not (y is None or is_kind):
            kind = "None" if y is None else f"an array of {y.dtype}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {kind}; {OTHER_LEAVES}")
    checks.same_shapes(arg, of_params)
    leaves = iter(arg.leaves)
    read = jax.tree.map(lambda _: next(leaves), like, is_leaf=trees.is_none)
    return [
        None if axes is None else entry if len(matrix_axes.pieces(axes)) > 1 else (entry,)
        for axes, entry in zip(matrices, structure.flatten_up_to(read), strict=True)
    ]


def tree_of(inputs: Parameters, entries: Sequence[OfLeaf | None]) -> PyTree:
    """The factors as the state has them."""
    return _structure(inputs).unflatten([None if x is None else _as_entry(x) for x in entries])


def _structure(inputs: Parameters) -> Any:
    """That of the unpacked parameters, with a leaf where a box of flax has one."""

    def is_leaf(x: PyTree) -> bool:
        return trees.is_leaf(x) or variables.is_box(x)

    return jax.tree.structure(inputs.shapes, is_leaf=is_leaf)


def _as_entry(runs: Sequence[Factors]) -> Any:
    return runs[0] if len(runs) == 1 else tuple(runs)


def _shapes(axes: MatrixAxes, x: jax.Array, max_side: int) -> list[Factors]:
    """The shapes of the factors of each run."""
    real = numerics.real_dtype(x)
    dtype = numerics.complex_dtype(real) if jnp.iscomplexobj(x) else real
    found = []
    for piece in matrix_axes.pieces(whole(axes)):
        *stack, rows, columns = piece.as_matrices.shape
        left, right = (
            jax.ShapeDtypeStruct((*stack, n, n), dtype) if 0 < n <= max_side else None
            for n in (rows, columns)
        )
        found.append(Factors(left, right, left, right))
    return found


def whole(axes: MatrixAxes) -> MatrixAxes:
    """Inside `shard_map` the matrices, of which a device may have a part; before it leaves are."""
    names = [name for _, names in axes.sharded_axes for name in names]
    return axes.whole if all(map(layer_axes_of.axis_exists, names)) else axes


def _begun(x: jax.Array, axes: MatrixAxes, of: Any, name: str) -> Array:
    """Computed from the parameter, so that it is on its mesh, and along stacked axes sharded as it."""
    if of is None:
        return None
    *stack, size, _ = of.shape
    one = np.eye(size) if name.endswith("basis") else np.zeros((size, size))
    one = jnp.asarray(one, of.dtype)
    zeros = numerics.zeros_like(x, of.dtype)
    within = tuple(axis for axis in range(x.ndim) if axis not in axes.stacked)
    zeros = jnp.max(zeros.real, axis=within, initial=0.0) if x.size else jnp.zeros((), zeros.real.dtype)
    if zeros.ndim and zeros.shape == tuple(stack):
        return jnp.broadcast_to(zeros[..., None, None].astype(of.dtype), of.shape) + jnp.broadcast_to(one, of.shape)
    zero = jnp.max(zeros, initial=0.0).astype(of.dtype)
    return jnp.broadcast_to(one, of.shape) + jnp.broadcast_to(zero, of.shape)


# ---- what they make of a gradient --------------------------------------------------------------


def into_bases(x: Sequence[Array], axes: Sequence[MatrixAxes | None], factors: Sequence[OfLeaf | None]) -> list[Array]:
    """Q_L^H X Q_R of each matrix."""
    return _rotated(x, axes, factors, back=False)


def out_of_bases(x: Sequence[Array], axes: Sequence[MatrixAxes | None], factors: Sequence[OfLeaf | None]) -> list[Array]:
    """Q_L X Q_R^H of each matrix."""
    return _rotated(x, axes, factors, back=True)


def _rotated(
    arrays: Sequence[Array],
    axes: Sequence[MatrixAxes | None],
    factors: Sequence[OfLeaf | None],
    *,
    back: bool,
) -> list[Array]:
    calls = []
    for x, of, own in zip(arrays, axes, factors, strict=True):
        if x is None or of is None or own is None:
            calls.append(None)
            continue
        sides = [(run.left_basis, run.right_basis) for run in own]
        calls.append((_of_axes(_rotation, of.whole, back), (of.gathered(x), sides)))
    new = leafwise.run(calls)
    return [None if x is None else of.local_part(x) for x, of in zip(new, axes, strict=True)]


def averaged(
    g: Sequence[Array],
    axes: Sequence[MatrixAxes | None],
    factors: Sequence[OfLeaf | None],
    beta: Sequence[Any],
    complement: Sequence[Any],
) -> list[OfLeaf | None]:
    """The factors with new averages."""
    calls = []
    for x, of, own, *numbers in zip(g, axes, factors, beta, complement, strict=True):
        if x is None or of is None or own is None:
            calls.append(None)
            continue
        sides = [(run.left, run.right) for run in own]
        calls.append((_of_axes(_averages, of.whole), (of.gathered(x), sides, *numbers)))
    new = leafwise.run(calls)
    return [
        own if x is None or own is None
        else tuple(run._replace(left=l, right=r) for run, (l, r) in zip(own, x, strict=True))
        for own, x in zip(factors, new, strict=True)
    ]


def refreshed(
    function: str,
    factors: Sequence[OfLeaf | None],
    is_updated: Sequence[bool],
    what: jax.Array,
    shard_over: tuple[str, ...],
) -> list[OfLeaf | None]:
    """The factors with new bases."""
    runs = [run for own, use in zip(factors, is_updated, strict=True) if own and use for run in own]
    pairs = [pair for run in runs for pair in ((run.left, run.left_basis), (run.right, run.right_basis))]
    sides = [Side(*pair) for pair in pairs if pair[0] is not None]
    new = iter(bases.refreshed(function, sides, what, shard_over))
    found: list[OfLeaf | None] = []
    for own, use in zip(factors, is_updated, strict=True):
        if not (own and use):
            found.append(own)
            continue
        found.append(
            tuple(
                run._replace(
                    left_basis=None if run.left is None else next(new),
                    right_basis=None if run.right is None else next(new),
                )
                for run in own
            )
        )
    return found


# ---- on the array of one leaf ------------------------------------------------------------------


def _rotation(x: jax.Array, sides: list[tuple[Array, Array]], *, axes: MatrixAxes, back: bool) -> jax.Array:
    def rotated(x: jax.Array, sides: list[tuple[Array, Array]]) -> jax.Array:
        x = numerics.widen(x, numerics.real_dtype(x))
        runs = []
        for y, of, (left, right) in zip(matrix_axes.cut(x, axes), matrix_axes.pieces(axes), sides, strict=True):
            y = of.as_matrices.of(y)
            y = y if left is None else product(left, y, adjoint_x=not back)
            y = y if right is None else product(y, right, adjoint_y=back)
            runs.append(of.as_matrices.back(y))
        return matrix_axes.joined(runs, axes, x.shape)

    return _automatic(rotated, jax.typeof(x).sharding, x, sides)


def _averages(
    g: jax.Array, sides: list[tuple[Array, Array]], beta: jax.Array, complement: jax.Array, *, axes: MatrixAxes
) -> list[tuple[Array, Array]]:
    def averages(g: jax.Array, sides: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        g = numerics.widen(g, numerics.real_dtype(g))
        new = []
        for y, of, (left, right) in zip(matrix_axes.cut(g, axes), matrix_axes.pieces(axes), sides, strict=True):
            y = of.as_matrices.of(y)
            of_left = None if left is None else product(y, y, adjoint_y=True)
            of_right = None if right is None else product(y, y, adjoint_x=True)
            new.append(
                tuple(
                    None if old is None else rules.average(square, old, beta, complement)
                    for square, old in ((of_left, left), (of_right, right))
                )
            )
        return new

    return _automatic(averages, jax.tree.map(lambda x: jax.typeof(x).sharding, sides), g, sides)


def _automatic(f: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """With explicit axes as automatic ones, since products contract axes that are sharded."""
    if any(map(is_sharded, jax.tree.leaves(args))):
        return on_automatic_axes(f, shardings, *args)
    return f(*args)


@functools.cache
def _of_axes(rule: Function, axes: MatrixAxes, back: bool | None = None) -> Function:
    """One function object for all arrays with such matrices, so that JAX's caches find it again."""
    options = {} if back is None else {"back": back}
    return functools.partial(rule, axes=axes, **options)
