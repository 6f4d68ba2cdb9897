"""The layout for a tree: which leaves are packed, in which order, and where each starts."""

import math

import jax
import numpy as np

from jgrad._layers import layer_axes as axes_of
from jgrad._layers.layer_axes import Axes
from jgrad._packed.layouts import APART, WIDTH, Layout, Span
from jgrad._quantized.encoding import SMALLEST
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree

_EXPECTED = (
    "expected a floating array, since the gradient of a Packed could not hold others; pack those "
    "alone: `floating, others = equinox.partition(tree, equinox.is_inexact_array)`, or with None "
    "in the place of each other leaf"
)


def layout_of(
    function: str,
    tree: PyTree,
    layer_axes: PyTree = None,
    multiple_of: int = 1,
    max_size: int | None = None,
    *,
    small_apart: bool = False,
    others: bool = False,
) -> tuple[Layout, list[jax.Array | None]]:
    """The layout for a tree of floating arrays, and its leaves; with `others`, for any arrays.

    Leaves of more than `max_size` elements stay unpacked, and so do others than floating ones. With
    `small_apart`, leaves that are too small for 8 bits share no buffer with larger ones.
    """
    arg = ArgLeaves.from_tree(function, "tree", tree).with_arrays()
    for i, x in enumerate(arg.leaves):
        if not (x is None or checks.is_inexact(x) or (others and checks.is_numeric(x))):
            arg.fail(i, TypeError, f"{checks.describe(x)}, {_EXPECTED}")
    axes = axes_of.read_layer_axes(function, layer_axes)
    stacked = ArgLeaves.from_prefix(function, "layer_axes", axes, "tree", tree)
    not_sharded = arg._replace(name="mesh_axes", leaves=[Axes()] * len(arg.leaves))
    layers = axes_of.of_leaves(not_sharded, stacked, arg)

    spans: list[Span | None] = [None] * len(arg.leaves)
    packed: list[tuple[int, Span]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (x, path, leaf_layers) in enumerate(zip(arg.leaves, arg.paths(), layers, strict=True)):
        if x is None:
            continue
        large = max_size is not None and math.prod(x.shape) > max_size
        if large or not checks.is_inexact(x):
            name = f"leaf {i}"  # not the path: two leaves may have one
            spans[i] = Span(path, np.dtype(x.dtype), leaf_layers, name, None, 0)
            shapes[name] = x.shape
            continue
        blocks_per_layer = -(-leaf_layers.layer_size // WIDTH)
        is_apart = small_apart and math.prod(x.shape) < SMALLEST
        name = x.dtype.name + APART * is_apart
        packed.append((i, Span(path, np.dtype(x.dtype), leaf_layers, name, 0, blocks_per_layer)))
    # Leaves that are alike are neighbours: XLA compiles equal pieces of work once.
    packed.sort(key=lambda member: (member[1].layers.shape, member[1].layers.stacked))
    buffers: dict[str, list[tuple[int, Span]]] = {}
    for member in packed:
        buffers.setdefault(member[1].buffer, []).append(member)
    for name, members in buffers.items():
        row = 0
        for i, span in members:
            spans[i] = span._replace(start=row)
            row += span.num_blocks
        shapes[name] = (-(-row // multiple_of) * multiple_of, WIDTH)
    layout = Layout(trees.flatten(tree)[1], tuple(spans), tuple(sorted(shapes.items())))
    return layout, list(arg.leaves)
