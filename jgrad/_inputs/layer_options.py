"""Options about layers: where they are, and the trust ratios that some of them have."""

from typing import Any

from jgrad._inputs import numbers, options
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers.layer_axes import Axes, LayerAxes, as_typed, of_arrays, read_layer_axes
from jgrad._layers.trust import TrustLayers
from jgrad._trees import checks
from jgrad._trees.annotations import Mask, Scalar
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree
from jgrad._trees.shardings import read_mesh_axes
from jgrad._trees.told import stacked_leaves, told

# ---- what a factory can check ------------------------------------------------------------------


def check_decay_of_ivy(function: str, rule: str, decay_rule: str, expected_rule: str) -> None:
    """In Ivy's rules decay acts in the trust ratio alone."""
    if rule == "ivy" and decay_rule != expected_rule:
        reason = "whose weight decay acts only in the trust ratio"
        expected = f"{expected_rule!r} with `rule='ivy'`, {reason}"
        raise ValueError(f"{function}: `weight_decay_rule`: {decay_rule!r}, expected {expected}.")


def clamps(name: str, smallest: Scalar, largest: Scalar | None) -> tuple[Any, Any]:
    """Both clamps of the ratio as scalars; None for no upper one."""
    both = (
        numbers.scalar(name, "min_trust_ratio", smallest),
        numbers.scalar(name, "max_trust_ratio", numbers.upper_clamp(largest)),
    )
    check_clamps(name, smallest, largest)
    return both


def check_clamps(name: str, smallest: Any, largest: Any) -> None:
    """In order, as far as they are concrete."""
    if checks.is_number(smallest) and checks.is_number(largest) and not smallest <= largest:
        raise ValueError(
            f"{name}: `min_trust_ratio`: {smallest}, expected at most `max_trust_ratio`, which is "
            f"{largest}."
        )


def check_axes(function: str, mesh_axes: PyTree, layer_axes: PyTree) -> None:
    """Trees of axes, as far as they are known without parameters."""
    read_mesh_axes(function, mesh_axes)
    read_layer_axes(function, layer_axes)


# ---- an entry per array ------------------------------------------------------------------------


def layers(inputs: Parameters, mesh_axes: PyTree, layer_axes: PyTree) -> list[LayerAxes]:
    """Where the layers of each array are, and along which mesh axes they vary."""
    inputs.check_buffers()
    sharded = inputs.placements(mesh_axes)
    stacked = stacked_axes(inputs, layer_axes)
    reference = ArgLeaves.from_tree(inputs.function, "params", inputs.shapes).with_arrays()
    axes = of_arrays(inputs.specs, sharded, stacked, reference)
    return as_typed(axes, sharded, zip(inputs.reference.leaves, inputs.g, strict=True))


def stacked_axes(inputs: Parameters, layer_axes: PyTree) -> ArgLeaves:
    """Over which axes each leaf has its layers, by default those of `step_in_backward`.

    They are updated one by one there, so that no norm or matrix is of more than one of them.
    """
    arg = inputs.option("layer_axes", read_layer_axes(inputs.function, layer_axes))
    if not told().stacks:
        return arg
    leaves = list(arg.leaves)
    pairs = zip(inputs.specs, inputs.is_updated, strict=True)
    updated = {i for spec, is_updated in pairs if is_updated for i in spec.positions}
    for i, x, stack in stacked_leaves(inputs.shapes):
        if not leaves[i].values:
            leaves[i] = Axes((stack.axis,))
        elif i in updated and stack.axis not in {k % x.ndim for k in leaves[i].values}:
            expected = "in it: `step_in_backward` updates the layers of this stack one by one"
            arg.fail(i, ValueError, f"{leaves[i].values}, expected {stack.axis} {expected}")
    return arg._replace(leaves=leaves)


def trust_layers(
    inputs: Inputs, trust_ratio_mask: Mask | None, mesh_axes: PyTree, layer_axes: PyTree
) -> TrustLayers:
    """The same, and which have a trust ratio."""
    axes = layers(inputs, mesh_axes, layer_axes)
    use = options.mask(inputs, "trust_ratio_mask", trust_ratio_mask)
    return TrustLayers(axes, [spec.mask_per_layer(use) for spec in inputs.specs])
