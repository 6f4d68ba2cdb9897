"""Whether arrays are finite, on every device that has a part of them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise
from jgrad._arithmetic.leafwise import Call, jit_static_kwargs
from jgrad._trees import checks
from jgrad._trees.trees import PyTree
from jgrad._wrappers.devices import agreed

# Leaves per stack. An eager call compiles a program of so many arguments once: in 0.4 s, and one of
# 5,000 in 18 s.
_TOGETHER = 256


def all_finite(tree: PyTree, mesh_axes: tuple[str, ...] = ()) -> jax.Array:
    """Whether each element of the inexact leaves is finite, on all devices of the mesh axes."""
    leaves = filter(checks.is_inexact, jax.tree.leaves(tree))
    return _all([(_is_finite, (x,)) for x in leaves], mesh_axes)


def stays_finite(new: PyTree, old: PyTree, mesh_axes: tuple[str, ...] = ()) -> jax.Array:
    """Whether nothing became non-finite: some states and masks hold an infinity from the start."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    calls = [(_stays_finite, (n, jnp.asarray(o))) for n, o in pairs if checks.is_inexact(n)]
    return _all(calls, mesh_axes)


def _all(calls: Sequence[Call], mesh_axes: tuple[str, ...]) -> jax.Array:
    """Whether all calls, of which each is 0 or NaN, are 0."""
    faults = leafwise.run(calls)
    stacks = [_stacked(faults[i : i + _TOGETHER]) for i in range(0, len(faults), _TOGETHER)]
    return agreed(_none_of(stacks) if stacks else jnp.asarray(True), mesh_axes)


@jit_static_kwargs
def computed_once(flag: jax.Array) -> jax.Array:
    """The same flag. XLA fuses no sort, so no kernel that reads the flag computes it again."""
    return jnp.sort(jnp.stack([flag, jnp.ones_like(flag)]))[0]


@jit_static_kwargs
def _stacked(faults: list[jax.Array]) -> jax.Array:
    return jnp.stack(faults)


@jit_static_kwargs
def _none_of(stacks: list[jax.Array]) -> jax.Array:
    # By a sort, which puts NaN last. XLA would fuse a chain of `and`s over all leaves into each
    # kernel that reads the result, for every leaf: compile time would be quadratic in the leaves.
    # A sort is not fused, and unlike a loop or a branch it does not make an accelerator wait.
    faults = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
    return jnp.sort(faults)[-1] == 0


@jit_static_kwargs
def _is_finite(x: jax.Array) -> jax.Array:
    """0, or NaN."""
    # x - x is 0, or NaN. For `jnp.all(jnp.isfinite(x))` XLA's CPU backend writes an array of bools,
    # its maximum of many numbers does not see a NaN among them, and for 0 x it writes an array of
    # zeros that all leaves of a shape then read.
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    if jnp.finfo(x.dtype).bits < 32:
        # Else XLA writes out the float32 form of x, which this sum and the update both read.
        parts = jax.lax.optimization_barrier(parts)
    return jnp.sum(jnp.stack([jnp.sum(x - x).astype(jnp.float32) for x in parts]))


@jit_static_kwargs
def _stays_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    """0, or NaN."""
    fine = jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
    return jnp.where(fine, 0.0, jnp.nan).astype(jnp.float32)
