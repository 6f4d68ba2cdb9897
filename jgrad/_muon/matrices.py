"""Where the matrices of a model are: which leaves are chosen, and what of them a device has."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jgrad._inputs import options
from jgrad._inputs.inputs import Parameters
from jgrad._inputs.options import Mask
from jgrad._layers.layer_axes import LayerAxes, read_layer_axes
from jgrad._muon import matrix_axes, packed_parts
from jgrad._muon.matrix_axes import MatrixAxes, read_cuts, read_output_axes
from jgrad._packed.arrays import ArraySpec
from jgrad._packed.deals import Deal
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree


def find(
    inputs: Parameters, matrices: Mask, output_axes: PyTree, layer_axes: PyTree, norm_axes: PyTree
) -> list[MatrixAxes | None]:
    """Where the matrices of each leaf of the unpacked tree are; None for a leaf that is none."""
    if not inputs.specs:
        return []
    function = inputs.function
    reference = ArgLeaves.from_tree(function, "params", inputs.shapes).with_arrays()
    pairs = zip(options.mask(inputs, "matrices", matrices), reference.leaves, strict=True)
    use = [use and x is not None and jnp.issubdtype(x.dtype, jnp.inexact) for use, x in pairs]
    chosen = reference._replace(name="matrices", leaves=use)
    stacked = inputs.option("layer_axes", read_layer_axes(function, layer_axes))
    outputs = inputs.option("output_axes", read_output_axes(function, output_axes))
    layers = _layers_of_leaves(inputs.specs, chosen, stacked, reference)
    axes = matrix_axes.of_leaves(layers, outputs, chosen)
    _check_whole(inputs.specs, axes, chosen)
    cuts = ArgLeaves.from_prefix(
        function, "norm_axes", read_cuts(function, norm_axes), inputs.reference.name, inputs.shapes
    )
    return _with_cuts(inputs.specs, axes, cuts, inputs.reference.leaves)


def _layers_of_leaves(
    specs: Sequence[ArraySpec], chosen: ArgLeaves, layer_axes: ArgLeaves, reference: ArgLeaves
) -> list[LayerAxes]:
    """The layers of each leaf that is chosen: as given, or as they were packed."""
    packed = [pair for spec in specs for pair in zip(spec.positions, spec.spans, strict=False)]
    layers = matrix_axes.layers_of(chosen, layer_axes, reference)
    for i, span in packed:
        own = span.layers
        if chosen.leaves[i] and own.stacked:
            if layers[i].stacked not in ((), own.stacked):
                expected = f"the axes with which it was packed, {own.stacked}"
                layer_axes.fail(i, ValueError, f"{layers[i].stacked}, expected {expected}")
            layers[i] = own
    return layers


def _with_cuts(
    specs: Sequence[ArraySpec],
    axes: Sequence[MatrixAxes | None],
    norm_axes: ArgLeaves,
    arrays: Sequence[Any],
) -> list[MatrixAxes | None]:
    """The same, with what a device has of each leaf outside of every `Packed`."""
    alone = {spec.positions[0]: x for spec, x in zip(specs, arrays, strict=True) if not spec.spans}
    for i, given in enumerate(norm_axes.leaves):
        if given is not None and any(given.values) and axes[i] is not None and i not in alone:
            problem = "a PartitionSpec of a packed leaf, expected None: `zero` knows its rows"
            norm_axes.fail(i, ValueError, problem)
    unpacked = [own if i in alone else None for i, own in enumerate(axes)]
    leaves = [alone.get(i) for i in range(len(axes))]
    cut = matrix_axes.with_cuts(unpacked, norm_axes, norm_axes._replace(leaves=leaves))
    return [own if x is None else x for own, x in zip(axes, cut, strict=True)]


def _check_whole(
    specs: Sequence[ArraySpec], axes: Sequence[MatrixAxes | None], chosen: ArgLeaves
) -> None:
    """No matrix is in the rows of two devices; and leaves that were packed as equals are equal."""
    for spec in specs:
        i = min((i for i in spec.positions if axes[i] is not None), default=None)
        if i is None or spec.is_unpacked:
            continue
        devices = 1 if spec.shard is None else spec.shard.devices
        if devices > 1 and (spec.deal is None or spec.deal.shares % devices):
            problem = (
                f"a matrix in a buffer of which each of {devices} devices has some rows, expected "
                f"whole matrices on each: `pack(params, matrices=..., multiple_of={devices})`"
            )
            chosen.fail(i, ValueError, problem)
        if spec.deal is not None:
            _check_segments(spec, spec.deal, axes, chosen)


def _check_segments(
    spec: ArraySpec, deal: Deal, axes: Sequence[MatrixAxes | None], chosen: ArgLeaves
) -> None:
    for segment, members in packed_parts.members(spec, deal):
        items = [packed_parts.of_item(axes[spec.positions[j]], spec.spans[j]) for j in members]
        for j, item in zip(members, items, strict=True):
            i = spec.positions[j]
            if (item is None) == bool(segment.slots):
                packed = "a matrix" if segment.slots else "no matrix"
                problem = f"{item is not None}, but it was packed as {packed}"
                remedy = "expected the `matrices` with which `pack` was called"
                chosen.fail(i, ValueError, f"{problem}, {remedy}")
            if item != items[0]:
                other = spec.spans[members[0]].path
                problem = f"another place of outputs than in {other}, of equal shape"
                remedy = "expected the same, as they share a part of the buffer"
                chosen.fail(i, ValueError, f"{problem}, {remedy}")
