"""Bases of eigenvectors: their start, and the power steps that turn many of a size together.

    begin:  Q = eigenvectors of L, those of the largest eigenvalues first
    turn:   Q' R = L Q, columns in the order of diag(Q^H L Q)

The order only matters for the decomposition, which makes each column orthogonal to those before it.
It is undone afterwards, so that column i of Q' is what became of column i of Q, and anything stored
in that basis, such as Adam's second moment, stays where it is. Other implementations permute the
second moment; forgetting this would mix the moments of different directions.
"""

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import Function, jit_static_kwargs
from jgrad._muon import orthogonalize
from jgrad._muon.all_to_all import Dealing
from jgrad._trees.shardings import (
    replicated,
    sharded_as,
    varying_axes,
    varying_over,
    whole_matrices,
)

KEEP, BEGIN, TURN = 0, 1, 2  # what an update does with all bases

# For all products here. By default, float32 factors are rounded to bfloat16 on a TPU, and to ten
# bits on a GPU, so a basis would be off, and rotate, by a thousandth of a turn.
_PRECISION = jax.lax.Precision.HIGHEST

# An eigenvalue is noise below this many times sqrt(size) rounding errors of the largest one. For
# random matrices of a sixteenth of full rank, with sides of 64 to 2048, the noise was at most 0.2.
_NOISE = 1

# What is left of a column after orthogonalization against earlier ones is noise below this power of
# eps, times the largest estimate. Nearly dependent columns amplify rounding errors: by up to 300 in
# float64, for random matrices of a quarter to three quarters of full rank, with sides of 4 to 256.
_DEPENDENT = 0.75


class Side(NamedTuple):
    """One side of the matrices of an array.

    Attributes:
      average: of G G^H, or of G^H G: one or a stack of them.
      basis: in which the rows of G are seen, or its columns.
    """

    average: jax.Array
    basis: jax.Array


# X Y, or with X^H, or Y^H.
product = functools.partial(numerics.product, precision=_PRECISION)


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
        groups[side.basis.shape[-1], side.basis.dtype, varying_axes(*side)].append(i)
    dealing = None
    if shard_over and sides:
        dealing = orthogonalize.mesh_with(function, [side.basis for side in sides], shard_over)
    new: dict[int, jax.Array] = {}
    for members in groups.values():
        alike = _refreshed_alike([constants[i] for i in members], what, dealing=dealing)
        new |= zip(members, alike, strict=True)
    return [new[i] for i in range(len(sides))]


@jit_static_kwargs  # else each eager call compiles the conditional, whose functions are new
def _refreshed_alike(
    sides: list[Side], what: jax.Array, *, dealing: Dealing | None
) -> list[jax.Array]:
    varying = varying_axes(*itertools.chain(*sides))
    averages, bases = (varying_over(list(x), varying) for x in zip(*sides, strict=True))
    keep = lambda averages, bases: bases  # noqa: E731
    steps = (functools.partial(_apart, step, dealing) for step in (_begun, _turned))
    new: list[jax.Array] = jax.lax.switch(what, [keep, *steps], averages, bases)
    return new


def _apart(
    step: Function, dealing: Dealing | None, averages: list[jax.Array], bases: list[jax.Array]
) -> list[jax.Array]:
    """A step of all matrices as one stack, whose arrays are there inside of a branch alone.

    Each average is beside its basis, so that both are dealt out as one; where the rows of both are
    sharded, nothing is moved for that. What is not dealt out is whole on each device: the
    partitioner would divide the columns of each decomposition, with collectives in its loops.
    """
    pairs = [
        jax.lax.concatenate([_stack(average), _stack(basis)], 2)
        for average, basis in zip(averages, bases, strict=True)
    ]
    x = jax.lax.concatenate(pairs, 0)
    if dealing is None:
        new = whole_matrices(step(whole_matrices(x)))
    else:
        new = orthogonalize.dealt_out(step, x, dealing)
    parts = jax.lax.split(new, [len(x) for x in pairs])
    columns = zip(parts, bases, strict=True)
    return [sharded_as(part.reshape(old.shape), old) for part, old in columns]


