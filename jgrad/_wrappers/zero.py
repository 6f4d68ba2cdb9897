"""ZeRO-1: each device keeps, and updates, a share of the state."""

import dataclasses
from typing import Any

import optax

from jgrad._inputs.update import Leaves
from jgrad._packed import arrays as slots
from jgrad._packed import collectives, packing
from jgrad._packed.rows import Share
from jgrad._trees import checks, trees, values
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping

_NAME = "zero"


def zero(
    tx: optax.GradientTransformation, axis_name: str | tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state is cut over devices, for packed parameters that are on each.

        g_i     = rows i of the mean of g over devices         one reduce-scatter per dtype
        u_i     = tx(g_i, state_i, w_i)                        1/n of the state and of the work
        updates = u_1, ..., u_n                                one all-gather per dtype

    For `shard_map` and `pmap`. It takes the mean over devices itself: give it the gradient of each
    device's own loss. The numbers are those of `tx` with `pmean`, where each element is treated by
    itself bit for bit, if reduce-scatter and all-reduce add up in one order, as on CPUs; LARS, LAMB
    and clipping see norms of whole layers, by a few small all-reduces more.

    Everything belongs inside, where it sees means: `zero(accumulate(master_weights(tx), 4),
    "data")`. What keeps arrays like the parameters, such as `accumulate` and `ema`, can stand
    around it under `pmap` alone, with `norm_axes=axis_name` where it is to be had, so that all
    devices skip the same steps.

    Pack for n devices: `pack(params, multiple_of=n)`. Outside of `shard_map` and `pmap`, `init`
    makes the whole state, to be cut as `state_shardings(tx, params, cut_over=axis_name)` says;
    inside, it makes this device's share. A checkpoint of `unpack(state)` fits any number of
    devices, and `tx` alone.

    Under `shard_map` with `check_vma=True`, `jax.grad` by parameters that are the same on all
    devices sums gradients over them unasked, and `zero` refuses them. Differentiate by
    `jax.lax.pcast(params, axis_name, to="varying")` (`jax.lax.pvary` in JAX 0.7), or choose
    `check_vma=False`.

    Half-precision gradients are summed in their dtype; cast them to float32 before, if that is not
    enough.

    Args:
      tx: any transformation of this library, or any other that works element by element and makes 0
        of 0.
      axis_name: the mesh axis over which the state is cut, or a tuple of axes.

    Returns:
      A transformation with the state of `tx`. Parameters are `Packed`, or trees of them.

    Raises:
      TypeError: `tx` is no transformation, or `axis_name` no name.
      ValueError: `axis_name` names an axis twice.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models" (2020), section 5.1, with the reduce-scatter of section 7.2.1.
    """
    tx = wrapping.inner(_NAME, tx)
    axes = values.axis_names(_NAME, "axis_name", axis_name)

    def init(params: PyTree) -> Any:
        share = collectives.share(axes)
        _check_packed(Row.of(_NAME, "params", params), params, share)
        if share is None:
            return tx.init(params)
        return _whole(tx.init(_shared(params, share)))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        share = collectives.share(axes)
        if share is None:
            remedy = "call `update` inside `shard_map` or `pmap`; under `jit`, use `tx` alone"
            raise ValueError(f"{_NAME}: `axis_name`: no axis {axis_name!r} here; {remedy}.")
        leaves = Leaves(_NAME, updates, params)
        _check_packed(leaves.reference, leaves.tree, share)
        _check_state(state, share)
        given = leaves.row("updates", updates)
        for i, g in enumerate(given.leaves):
            if g is not None and collectives.is_known_to_be_equal(g, share):
                given.fail(i, ValueError, f"the same on all devices along {axis_name!r}, {_SUMMED}")
        mean = trees.map_leaves(lambda g: collectives.scattered_mean(g, share), updates)
        steps, new = tx.update(
            _in_layouts(mean, share),
            _in_layouts(state, share),
            None if params is None else _shared(params, share),
            **extra_args,
        )
        steps = trees.map_leaves(lambda x: collectives.gathered(x, share), _whole(steps))
        return steps, _whole(new)

    return optax.GradientTransformationExtraArgs(init, update)


_SUMMED = (
    "so that they are summed or averaged already, expected those of each device's own loss: "
    'differentiate by `jax.lax.pcast(params, axis_name, to="varying")` without a mean, or choose '
    "`check_vma=False`"
)


def _in_layouts(tree: PyTree, share: Share | None) -> PyTree:
    """The same buffers, as what they are: whole ones, or shares of them."""
    return packing.with_layouts(tree, lambda layout: dataclasses.replace(layout, share=share))


def _whole(tree: PyTree) -> PyTree:
    """The same buffers for the world outside, where each array is cut or whole by its sharding."""
    return _in_layouts(tree, None)


def _shared(params: PyTree, share: Share) -> PyTree:
    """This device's rows of parameters that are whole."""
    return _in_layouts(trees.map_leaves(share.of, params), share)


def _check_packed(params: Row, tree: PyTree, share: Share | None) -> None:
    """Every array is a whole buffer of packed leaves, whose rows can be dealt out."""
    for i, (x, slot) in enumerate(zip(params.leaves, slots.of(tree), strict=True)):
        if x is None:
            continue
        if not slot.runs:
            packed = "a buffer of a `Packed`: `pack(params, multiple_of=devices)`"
            params.fail(i, TypeError, f"{checks.describe(x)}, expected {packed}")
        if slot.is_whole:
            params.fail(i, TypeError, "a leaf as it is, expected a packed one: no `max_size`")
        if x.shape != slot.shape:
            expected = f"{slot.shape}: whole parameters on each device"
            params.fail(i, ValueError, f"shape {x.shape}, expected {expected}")
        if share is not None and slot.shape[0] % share.devices:
            remedy = f"`pack(params, multiple_of={share.devices})`"
            problem = f"{slot.shape[0]} rows, expected a multiple of {share.devices} devices"
            params.fail(i, ValueError, f"{problem}: {remedy}")


def _check_state(state: Any, share: Share) -> None:
    """Each buffer is this device's share."""
    row = Row.of(_NAME, "state", state)
    for i, (x, slot) in enumerate(zip(row.leaves, slots.of(state), strict=True)):
        here = slot._replace(share=share).shape_here
        if slot.runs and getattr(x, "shape", None) == slot.shape != here:
            remedy = "cut it by the specs of `state_shardings`, or call `init` here"
            row.fail(i, ValueError, f"shape {x.shape}, expected {here}, this device's; {remedy}")
