"""Bases of eigenvectors: how they begin, and how a power step turns them, many of a size together.

    begin:  Q = eigenvectors of L, those of the largest eigenvalues first
    turn:   Q' R = L Q, columns in the order of diag(Q^H L Q)

The order matters to the decomposition alone, in which each column is made orthogonal to those
before it. So it is undone afterwards: column i of Q' is what became of column i of Q, and whatever
is counted in that basis, as Adam's second moment is, stays where it is. Other implementations
permute it; one that forgets to mixes the moments of different directions.
"""

import collections
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._muon import orthogonalize
from jgrad._trees.shardings import (
    automatic_mesh,
    is_sharded,
    replicated,
    sharded_as,
    varying_axes,
    varying_over,
)

KEEP, BEGIN, TURN = 0, 1, 2  # what an update does with all bases

# Of all products here. By default, factors of float32 are rounded to bfloat16 on a TPU, and to ten
# bits on a GPU: a basis would be off by a thousandth of a turn, and rotate by that.
_PRECISION = jax.lax.Precision.HIGHEST


class Side(NamedTuple):
    """One side of the matrices of an array.

    Attributes:
      average: of G G^H, or of G^H G: one or a stack of them.
      basis: in which the rows of G are seen, or its columns.
    """

    average: jax.Array
    basis: jax.Array


def product(
    x: jax.Array, y: jax.Array, *, adjoint_x: bool = False, adjoint_y: bool = False
) -> jax.Array:
    """X Y of matrices or stacks, or with X^H, or Y^H."""
    ndim = x.ndim
    over = ((ndim - 2 if adjoint_x else ndim - 1,), (ndim - 1 if adjoint_y else ndim - 2,))
    stacked = tuple(range(ndim - 2))
    x = x.conj() if adjoint_x and jnp.iscomplexobj(x) else x
    y = y.conj() if adjoint_y and jnp.iscomplexobj(y) else y
    return jax.lax.dot_general(x, y, (over, (stacked, stacked)), precision=_PRECISION)


def refreshed(
    function: str, sides: Sequence[Side], what: jax.Array, shard_over: tuple[str, ...]
) -> list[jax.Array]:
    """The new bases; those of one size by one decomposition, under one conditional.

    Slopes stop here: eigenvectors of equal eigenvalues have none.

    Args:
      function: whose errors they are.
      sides: of all matrices, each with its new average.
      what: KEEP, BEGIN or TURN.
      shard_over: mesh axes over which the bases of a size are dealt out, under `jit`.
    """
    groups: dict[object, list[int]] = collections.defaultdict(list)
    constants = [Side(*map(jax.lax.stop_gradient, side)) for side in sides]
    for i, side in enumerate(constants):
        kind = side.basis.shape[-1], side.basis.dtype, varying_axes(*side), is_sharded(side.basis)
        groups[kind].append(i)
    sharing = None
    if shard_over and sides:
        sharing = orthogonalize.sharing_of(function, [side.basis for side in sides], shard_over)
    new: list[jax.Array] = [side.basis for side in sides]
    for members in groups.values():
        of_size = [constants[i] for i in members]
        for i, basis in zip(members, _of_one_size(of_size, what, sharing), strict=True):
            new[i] = basis
    return new


def _of_one_size(
    sides: Sequence[Side], what: jax.Array, sharing: orthogonalize.Sharing | None
) -> list[jax.Array]:
    varying = varying_axes(*(x for side in sides for x in side))
    bases = [varying_over(side.basis, varying) for side in sides]
    averages = [varying_over(side.average, varying) for side in sides]

    def branch(begins: bool, averages: list[jax.Array], bases: list[jax.Array]) -> list[jax.Array]:
        size = bases[0].shape[-1]
        stacks = [_flat(replicated(x)) for x in (*averages, *bases)]
        counts = [len(x) for x in stacks[: len(bases)]]
        # Each average above its basis, so that both are dealt out as one.
        pairs = [jnp.concatenate(pair, 1) for pair in zip(stacks[: len(bases)], stacks[len(bases) :], strict=True)]
        x = pairs[0] if len(pairs) == 1 else jax.lax.concatenate(pairs, 0)
        step = functools.partial(_begun if begins else _turned, size=size)
        new = step(x) if sharing is None else orthogonalize.shared(step, x, sharing)
        parts = jax.lax.split(new, counts) if len(counts) > 1 else [new]
        return [
            sharded_as(part.reshape(old.shape), old)
            for part, old in zip(parts, bases, strict=True)
        ]

    branches = [
        lambda averages, bases: bases,
        functools.partial(branch, True),
        functools.partial(branch, False),
    ]
    return jax.lax.switch(what, branches, averages, bases)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


# ---- on a stack of pairs, (count, 2 size, size) ------------------------------------------------


def _begun(pairs: jax.Array, *, size: int) -> jax.Array:
    """Eigenvectors of the averages; the basis as it is where the average is zero."""
    average, is_zero = _normalized(pairs[:, :size])
    vectors = jax.lax.rev(jnp.linalg.eigh(average).eigenvectors, (2,))
    # Of each vector the element of the largest magnitude is positive, on every platform.
    largest = jnp.argmax(numerics.abs_squared(vectors), axis=1, keepdims=True)
    phase = _phase(jnp.take_along_axis(vectors, largest, axis=1))
    return jnp.where(is_zero, pairs[:, size:], vectors * phase.conj())


def _turned(pairs: jax.Array, *, size: int) -> jax.Array:
    """The bases after a power step; as they are where the average is zero."""
    average, is_zero = _normalized(pairs[:, :size])
    basis = pairs[:, size:]
    powered = product(average, basis)
    estimates = jnp.sum((basis.conj() * powered).real, axis=1)
    order = jnp.argsort(-estimates, axis=1)[:, None]
    q, r = jnp.linalg.qr(jnp.take_along_axis(powered, order, axis=2))
    # With a positive diagonal R is the only one, and no column turns to its opposite.
    diagonal = jnp.diagonal(r, axis1=1, axis2=2)[:, None]
    q = q * _phase(diagonal)
    back = jnp.argsort(order, axis=2)
    return jnp.where(is_zero, basis, jnp.take_along_axis(q, back, axis=2))


def _normalized(average: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each average by its largest element, and whether that is zero."""
    largest = jnp.max(jnp.maximum(abs(average.real), abs(average.imag)), axis=(1, 2), keepdims=True)
    is_zero = largest == 0
    tiny = jnp.finfo(largest.dtype).tiny
    scale = jnp.where(is_zero, jnp.ones_like(largest), jnp.clip(largest, tiny, 1 / tiny))
    return numerics.scaled(average, 1 / scale), is_zero


def _phase(x: jax.Array) -> jax.Array:
    """x / |x|, and 1 where x is 0"""
    if not jnp.iscomplexobj(x):
        return jnp.where(x < 0, -jnp.ones_like(x), jnp.ones_like(x))
    size = jnp.sqrt(numerics.abs_squared(x))
    one = jnp.ones_like(x)
    return jnp.where(size == 0, one, x / jnp.where(size == 0, jnp.ones_like(size), size).astype(x.dtype))