def _stack(x: jax.Array) -> jax.Array:
    return replicated(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


# ---- on a stack of pairs, (count, size, 2 size) ------------------------------------------------


def _begun(pairs: jax.Array) -> jax.Array:
    """Eigenvectors of the averages; the basis as it is where the average is zero."""
    size = pairs.shape[1]
    average, is_dead = _normalized(pairs[:, :, :size])
    vectors, values = _one_by_one(lambda x: jnp.linalg.eigh(x)[::-1], average)
    vectors = jax.lax.rev(vectors, (2,))
    values = _without_noise(jax.lax.rev(values, (1,)))[:, None]
    # The element of the largest magnitude in each vector is positive, on every platform.
    largest = jnp.argmax(numerics.abs_squared(vectors), axis=1, keepdims=True)
    vectors = vectors * _phase(jnp.take_along_axis(vectors, largest, axis=1)).conj()
    # Vectors of a null space are noise, so they are completed from the others.
    indices = jnp.arange(size)[None, None]
    is_noise = (values == 0) | (indices >= jnp.sum(~is_dead, axis=1, keepdims=True))
    units = _units(is_dead, is_noise)
    basis, _ = _orthogonal(_with_units(jnp.where(is_noise, 0, vectors), units))
    is_zero = jnp.all(is_dead, axis=1, keepdims=True)
    return jnp.where(is_zero, pairs[:, :, size:], _with_units(basis, units))


def _turned(pairs: jax.Array) -> jax.Array:
    """The bases after a power step; as they are where the average is zero.

    Where an average has a low rank, some columns are zero, or follow from those before them. All
    that is left of such a column is rounding, and it would enter the columns behind it, too. So a
    second decomposition begins with the others, and makes the old columns orthogonal to them.
    """
    size = pairs.shape[1]
    average, is_dead = _normalized(pairs[:, :, :size])
    basis = pairs[:, :, size:]
    units = is_dead & (numerics.abs_squared(basis) > 0.5)  # one in a row, and one in a column
    powered = product(average, basis)
    estimates = jnp.sum((basis.conj() * powered).real, axis=1)[:, None]
    powered = _with_units(powered, units)
    new, left = _in_order(powered, estimates)
    bound = float(jnp.finfo(left.dtype).eps) ** _DEPENDENT
    is_noise = left <= bound * jnp.max(estimates, axis=2, keepdims=True)

    def again() -> jax.Array:
        others = is_dead & ~jnp.any(units, axis=2, keepdims=True)
        all_units = units | _units(others, is_noise)
        kept = _with_units(jnp.where(is_noise, basis, powered), all_units)
        ordered = jnp.where(is_noise, jnp.zeros_like(estimates), estimates)
        return _with_units(_in_order(kept, ordered)[0], all_units)

    new = jax.lax.cond(jnp.any(is_noise), again, lambda: _with_units(new, units))
    is_zero = jnp.all(is_dead, axis=1, keepdims=True)
    return jnp.where(is_zero, basis, new)


def _units(is_dead: jax.Array, is_noise: jax.Array) -> jax.Array:
    """Where the unit vectors of dead rows stand: the first in the first column of noise, ..."""
    rows, columns = (jnp.cumsum(x, axis=1 + i) for i, x in enumerate((is_dead, is_noise)))
    return is_dead & is_noise & (rows == columns)


def _with_units(x: jax.Array, units: jax.Array) -> jax.Array:
    """Columns with unit vectors among them, and no part of any other in the rows of these.

    So an input or an output that has no gradient is a direction by itself, to the last bit, and
    weights there do not move.
    """
    is_taken = jnp.any(units, axis=1, keepdims=True) | jnp.any(units, axis=2, keepdims=True)
    return jnp.where(is_taken, units.astype(x.dtype), x)


def _in_order(x: jax.Array, estimates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `_orthogonal`, from the largest estimates on; each column stays in its place."""
    order, back = (y[:, None] for y in _order(estimates[:, 0]))
    results = _orthogonal(jnp.take_along_axis(x, order, axis=2))
    new, left = (jnp.take_along_axis(y, back, axis=2) for y in results)
    return new, left


def _order(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places of the largest, the second ..., equal ones as they come; and the rank of each.

    By comparisons of all pairs, since a program that sorts takes long to compile.
    """
    indices = jnp.arange(values.shape[-1])
    a, b = values[:, :, None], values[:, None, :]
    is_before = (a > b) | ((a == b) & (indices[:, None] < indices[None, :])[None])
    ranks = jnp.sum(is_before, axis=1)
    order = jnp.argmax(ranks[:, None, :] == indices[None, :, None], axis=2)
    return order, ranks


def _without_noise(values: jax.Array) -> jax.Array:
    """Eigenvalues with 0 for those that are rounding errors of the largest.

    So a direction in which nothing was seen stays, or follows from the others. What is made of
    noise would be another basis in each program, and whatever then comes along such a direction
    would take another step.
    """
    size = values.shape[-1]
    bound = _NOISE * float(np.sqrt(size)) * float(jnp.finfo(values.dtype).eps)
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.where(values < bound * largest, jnp.zeros_like(values), values)


def _orthogonal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Q of X = Q R with a positive diagonal of R: then it is the only one, on every platform.

    And that diagonal: what is left of each column behind those before it.
    """

    def decompose(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, r = jnp.linalg.qr(x)
        diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)[..., None, :]
        return q * _phase(diagonal), jnp.abs(diagonal)

    return _one_by_one(decompose, x)


def _one_by_one(decompose: Function, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is made of each matrix of a stack; on a CPU of one after the other, in place.

    There JAX divides a stack among XLA's threads, and waits for them on one of these. If all of
    them wait, such as one for each virtual device, none is left to work. Checked in JAX 0.10 to
    0.12; a loop is as fast on two cores.
    """

    def body(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        new, more = decompose(jax.lax.dynamic_index_in_dim(x, i, keepdims=False))
        return jax.lax.dynamic_update_index_in_dim(x, new, i, 0), more

    def in_turn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(body, x, jnp.arange(len(x)))

    new: tuple[jax.Array, jax.Array]
    new = jax.lax.platform_dependent(x, cpu=in_turn, default=decompose)
    return new


def _normalized(average: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each average by its largest element, and which rows are dead: zero, or rounding beside that.

    These rows and columns are zero in the result.
    """
    scale = numerics.normal_scale(numerics.magnitude(average), (1, 2))
    average = numerics.scaled(average, 1 / scale)
    largest = jnp.max(numerics.magnitude(average), axis=2, keepdims=True)
    is_dead = largest <= float(jnp.finfo(largest.dtype).eps)
    return jnp.where(is_dead | jnp.swapaxes(is_dead, 1, 2), 0, average), is_dead


def _phase(x: jax.Array) -> jax.Array:
    """x / |x|, and 1 where x is 0"""
    sign = numerics.sign(x)
    return jnp.where(sign == 0, jnp.ones_like(sign), sign)
