"""One vector in many pieces, so that XLA compiles few kernels for them.

XLA's CPU backend compiles equal kernels once. But a slice at another offset is another kernel, and
so is everything that it is fused into: a layer that occurs twelve times compiles twelve times where
its weights are sliced from one buffer, and a thousand slices take half a minute. So the vector is
split inside a branch, which XLA does not fuse across. Many pieces of one size are split in two
turns: groups of them first, then each group in the same way.

In an eager call no program is worth compiling for thousands of pieces: there each piece is a small
program that all pieces of its size share.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics

# Pieces of one size up to which one turn compiles as quickly as two; a kernel takes 5 to 10 ms.
_FEW = 8


# Pieces from which an eager call takes them one by one, and joins them by so many at a time: 5,000
# pieces are split in a second, and in half a minute by one program.
_MANY = 256
_AT_A_TIME = 64


def split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The vector in pieces of these sizes, which add up to its own."""
    if _is_eager(x) and len(sizes) > _MANY > 2 * len(set(sizes)):
        starts = itertools.accumulate(sizes, initial=0)
        ranges = zip(sizes, starts, strict=False)
        return [_piece(x, np.int32(start), size=size) for size, start in ranges]
    return _in_one_program(x, sizes)


def join(pieces: Sequence[jax.Array]) -> jax.Array:
    """The vector of these pieces."""
    if len(pieces) > _MANY and all(map(_is_eager, pieces)):
        starts = range(0, len(pieces), _AT_A_TIME)
        pieces = [jax.lax.concatenate(pieces[i : i + _AT_A_TIME], 0) for i in starts]
    return jax.lax.concatenate(pieces, 0)


def _is_eager(x: jax.Array) -> bool:
    """An array on one device, or NumPy's, outside of any program."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or len(x.devices()) == 1


@functools.partial(jax.jit, static_argnames="size")
def _piece(x: jax.Array, start: jax.Array, *, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start,), (size,))


@functools.partial(jax.jit, static_argnums=1)
def _in_one_program(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    return _split(x, sizes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _split(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    groups = _groups(sizes)
    parts = _split_each([x], [[size * count for size, count in groups]])
    if len(groups) < len(sizes):
        parts = _split_each(parts, [[size] * count for size, count in groups])
    return parts


@_split.defjvp
def _split_jvp(sizes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    """By one plain split: JAX takes long to trace the derivative of a branch."""
    return _split(*primals, sizes), jax.lax.split(tangents[0], sizes)


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """What to split off in the first turn: (size, count) of pieces that stay together."""
    starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    groups = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        step = math.isqrt(end - start) if end - start > _FEW else 1
        groups += [(sizes[start], min(step, end - i)) for i in range(start, end, step)]
    return groups


def _split_each(vectors: list[jax.Array], sizes: list[list[int]]) -> list[jax.Array]:
    """Each vector in pieces of its sizes."""

    def plain(vectors: list[jax.Array]) -> list[jax.Array]:
        return [y for x, of_x in zip(vectors, sizes, strict=True) for y in jax.lax.split(x, of_x)]

    def nothing(vectors: list[jax.Array]) -> list[jax.Array]:
        # Zeros computed from the vectors, as the pieces are: `shard_map` requires that.
        zero = numerics.zeros_like(_first(vectors))
        pieces = list(itertools.chain(*sizes))
        zeros = {size: jnp.broadcast_to(zero, (size,)) for size in pieces}
        return [zeros[size] for size in pieces]

    def in_branch(vectors: list[jax.Array]) -> list[jax.Array]:
        # The condition is always true, but XLA does not see that.
        number = _first(vectors).real.astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(number, jnp.uint32)
        return jax.lax.cond((bits | 1) > 0, plain, nothing, vectors)

    if not any(x.size for x in vectors) or sum(map(len, sizes)) == len(vectors):
        return plain(vectors)
    # On other devices the host would wait for the condition.
    return jax.lax.platform_dependent(vectors, cpu=in_branch, default=plain)


def _first(vectors: list[jax.Array]) -> jax.Array:
    """Some element."""
    return next(x for x in vectors if x.size)[0]
