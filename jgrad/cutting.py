"""Many arrays out of one, so that XLA compiles few pieces of work for them.

XLA's CPU backend compiles equal kernels once, but each cut at another place is another kernel, a
thousand of which take half a minute. So pieces of one size are cut out in two turns: some dozens at
a time, and those in the same way from each.
"""

from collections.abc import Sequence

import jax

_TOGETHER = 32  # pieces cut in the second turn
_FEW = 64  # pieces of one size for which one turn is as good


def pieces(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """The vector in pieces of these sizes, which add up to its own."""
    bounds = _alike(sizes)
    groups = jax.lax.split(x, [sum(sizes[i:j]) for i, j in bounds]) if len(bounds) > 1 else [x]
    found: list[jax.Array] = []
    for group, (i, j) in zip(groups, bounds, strict=True):
        found += _of_one_size(group, sizes[i], j - i)
    return found


def _alike(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where neighbours of one size begin and end."""
    starts = [i for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))


def _of_one_size(x: jax.Array, size: int, count: int) -> Sequence[jax.Array]:
    if count <= _FEW or size == 0:
        return jax.lax.split(x, [size] * count) if count > 1 else [x]
    # Elsewhere a cut is no kernel of its own, or a branch would wait for the device.
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _in_two_turns(x, size, count),
        default=lambda x: jax.lax.split(x, [size] * count),
    )


def _in_two_turns(x: jax.Array, size: int, count: int) -> Sequence[jax.Array]:
    counts = [min(_TOGETHER, count - i) for i in range(0, count, _TOGETHER)]

    def first(x: jax.Array) -> Sequence[jax.Array]:
        return jax.lax.split(x, [size * n for n in counts])

    # Two branches that do the same: XLA does not look across them, and would otherwise make of both
    # turns the one that they replace.
    groups = jax.lax.cond(jax.lax.stop_gradient(x[0]) < 0, first, first, x)
    pairs = zip(groups, counts, strict=True)
    return [piece for group, n in pairs for piece in jax.lax.split(group, [size] * n)]
