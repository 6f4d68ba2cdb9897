"""Many arrays out of one, so that XLA compiles few pieces of work for them.

XLA's CPU backend compiles equal kernels once. But a cut at another place is another kernel, and so
is all that it is fused into: the same layer, twelve times, compiles twelve times where its weights
are cut from one buffer, and a thousand cuts take half a minute. So the pieces are cut where XLA
does not look across, and many pieces of one size in two turns: some of them at a time, and then
each of these in the same way.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics

_FEW = 8  # pieces of one size for which one turn is as good


@functools.partial(jax.jit, static_argnums=1)
def pieces(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The vector in pieces of these sizes, which add up to its own."""
    return _pieces(x, sizes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pieces(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    groups = _groups(sizes)
    found = _cut([x], [[size * count for size, count in groups]])
    if len(groups) < len(sizes):
        found = _cut(found, [[size] * count for size, count in groups])
    return found


@_pieces.defjvp
def _pieces_jvp(sizes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    """In one turn: what JAX makes of a branch takes it long to trace, and this is as linear."""
    return _pieces(*primals, sizes), jax.lax.split(tangents[0], sizes)


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """What to cut in the first turn: (size, count) of pieces that stay together."""
    starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    found = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        step = math.isqrt(end - start) if end - start > _FEW else 1
        found += [(sizes[start], min(step, end - i)) for i in range(start, end, step)]
    return found


def _cut(vectors: list[jax.Array], sizes: list[list[int]]) -> list[jax.Array]:
    """Each vector in pieces of its sizes."""

    def cut(vectors: list[jax.Array]) -> list[jax.Array]:
        each = zip(vectors, sizes, strict=True)
        return [piece for x, own in each for piece in jax.lax.split(x, own)]

    def nothing(vectors: list[jax.Array]) -> list[jax.Array]:
        # Zeros that depend on what is cut, as the pieces do: `shard_map` asks for that.
        zero = numerics.zeros_like(_first(vectors))
        zeros = {size: jnp.broadcast_to(zero, (size,)) for own in sizes for size in own}
        return [zeros[size] for own in sizes for size in own]

    def apart(vectors: list[jax.Array]) -> list[jax.Array]:
        # Always true, but XLA does not see it, nor from outside what is in a branch.
        number = _first(vectors).real.astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(number, jnp.uint32)
        return jax.lax.cond((bits | 1) > 0, cut, nothing, vectors)

    if not any(x.size for x in vectors) or sum(map(len, sizes)) == len(vectors):
        return cut(vectors)
    # Elsewhere a branch would wait for the device.
    return jax.lax.platform_dependent(vectors, cpu=apart, default=cut)


def _first(vectors: list[jax.Array]) -> jax.Array:
    """Some element."""
    return next(x for x in vectors if x.size)[0]
