"""Fused leaves: `split` as users give it, and the blocks of outputs that are matrices of their own.

Queries, keys and values may be one kernel, and all heads of each. An array is cut along its outputs
into runs of blocks of one size; a run is one array, with an axis that counts its blocks. So heads
are one reshape, and what is computed for matrices knows of no blocks.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._inputs.inputs import Parameters
from jgrad._layers.layer_axes import Axes, axis_exists, read_axes
from jgrad._muon.matrix_axes import MatrixAxes
from jgrad._trees import trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.shardings import replicated
from jgrad._trees.trees import PyTree

# ---- what a user gives as `split` --------------------------------------------------------------


def read_split(function: str, split: PyTree) -> PyTree:
    """A tree of `Axes` with sizes: (a, b) for those, (a, ...) for a head size, () for None."""

    def is_size(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    def read(x: Any) -> Axes | None:
        if x is None or is_size(x):
            return Axes() if x is None else Axes((x, ...))
        return Axes(x) if type(x) is tuple and x and all(map(is_size, x)) else None

    expected = "None, a head size (an int), or a tuple of sizes"
    if type(split) is tuple and not split:
        raise ValueError(f"{function}: `split`: (), expected {expected}.")
    found = read_axes(function, "split", split, read, expected)
    arg = ArgLeaves.from_tree(function, "split", found)
    for i, sizes in enumerate(arg.leaves):
        if any(size is not ... and size < 1 for size in sizes.values):
            arg.fail(i, ValueError, f"{_shown(sizes)}, expected sizes of 1 or more")
    return found


def with_blocks(
    inputs: Parameters, axes: Sequence[MatrixAxes | None], split: PyTree
) -> list[MatrixAxes | None]:
    """The matrices of each leaf, with the blocks into which it is split."""
    if not inputs.specs:
        return []
    arg = inputs.option("split", read_split(inputs.function, split))
    leaves = trees.flatten(inputs.shapes)[0]
    found = list(axes)
    for i, (own, x, sizes) in enumerate(zip(axes, leaves, arg.leaves, strict=True)):
        if x is None or not sizes.values:
            continue
        if own is None:
            expected = "None for a leaf that is no matrix; `by_path` chooses leaves"
            arg.fail(i, ValueError, f"{_shown(sizes)}, expected {expected}")
        found[i] = dataclasses.replace(own, blocks=_runs(arg, i, own, sizes))
    return found


def _runs(arg: ArgLeaves, i: int, own: MatrixAxes, sizes: Axes) -> tuple[tuple[int, int], ...]:
    """(number, size) of neighbours of one size; nothing for one block, which is the matrix."""
    names = [name for _, names in own.sharded_axes for name in names]
    # Inside `shard_map` the matrix, of which a device may have a part; before it leaves are whole.
    outputs = (own.whole if all(map(axis_exists, names)) else own).sizes[0]
    shape = f"an array of shape {own.shape}"
    if sizes.values[-1] is ...:
        size = sizes.values[0]
        if outputs % size:
            expected = f"a divisor of {outputs}, the number of outputs of {shape}"
            arg.fail(i, ValueError, f"{size}, expected {expected}")
        return ((outputs // size, size),) if outputs > size else ()
    if sum(sizes.values) != outputs:
        expected = f"{outputs}, the number of outputs of {shape}"
        arg.fail(i, ValueError, f"{sizes.values} with sum {sum(sizes.values)}, expected {expected}")
    runs: list[tuple[int, int]] = []
    for size in sizes.values:
        same = runs and runs[-1][1] == size
        runs = [*runs[:-1], (runs[-1][0] + 1, size)] if same else [*runs, (1, size)]
    return tuple(runs) if len(sizes.values) > 1 else ()


def _shown(sizes: Axes) -> Any:
    return sizes.values[0] if sizes.values[-1] is ... else sizes.values


# ---- runs of blocks ----------------------------------------------------------------------------


def pieces(axes: MatrixAxes) -> list[MatrixAxes]:
    """Where the matrices are in each array that `cut` returns."""
    if not axes.blocks:
        return [axes]
    first = axes.outputs[0]
    others = [axis for axis in range(len(axes.shape)) if axis not in axes.outputs]
    found = []
    for count, size in axes.blocks:
        # The old axes, with the outputs as one in the place of their first; -1 counts blocks.
        order = others[:first] + [-1] * (count > 1) + [first] + others[first:]
        names: dict[int, Any] = {}
        if axes.places is not None:
            names = dict(enumerate(axes.places)) | {-1: axes.places[first]}
            names |= {first: ()} if count > 1 else {}
        lengths = dict(enumerate(axes.shape)) | {-1: count, first: size}
        found.append(
            MatrixAxes(
                tuple(lengths[axis] for axis in order),
                tuple(i for i, axis in enumerate(order) if axis == -1 or axis in axes.stacked),
                (order.index(first),),
                places=None if axes.places is None else tuple(names[axis] for axis in order),
            )
        )
    return found


def cut(x: jax.Array, axes: MatrixAxes) -> list[jax.Array]:
    """An array for each run of blocks, of the whole array or of one number per output."""
    if not axes.blocks:
        return [x]
    order, first = _outputs_together(axes), axes.outputs[0]
    if order != tuple(range(x.ndim)):
        x = jax.lax.transpose(x, order)
    shape = [n for axis, n in zip(order, x.shape, strict=True) if axis not in axes.outputs]
    x = jax.lax.reshape(x, (*shape[:first], axes.sizes[0], *shape[first:]))
    found, start = [], 0
    for count, size in axes.blocks:
        end = start + count * size
        y = jax.lax.slice_in_dim(x, start, end, axis=first)
        if count > 1:
            y = jax.lax.reshape(y, (*shape[:first], count, size, *shape[first:]))
        found.append(y)
        start = end
    return found


def joined(runs: Sequence[jax.Array], axes: MatrixAxes) -> jax.Array:
    """The array from what `cut` made of it."""
    if not axes.blocks:
        return runs[0]
    order, first = _outputs_together(axes), axes.outputs[0]
    flat = []
    for x, (count, size) in zip(runs, axes.blocks, strict=True):
        if count > 1:
            x = jax.lax.reshape(x, (*x.shape[:first], count * size, *x.shape[first + 2 :]))
        flat.append(x)
    x = flat[0] if len(flat) == 1 else jax.lax.concatenate(flat, first)
    outputs = [axes.shape[axis] for axis in axes.outputs]
    x = jax.lax.reshape(x, (*x.shape[:first], *outputs, *x.shape[first + 1 :]))
    return x if order == tuple(range(x.ndim)) else jax.lax.transpose(x, np.argsort(order))


def _outputs_together(axes: MatrixAxes) -> tuple[int, ...]:
    """The axes, with all outputs behind the first of them."""
    first = axes.outputs[0]
    others = [axis for axis in range(len(axes.shape)) if axis not in axes.outputs]
    return (*others[:first], *axes.outputs, *others[first:])


def places_to_cut(axes: MatrixAxes, sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes for each axis of an array, so that a device cuts its part by itself.

    Along outputs where it has whole blocks there; else along another axis: one all-to-all.

    Args:
      axes: of the array, with `places`.
      sizes: of mesh axes.
    """
    assert axes.places is not None
    names = [axes.places[axis] for axis in axes.outputs]
    together = tuple(itertools.chain(*names))
    devices = math.prod(sizes[name] for name in together)
    is_first = names[0] == together
    if not together or (is_first and len(axes.blocks) == 1 and axes.blocks[0][0] % devices == 0):
        return axes.places
    found = [() if axis in axes.outputs else own for axis, own in enumerate(axes.places)]
    for axis in (*axes.inputs, *axes.stacked):
        if not found[axis] and axes.shape[axis] % devices == 0:
            found[axis] = together
            break
    return tuple(found)


# ---- numbers of matrices -----------------------------------------------------------------------


def sums(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    """The sum over each matrix, of a shape that broadcasts to the array."""
    if not axes.blocks:
        return jnp.sum(x, axis=(*axes.outputs, *axes.inputs), keepdims=True)
    rows = jnp.sum(x, axis=axes.inputs, keepdims=True)
    runs = cut(replicated(rows), axes)
    totals = [
        jnp.broadcast_to(jnp.sum(y, axis=own.outputs, keepdims=True), y.shape)
        for y, own in zip(runs, pieces(axes), strict=True)
    ]
    return joined(totals, axes)


def per_output(numbers: Sequence[jax.Array], axes: MatrixAxes) -> jax.Array:
    """One scalar for each run as one number per output, of a shape that broadcasts to the array."""
    sizes = [count * size for count, size in axes.blocks]
    real = np.result_type(*(x.dtype for x in numbers))
    pairs = zip(numbers, sizes, strict=True)
    x = jax.lax.concatenate([jnp.broadcast_to(x.astype(real), (n,)) for x, n in pairs], 0)
    return x.reshape([n if axis in axes.outputs else 1 for axis, n in enumerate(axes.shape)])
