"""ZeRO-1: each device keeps and updates a shard of the state."""

from __future__ import annotations

import dataclasses

from jgrad._inputs.pair import pair
from jgrad._layers import array_spec
from jgrad._packed import packing
from jgrad._packed.layouts import Shard
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Inner
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import refuse
from jgrad._wrappers import inside
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "zero"


@explained
def zero(tx: AnyTransformation[Inner], axis_name: str | tuple[str, ...]) -> Transformation[Inner]:
    """Shards the state of `tx` over devices, while packed parameters stay replicated.

        g_i     = rows i of the mean of g over devices         one reduce-scatter per dtype
        u_i     = tx(g_i, state_i, w_i)                        1/n of the state and of the work
        updates = u_1, ..., u_n                                one all-gather per dtype

    Use it inside `shard_map` or `pmap`. It averages gradients over devices itself, so pass the
    gradient of each device's own loss. Results match those of `tx` after `pmean`: for elementwise
    methods in float32 bit for bit, if reduce-scatter and all-reduce add in the same order, as on
    CPUs. LARS, LAMB and clipping use norms of whole layers, at the cost of a few small all-reduces.

    Put every other wrapper inside, where it gets averaged gradients:
    `zero(accumulate(master_weights(tx), 4), "data")`. A wrapper whose state has arrays like the
    parameters, such as `accumulate` or `average_params`, can only go around `zero` under `pmap`.
    Pass it `mesh_axes=axis_name` if it has this option, so that all devices skip the same steps.

    Pack the parameters for n devices: `pack(params, multiple_of=n)`. Muon's matrices cannot be
    packed, so use its `shard_over` under `jit` instead of `zero`. Outside of `shard_map` and
    `pmap`, `init` returns the whole state, to be sharded by `state_shardings(tx, params,
    shard_over=axis_name)`; inside, it returns the device's own shard. A checkpoint of
    `unpack(state)` fits any number of devices, and also `tx` alone.

    Under `shard_map` with `check_vma=True`, `jax.grad` with respect to replicated parameters
    already sums gradients over devices, and `zero` raises an error. Differentiate with respect to
    `jax.lax.pcast(params, axis_name, to="varying")`, or set `check_vma=False`.

    Half-precision gradients are summed in their own dtype; if that is not accurate enough, cast
    them to float32 first.

    Args:
      tx: any transformation of jgrad, or any other that is elementwise and maps 0 to 0.
      axis_name: the mesh axis over which the state is sharded, or a tuple of axes.

    Returns:
      A transformation with the state of `tx`, for parameters that are `Packed` or trees of these.

    Raises:
      TypeError: `tx` is not a transformation, or `axis_name` is neither a name nor a tuple of
        names.
      ValueError: `axis_name` names an axis twice.

    Example:
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
      >>> params = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, multiple_of=mesh.size)
      >>> params = jax.device_put(params, NamedSharding(mesh, P()))
      >>> tx = jgrad.zero(jgrad.adam(1e-3), "data")  # for a step inside `shard_map` over "data"
      >>> shardings = jgrad.state_shardings(tx, params, shard_over="data")
      >>> shardings.mw.buffers["float32"].spec == P("data")
      True

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models" (2020), section 5.1, with the reduce-scatter of section 7.2.1.
    """
    tx = inside.transformation(_NAME, tx)
    axes = checks.axis_names(_NAME, "axis_name", axis_name)

    def init(params: PyTree) -> PyTree:
        refuse(_NAME, "shard the leaves under `jax.jit`, or use the ordinary step")
        local = Shard.over(axes)
        _check_packed(ArgLeaves.from_tree(_NAME, "params", params), params, local)
        if local is None:
            return tx.init(params)
        return _with_shard(tx.init(_sliced(params, local)), None)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        local = Shard.over(axes)
        if local is None:
            remedy = "call `update` inside `shard_map` or `pmap`; under `jit`, use `tx` alone"
            raise ValueError(f"{_NAME}: `axis_name`: no axis {axis_name!r} here; {remedy}.")
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        _check_packed(inputs.reference, inputs.tree, local)
        _check_state(state, local)
        arg = inputs.like_reference("updates", updates)
        for i, g in enumerate(arg.leaves):
            if g is not None and local.is_known_to_be_invariant(g):
                arg.fail(i, ValueError, f"the same on all devices along {axis_name!r}, {_SUMMED}")
        mean = trees.map_leaves(local.mean, updates)
        steps, new = inputs.hand_over(
            tx,
            _with_shard(mean, local),
            _with_shard(state, local),
            None if params is None else _sliced(params, local),
        )
        steps = _with_shard(steps, None)
        return trees.map_leaves(local.gather, steps), _with_shard(new, None)

    return pair(init, update, _NAME)


_SUMMED = (
    "so that they are summed or averaged already, expected those of each device's own loss: "
    'differentiate by `jax.lax.pcast(params, axis_name, to="varying")` without a mean, or choose '
    "`check_vma=False`"
)


def _with_shard(tree: PyTree, local: Shard | None) -> PyTree:
    """A tree whose layouts say which rows its arrays are; None for all rows.

    Outside of `tx` each array is whole, or sharded as its sharding says, and layouts do not say it.
    """
    return packing.with_layouts(tree, lambda x: dataclasses.replace(x, shard=local))


def _sliced(params: PyTree, local: Shard) -> PyTree:
    """This device's rows of replicated parameters."""
    return _with_shard(trees.map_leaves(local.slice, params), local)


def _check_packed(params: ArgLeaves, tree: PyTree, local: Shard | None) -> None:
    """Checks that every array is a whole buffer of packed leaves, whose rows can be sharded."""
    for i, (x, spec) in enumerate(zip(params.leaves, array_spec.specs(tree), strict=True)):
        if x is None:
            continue
        if not spec.is_buffer:
            packed = "a buffer of a `Packed`: `pack(params, multiple_of=devices)`"
            params.fail(i, TypeError, f"{checks.describe(x)}, expected {packed}")
        if spec.is_unpacked:
            params.fail(i, TypeError, "an unpacked leaf, expected a packed one: no `max_size`")
        if x.shape != spec.shape:
            expected = f"{spec.shape}: whole parameters on each device"
            params.fail(i, ValueError, f"shape {x.shape}, expected {expected}")
        if local is not None and spec.shape[0] % local.devices:
            remedy = f"`pack(params, multiple_of={local.devices})`"
            problem = f"{spec.shape[0]} rows, expected a multiple of {local.devices} devices"
            params.fail(i, ValueError, f"{problem}: {remedy}")


def _check_state(state: PyTree, local: Shard) -> None:
    """Checks that each buffer is this device's shard; if one cannot be divided, `tx` knows why."""
    arg = ArgLeaves.from_tree(_NAME, "state", state)
    for i, (x, spec) in enumerate(zip(arg.leaves, array_spec.specs(state), strict=True)):
        if not spec.has_rows or spec.shape[0] % local.devices:
            continue
        expected = dataclasses.replace(spec, shard=local).local_shape
        if getattr(x, "shape", None) == spec.shape != expected:
            remedy = "shard it as `state_shardings` says, or call `init` here"
            problem = f"shape {x.shape}, expected {expected}, this device's; {remedy}"
            arg.fail(i, ValueError, problem)
