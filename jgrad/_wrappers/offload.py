"""Optimizer state in host memory between steps."""

from __future__ import annotations

from typing import Any

from jgrad._inputs.transformation import pair
from jgrad._trees import host_memory, shares
from jgrad._trees.annotations import Inner
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree
from jgrad._wrappers import inside

_NAME = "offload"


@explained
def offload(tx: AnyTransformation[Inner]) -> Transformation[Inner]:
    """Keeps the state in host memory between steps, and moves it to the device for each step.

        updates, new = tx(g, on_device(state), w)
        state'       = on_host(new)

    Results are those of `tx`, bit for bit, up to how XLA fuses what other libraries compute in
    `step_in_backward`. Between steps the state takes no device memory; each
    step copies it to the device and back. Shardings stay as they are. The memory kind is
    `pinned_host`, also for results of `jax.jit` without `out_shardings`.

    In an ordinary step the whole state is on the device while it is updated. In `step_in_backward`,
    only the state of the current layer is, fetched while the gradient is computed; JAX cannot
    `jax.vmap` that. `jax.pmap` returns a state in device memory.

    Donate parameters and state together, and return both in that order. In any other order, or
    with the state alone, JAX 0.10 may pair an array on the host with a result of the same shape on
    the device, and the process aborts.

    Put it around everything else: `offload(skip_nonfinite(accumulate(tx, 4)))`. Other wrappers of
    this library refuse it, because they would compute with arrays in host memory. In `optax.chain`
    it offloads its own part of the state. Inside `shard_map`, such as around `zero`, call `update`
    under `jax.jit`.

    A state in device memory, such as one restored without shardings, is accepted, and the next
    state is in host memory. Do not donate it, or the process aborts likewise: first move it by
    `jax.device_put(state, jax.memory.Space.Host)`. `state_shardings(offload(tx), params)` includes
    the memory kind, for `out_shardings` and for restoring a checkpoint; `jax.eval_shape` does not.
    `carry_over`, `pack` and `unpack` leave a state in host memory there.

    Give the first step committed parameters: `jax.device_put(params, jax.devices()[0])` on one
    device. A state in host memory is committed, so the results of a step are too, and `jax.jit`
    would compile the second step again if the first parameters were not.

    You can differentiate through steps as with `tx` alone, except through a state that
    `jax.lax.scan` carries: JAX up to 0.12 raises an error there, because it makes no zeros in host
    memory, from which derivatives start. Differentiate `tx` instead, which gives the same results.

    On the CPU of JAX 0.8 the state stays where it is, in the only memory that is used.

    Args:
      tx: any transformation.

    Returns:
      A transformation with the state of `tx`.

    Raises:
      TypeError: `tx` is not a transformation.
      ValueError: `tx` is an `offload`, or has one inside.
      RuntimeError: in `init` and `update`, on a backend without memory of the kind
        `pinned_host`.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> tx = jgrad.offload(jgrad.gradient_descent(0.1, momentum=0.9))
      >>> state = tx.init(params)  # in host memory
      >>> updates, state = jax.jit(tx.update)(grads, state, params)
      >>> int(state.step), state.mw["w"].shape
      (1, (3, 2))

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), section
      4, for the state in host memory; here the update stays on the device.
    """
    tx = inside.transformation(_NAME, tx)

    def init(params: PyTree) -> PyTree:
        around = "expected it around all of `tx`"
        shares.refuse(_NAME, around, reason="inside another transformation")
        host_memory.check(_NAME)
        return host_memory.to_host(tx.init(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        host_memory.check(_NAME)
        steps, new = tx.update(updates, host_memory.to_device(state), params, **extra_args)
        return steps, host_memory.to_host(new)

    made = pair(init, update, _NAME)
    inside.set_offloaded(made, inner=tx)
    return made
