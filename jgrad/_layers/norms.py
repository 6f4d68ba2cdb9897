"""The norm of each layer, right at every scale, for a whole model at once.

A norm is asked for as a function and the arrays that it reads, not as an array: given `u`, XLA
would write a temporary as large as the parameters. Norms come back as *columns*, vectors with an
entry per layer, so that a trust ratio is one operation for many layers. Where layers live is said
by `places.Place`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Task, compiled
from jgrad._layers import sums
from jgrad._layers.layer_axes import Place
from jgrad._layers.sums import Leaf

T = TypeVar("T")

# Leaves per column. XLA's CPU backend compiles equal kernels once, but a scalar cut from a vector
# makes a kernel of its own for each position: 1000 of them, 18 ms each, for one vector of 1000.
_COLUMN = 16


class Parts(NamedTuple):
    """Norms, as products of two factors: a norm may be larger than any number.

    Attributes:
      root: a root of a sum of squares, far from overflow and underflow.
      unit: a power of two.
    """

    root: jax.Array
    unit: jax.Array

    def value(self) -> jax.Array:
        """The norms as numbers: the largest one where they overflow, but infinity stays."""
        largest = jnp.full_like(self.root, jnp.finfo(self.root.dtype).max)
        return jnp.minimum(
            self.root * self.unit, jnp.where(self.root == jnp.inf, self.root, largest)
        )

    def together(
        self, largest: Callable[..., jax.Array], total: Callable[..., jax.Array]
    ) -> "Parts":
        """The root of the sum of the squares of norms, by a maximum and a sum over them."""
        own = jax.lax.stop_gradient(self.unit)
        unit = largest(own)
        norms = self.root * (own / unit)
        # Roots are below the root of the largest number: their own reciprocals are ordinary.
        top = largest(jax.lax.stop_gradient(norms))
        top = jnp.where((top == 0) | (top == jnp.inf), jnp.ones_like(top), top)
        return Parts(top * numerics.safe_sqrt(total(jnp.square(norms / top))), unit)


def layer_parts(places: Sequence[Place], *groups: Sequence[Task]) -> list[list[Parts]]:
    """|f(*arrays)| of each layer of each group, as columns, in float32 or wider.

    The plain sum of squares overflows from 1e19 and vanishes below 1e-23 in float32. A scaled sum
    for every layer would be dear at each step, to run and to compile. So the plain sums come first,
    and one `lax.cond` for the whole model repeats them, each layer scaled by a power of two of its
    own, in the rare step in which some sum is not a normal number. Zero counts as such: a sum does
    not tell a layer of zeros from one too small. The derivative of a norm at zero is zero. Layers
    whose sums are normal keep them, so that no norm depends, by a rounding, on other layers, and
    copies of a layer on several devices stay equal bit for bit.

    Parts of layers that are cut over mesh axes are put together afterwards, so that no device waits
    for another inside a branch that it does not take.

    Quickest to compile where leaves of one shape stand side by side.
    """
    arguments = {id(x): x for group in groups for _, xs in group for x in xs}
    position = {key: i for i, key in enumerate(arguments)}
    static = [
        in_columns(
            places,
            [
                Leaf(f, tuple(position[id(x)] for x in xs), place)
                for (f, xs), place in zip(group, places, strict=True)
            ],
        )
        for group in groups
    ]
    columns = tuple(tuple(column) for group in static for column in group)
    parts = iter(_norms(list(arguments.values()), columns=columns) if columns else [])
    return [[next(parts) for _ in group] for group in static]


def layer_norms(places: Sequence[Place], *groups: Sequence[Task]) -> list[list[jax.Array]]:
    """|f(*arrays)| of each layer of each group, as columns; at most the largest number."""
    return [[x.value() for x in columns] for columns in layer_parts(places, *groups)]


def global_norm(places: Sequence[Place], tasks: Sequence[Task]) -> Parts:
    """The norm of everything."""
    (columns,) = layer_parts(places, tasks)
    if not columns:
        return Parts(jnp.zeros(()), jnp.ones(()))
    whole = Parts(*(sums.concatenate(part) for part in zip(*columns, strict=True)))
    return whole.together(jnp.max, jnp.sum)


def in_columns(places: Sequence[Place], items: Sequence[T]) -> list[Sequence[T]]:
    """The items, one per leaf, cut as columns are: up to 16, all cut over the same mesh axes."""
    starts = [0]
    for i, place in enumerate(places):
        if i - starts[-1] == _COLUMN or place.cut != places[starts[-1]].cut:
            starts.append(i)
    ends = [*starts[1:], len(items)]
    return [items[i:j] for i, j in zip(starts, ends, strict=True) if i < j]


def join(places: Sequence[Place], numbers: Sequence[ArrayLike]) -> list[jax.Array]:
    """One number per leaf as columns, or as scalars where all leaves share it."""
    if np.ndim(numbers[0]) == 0 and all(x is numbers[0] for x in numbers):
        return [jnp.asarray(numbers[0], dtype=float)] * len(in_columns(places, numbers))
    entries = [place.collect(x) for x, place in zip(numbers, places, strict=True)]
    return [jnp.concatenate(column) for column in in_columns(places, entries)]


def split(places: Sequence[Place], columns: Sequence[jax.Array]) -> list[jax.Array]:
    """The entries of the columns for each leaf: scalars, or arrays that broadcast to the leaf."""
    return [
        place.spread(x)
        for column, of in zip(columns, in_columns(places, places), strict=True)
        for x, place in zip(jax.lax.split(column, [place.layers for place in of]), of, strict=True)
    ]


@compiled
def _norms(arguments: list[jax.Array], *, columns: tuple[tuple[Leaf, ...], ...]) -> list[Parts]:
    each = iter(leafwise.run([sums.task(arguments, of) for column in columns for of in column]))
    plain = [[next(each) for _ in column] for column in columns]
    totals = [sums.concatenate(column) for column in plain]
    limits = [sums.Limits.of(column) for column in plain]

    every = sums.concatenate(totals)
    small = np.concatenate([limit.small for limit in limits]).astype(every.dtype)
    unusual = ((every < small) & _has_elements(columns)) | (every == jnp.inf)

    def rescaled() -> list[Parts]:
        found = []
        for column, total, limit in zip(columns, totals, limits, strict=True):
            scale = limit.scale(total)
            found.append(_mixed(total, sums.rescaled(arguments, column, scale), scale))
        return found

    norms = jax.lax.cond(jnp.any(unusual), rescaled, lambda: [_plain(total) for total in totals])
    cuts = [column[0].place.cut for column in columns]
    return [_across(x, cut) if cut else x for x, cut in zip(norms, cuts, strict=True)]


def _has_elements(columns: Sequence[Sequence[Leaf]]) -> ArrayLike:
    filled = [leaf.place.filled for column in columns for leaf in column]
    if all(isinstance(x, np.ndarray) for x in filled):
        return np.concatenate(filled)
    return jnp.concatenate(filled)


@compiled
def _plain(total: jax.Array) -> Parts:
    return Parts(numerics.safe_sqrt(total), jnp.ones_like(total))


@compiled
def _mixed(total: jax.Array, rescaled: jax.Array, scale: jax.Array) -> Parts:
    """From plain sums for layers that are in need of no scale, from the others elsewhere."""
    return Parts(numerics.safe_sqrt(jnp.where(scale == 1, total, rescaled)), 1 / scale)


def _across(norms: Parts, cut: tuple[str, ...]) -> Parts:
    """Norms of layers from the norms of their parts on each device."""
    return norms.together(lambda x: jax.lax.pmax(x, cut), lambda x: jax.lax.psum(x, cut))
