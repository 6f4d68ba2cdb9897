"""Clipping by the norm of all gradients together."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._inputs import methods, options
from jgrad._inputs.options import Scalar
from jgrad._layers import layer_axes as places
from jgrad._packed import arrays as slots
from jgrad._packed import packing
from jgrad._trees import checks, trees
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree


def clip_by_global_norm(
    max_norm: Scalar, *, norm_axes: PyTree = None
) -> optax.GradientTransformationExtraArgs:
    """Scales all updates down together where their norm is above a bound.

        updates' = min(1, max_norm / |updates|) updates

    with |.| the 2-norm over all leaves, computed without overflow or underflow, as in
    `global_norm`. Where one is NaN or infinite all become NaN, for `skip_nonfinite` to see. Dtypes
    are kept; integer leaves, float0 and None pass.

    Args:
      max_norm: in [0, inf).
      norm_axes: see `lars`; the norm is then that of the whole leaves.

    Returns:
      A transformation without state.

    Raises:
      ValueError: a Python number out of range.
      TypeError: an option of the wrong kind.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
      (2013), algorithm 1.
    """
    name = "clip_by_global_norm"
    options.scalar(name, "max_norm", max_norm)
    places.names(name, norm_axes)

    def init(params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, optax.EmptyState]:
        row, own = _floating(name, "updates", updates)
        clipped = methods.clip(
            own, options.scalar(name, "max_norm", max_norm), _places(row, updates, norm_axes)
        )
        leaves = [
            x if new is None else new.astype(x.dtype)
            for x, new in zip(row.leaves, clipped, strict=True)
        ]
        return trees.flatten(updates)[1].unflatten(leaves), state

    return optax.GradientTransformationExtraArgs(init, update)


def global_norm(tree: PyTree, *, norm_axes: PyTree = None) -> jax.Array:
    """The 2-norm of all floating leaves together.

        norm = sqrt(sum over leaves and elements of |x|^2)

    Neither overflows nor underflows on the way, in float32 or wider; its derivative at zero is
    zero. A norm beyond the largest number is infinite.

    Args:
      tree: floating or complex leaves; others, and None, do not count.
      norm_axes: see `lars`; the norm is then that of the whole leaves.

    Returns:
      A scalar, float32, or float64 where a leaf is.

    Raises:
      TypeError: a leaf that is no array.
      ValueError: `norm_axes` that do not fit.
    """
    row, own = _floating("global_norm", "tree", tree)
    norm = methods.global_norm(own, _places(row, tree, norm_axes))
    return norm.root * norm.unit


def _floating(function: str, name: str, tree: PyTree) -> tuple[Row, list[Any]]:
    """The leaves, and those that count, with `None` for the others."""
    without = trees.map_leaves(lambda x: None if _is_float0(x) else x, tree)
    checks.arrays_or_numbers(function, name, without)
    row = Row.of(function, name, tree).with_arrays()
    own = [
        x if x is not None and jnp.issubdtype(x.dtype, jnp.inexact) else None for x in row.leaves
    ]
    return row, own


def _is_float0(x: Any) -> bool:
    return bool(getattr(x, "dtype", None) == jax.dtypes.float0)


def _places(row: Row, tree: PyTree, norm_axes: PyTree) -> list[places.Place]:
    """One layer for each array, since only the norm of all is asked for."""
    names, shapes = places.names(row.function, norm_axes), packing.shapes(tree)
    cut = Row.spread(row.function, "norm_axes", names, row.name, shapes)
    none = cut._replace(leaves=[places.Axes()] * len(cut.leaves))
    of_leaves = Row.of(row.function, row.name, shapes).with_arrays()
    each = slots.in_arrays(slots.of(tree), cut, none, of_leaves)
    return [places.Place(place.shape, cut=place.cut) for place in each]
