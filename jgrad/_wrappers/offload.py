"""Optimizer state in host memory between steps."""

from __future__ import annotations

from jgrad._inputs.pair import pair
from jgrad._trees import forms, host_memory
from jgrad._trees.annotations import Inner
from jgrad._trees.explained import AnyTransformation, Transformation, explained
from jgrad._trees.protocols import PyTree
from jgrad._wrappers import inside
from jgrad._wrappers.begin_on_host import begun, committed

_NAME = "offload"


@explained
def offload(tx: AnyTransformation[Inner]) -> Transformation[Inner]:
    """Keeps the large arrays of a state in host memory between steps.

        updates, new = tx(g, on_device(state), w)
        state'       = new, each array where the old one lay

    Results are those of `tx`, bit for bit, up to how XLA fuses in `step_in_backward` what other
    libraries compute, or moments in 8 bits. `init` puts an array on the host if it has 2^16
    elements or more, of codes as many words, unless it is a stack of vectors or of small matrices,
    with fewer than 256 rows in all: these stay on the device, with all scalars, because XLA for
    TPUs cannot slice them in host memory. After `init`, each array stays where it lies, which is a
    part of its type. So you can also place a state yourself, by `jax.device_put(state,
    jax.memory.Space.Host)`, and a state that was restored to device memory stays there.

    With more than 2^23 parameters, which may lie in host memory, `init` makes large arrays slice by
    slice, so that one slice or one layer is on the device at a time. Whole leaves are there only if
    elements depend on each other, as for the norms of `hyperball` and the factors of `soap`. Such
    an `init` is compiled, and its results are those of `jax.jit(tx.init)`.

    On the host, four codes of 8-bit moments are one word of 32 bits, because XLA for TPUs would
    copy a whole stack of bytes to slice it. This needs a last axis whose length is a multiple of
    256, and another whose length is a multiple of 4; other codes stay on the device. Save
    `unpack(state)`, which has codes again, since a file should not depend on where a state lay.
    `pack(restored, like=tx.init(params))` and `carry_over` make words where `like` has them.

    In an ordinary step the whole state is on the device while it is updated. In `step_in_backward`,
    only that of the current layer is, fetched while the gradient is computed, and an embedding is
    updated in slices of rows. The weights may lie in host memory, too; see `step_in_backward`.
    JAX cannot `jax.vmap` over slices of host memory, and `jax.pmap` returns a state in device
    memory. Shardings stay as they are; the memory kind is `pinned_host`.

    Donate parameters and state together, and return them in that order; scalars and other results
    may stand anywhere. JAX pairs what is donated with results of the same shape and dtype without
    asking where they lie, and a pair in two memories ends the process. With `out_shardings` for all
    results, any order is right.

    Put it around everything else: `offload(skip_nonfinite(accumulate(tx, 4)))`. Other wrappers of
    this library refuse it, because they would compute with arrays in host memory. In `optax.chain`
    it offloads its own part of the state. Inside `shard_map`, such as around `zero`, call `update`
    under `jax.jit`.

    `state_shardings(offload(tx), params)` includes the memory kind, for `out_shardings` and for
    restoring a checkpoint; `jax.eval_shape` does not. `carry_over`, `pack` and `unpack` leave a
    state in host memory there.

    Give the first step committed parameters, as `jax.device_put(params, jax.memory.Space.Device)`
    returns them. An array in host memory is committed, so the results of a step are too, and
    `jax.jit` would compile the second step again if the first parameters were not.

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
      RuntimeError: in `init`, on a backend without memory of the kind `pinned_host`.

    Example:
      >>> params = grads = {"w": jnp.ones((256, 256)), "b": jnp.zeros(256)}
      >>> tx = jgrad.offload(jgrad.gradient_descent(0.1, momentum=0.9))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> state.mw["w"].sharding.memory_kind, state.mw["b"].sharding.memory_kind
      ('pinned_host', 'device')

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), section
      4, for the state in host memory; here the update stays on the device.
    """
    tx = inside.transformation(_NAME, tx)

    def init(params: PyTree) -> PyTree:
        inside.check_outside()
        inside.check_not_in_multi_steps(_NAME)
        host_memory.check(_NAME)
        return committed(begun(tx.init, params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        on_device = forms.to_codes(host_memory.to_device(state))
        steps, new = tx.update(updates, on_device, params, **extra_args)
        return steps, host_memory.where_they_lay(forms.as_stored(new, state), state)

    return inside.marked_as_offload(pair(init, update, _NAME, offloads=True))
