"""The norm of each layer, right at every scale, for a whole model at once.

A norm is asked for as a function and the arrays that it reads, not as an array: given `u`, XLA
would write a temporary as large as the parameters. Norms come back in *batches*, vectors with an
entry per layer of up to 8 arrays, so that a trust ratio is one operation for many layers.
`LayerAxes` says where the layers are.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs
from jgrad._layers import sums
from jgrad._layers.layer_axes import LayerAxes
from jgrad._layers.sums import Measured, SquareRange
from jgrad._trees.shardings import varying_axes, varying_over

T = TypeVar("T")

# Arrays per batch. XLA's CPU backend compiles equal kernels once, but a scalar sliced from a vector
# is a kernel of its own for each position: one vector of 1000 norms is 1000 kernels of 5 to 10 ms
# each to compile, batches of 8 are 8. LARS on 24 and 200 leaves compiles in 0.9 and 6.2 s with 4,
# 0.9 and 4.5 with 8, 1.4 and 4.6 with 16. Of sharded arrays each batch takes collectives, too.
_BATCH = 8
_SHARDED_BATCH = 16

# Arrays per program of an eager call, in whole batches. One program of 5,000 compiles in a minute.
_EAGER = 32 * _BATCH


class ScaledNorm(NamedTuple):
    """Norms as products mantissa * scale: a norm may be larger than any number.

    Attributes:
      mantissa: root of a sum of squares, far from overflow and underflow.
      scale: a power of two.
    """

    mantissa: jax.Array
    scale: jax.Array

    def value(self) -> jax.Array:
        """The norms as numbers: the largest finite one where they overflow; infinity stays."""
        largest = jnp.full_like(self.mantissa, jnp.finfo(self.mantissa.dtype).max)
        bound = jnp.where(self.mantissa == jnp.inf, self.mantissa, largest)
        return jnp.minimum(self.mantissa * self.scale, bound)

    def combined(
        self, largest: Callable[..., jax.Array], total: Callable[..., jax.Array]
    ) -> "ScaledNorm":
        """The root of the sum of the squares of norms, by a maximum and a sum over them."""
        scales = jax.lax.stop_gradient(self.scale)
        scale = largest(scales)
        norms = self.mantissa * (scales / scale)
        # Mantissas are below the root of the largest number, so their reciprocals do not overflow.
        top = largest(jax.lax.stop_gradient(norms))
        top = jnp.where((top == 0) | (top == jnp.inf), jnp.ones_like(top), top)
        return ScaledNorm(top * numerics.safe_sqrt(total(jnp.square(norms / top))), scale)


def layer_norms(layers: Sequence[LayerAxes], *groups: Sequence[Call]) -> list[list[jax.Array]]:
    """|f(*arrays)| of each layer, a list of batches for each group, in float32 or wider.

    At most the largest number. The plain sum of squares overflows from 1e19 and vanishes below
    1e-23 in float32. A scaled sum for every layer would be expensive at each step, to run and to
    compile. So the plain sums come first. One `lax.cond` for the whole model repeats them, each
    layer scaled by a power of two of its own, in the rare step in which some sum is not a normal
    number. A sum of zero also takes this path: it may be an underflow. The derivative of a norm at
    zero is zero. Layers whose sums are normal keep them, so that no norm depends on other layers,
    not even by a rounding, and replicas of a layer on several devices stay equal bit for bit.

    Inside `shard_map` there is a `cond` for each set of mesh axes along which layers vary. Under
    `vmap` it becomes a choice, and what is chosen varies as the condition does. One for all would
    make replicas vary.

    Norms of sharded layers are combined over devices after the `cond`, so that no device waits for
    another inside a branch that the other does not take.

    Quickest to compile where arrays of one shape stand side by side.
    """
    spans = _spans(layers, groups)
    if len(spans) > 1:
        parts = [layer_norms(layers[span], *(group[span] for group in groups)) for span in spans]
        return [list(itertools.chain(*batches)) for batches in zip(*parts, strict=True)]
    arguments = {id(x): x for group in groups for _, xs in group for x in xs}
    position = {key: i for i, key in enumerate(arguments)}
    static = [
        in_batches(
            layers,
            [
                Measured(f, tuple(position[id(x)] for x in xs), axes)
                for (f, xs), axes in zip(group, layers, strict=True)
            ],
        )
        for group in groups
    ]
    batches = tuple(tuple(batch) for group in static for batch in group)
    norms = iter(_norms(list(arguments.values()), batches=batches) if batches else [])
    return [[next(norms).value() for _ in group] for group in static]


def global_norm(layers: Sequence[LayerAxes], calls: Sequence[Call]) -> ScaledNorm:
    """The norm of all arrays together, each of which is one layer.

    As `layer_norms`, but with one sum, and one scale where that is not a normal number, for
    all arrays of a precision: a sum in float64 says nothing of squares in float32.
    """
    groups: dict[Any, list[int]] = {}
    for i, (axes, (_, xs)) in enumerate(zip(layers, calls, strict=True)):
        groups.setdefault((*axes.devices, numerics.real_dtype(*xs)), []).append(i)
    norms = []
    for (_, mesh_axes, _), members in groups.items():
        for span in _spans([layers[i] for i in members], [calls]):
            arguments = [calls[i][1] for i in members[span]]
            kinds = tuple((calls[i][0], layers[i]) for i in members[span])
            norm = _norm_of_all(arguments, kinds=kinds)
            norms.append(_over_devices(norm, mesh_axes) if mesh_axes else norm)
    if not norms:
        return ScaledNorm(jnp.zeros(()), jnp.ones(()))
    if len(norms) == 1:
        return ScaledNorm(*(x.reshape(()) for x in norms[0]))
    return ScaledNorm(*map(sums.concatenate, zip(*norms, strict=True))).combined(jnp.max, jnp.sum)


def norm_of_norms(batches: Sequence[jax.Array]) -> jax.Array:
    """The norm of all arrays together, from those of all layers; at most the largest number."""
    if not batches:
        return jnp.zeros(())
    each = sums.concatenate(batches)
    return ScaledNorm(each, jnp.ones_like(each)).combined(jnp.max, jnp.sum).value()


def _spans(layers: Sequence[LayerAxes], groups: Sequence[Sequence[Call]]) -> list[slice]:
    """Which arrays share a program: those that vary alike; in an eager call so many at a time."""
    count = len(layers)
    arrays = (x for group in groups for _, xs in group for x in xs)
    if count > _EAGER and not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return [slice(i, i + _EAGER) for i in range(0, count, _EAGER)]
    starts = [0, *(i for i in range(1, count) if layers[i].varying != layers[i - 1].varying)]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], count], strict=True)]


def in_batches(layers: Sequence[LayerAxes], items: Sequence[T]) -> list[Sequence[T]]:
    """The items, one per array, in short runs that lie and vary over the same mesh axes.

    Stacked layers are a batch of their own. Under `jit` the axis of the stack may be sharded, and
    then sums are, too: joined with others, each would be moved to another device.
    """
    starts = [0]
    for i, axes in enumerate(layers):
        first = layers[starts[-1]]
        longest = _SHARDED_BATCH if axes.mesh_axes else _BATCH
        alone = _may_be_sharded(axes) or _may_be_sharded(first)
        full = i - starts[-1] == longest or (alone and i > starts[-1])
        if full or axes.devices != first.devices:
            starts.append(i)
    ends = [*starts[1:], len(items)]
    return [items[i:j] for i, j in zip(starts, ends, strict=True) if i < j]


def _may_be_sharded(axes: LayerAxes) -> bool:
    """Whether the sums of an array may be sharded; in `shard_map` none is."""
    return bool(axes.stacked) and not axes.mesh_axes


def join(layers: Sequence[LayerAxes], numbers: Sequence[ArrayLike]) -> list[jax.Array]:
    """One number per array as batches, or as scalars where all arrays share it."""
    if np.ndim(numbers[0]) == 0 and all(x is numbers[0] for x in numbers):
        return [jnp.asarray(numbers[0], dtype=float)] * len(in_batches(layers, numbers))
    entries = [axes.per_layer(x) for x, axes in zip(numbers, layers, strict=True)]
    return [jnp.concatenate(batch) for batch in in_batches(layers, entries)]


def split(
    layers: Sequence[LayerAxes], batches: Sequence[jax.Array], *, as_elements: bool = True
) -> list[jax.Array]:
    """The entries of the batches for each array: scalars, or shapes that broadcast to it.

    A kernel fused with a slice at a position of its own would be another to compile for each leaf.
    Without `as_elements` vectors, of shape (num_layers,).
    """
    return [
        axes.to_elements(numerics.once(x)) if as_elements else x
        for batch, among in zip(batches, in_batches(layers, layers), strict=True)
        for x, axes in zip(
            jax.lax.split(batch, [axes.num_layers for axes in among]), among, strict=True
        )
    ]


@jit_static_kwargs
def _norms(
    arguments: list[jax.Array], *, batches: tuple[tuple[Measured, ...], ...]
) -> list[ScaledNorm]:
    arguments = _alike(arguments)
    calls = [sums.call(arguments, measured) for batch in batches for measured in batch]
    results = iter(leafwise.run(calls))
    per_array = [[next(results) for _ in batch] for batch in batches]
    totals = [sums.concatenate(batch) for batch in per_array]
    ranges = [SquareRange.of(batch) for batch in per_array]

    unusual = _any_unusual(batches, totals, ranges)

    def rescaled() -> list[ScaledNorm]:
        norms = []
        for batch, total, limits in zip(batches, totals, ranges, strict=True):
            # XLA for GPUs computes both branches at each step, unless one has an operation that it
            # takes for expensive, such as a barrier.
            own = jax.lax.optimization_barrier(total)
            unit = limits.unit(own)
            norms.append(_mixed(own, sums.rescaled(arguments, batch, unit), unit))
        return norms

    norms = jax.lax.cond(unusual, rescaled, lambda: [_plain(total) for total in totals])
    mesh_axes = [batch[0].layers.mesh_axes for batch in batches]
    return [_over_devices(x, axes) if axes else x for x, axes in zip(norms, mesh_axes, strict=True)]


@jit_static_kwargs
def _norm_of_all(
    arguments: list[tuple[jax.Array, ...]], *, kinds: tuple[tuple[Function, LayerAxes], ...]
) -> ScaledNorm:
    """One norm, as vectors with one entry, of arrays of one precision."""
    arguments = _alike(arguments)

    def total(scale: jax.Array | None) -> jax.Array:
        calls = []
        for (f, layers), xs in zip(kinds, arguments, strict=True):
            scale_of_array = scale
            if scale is not None:
                # XLA would write a scale for each element, if it saw that arrays share one.
                scale_of_array, xs = jax.lax.optimization_barrier((scale, xs))
            calls.append(sums.of_call((f, xs), layers, scale_of_array))
        return jnp.sum(sums.concatenate(leafwise.run(calls)), keepdims=True)

    plain = total(None)
    limits = SquareRange.of([plain])

    def rescaled() -> ScaledNorm:
        unit = limits.unit(plain)
        return ScaledNorm(numerics.safe_sqrt(total(1 / unit)), unit)

    small = jnp.asarray(limits.small, plain.dtype)
    unusual = jnp.any((plain < small) | (plain == jnp.inf))
    return jax.lax.cond(unusual, rescaled, lambda: _plain(plain))


def _alike(arguments: T) -> T:
    """Arrays that all vary as a condition on some of them: under `vmap` it chooses among them."""
    alike: T = varying_over(arguments, varying_axes(*jax.tree.leaves(arguments)))
    return alike


def _any_unusual(
    batches: Sequence[Sequence[Measured]],
    totals: Sequence[jax.Array],
    ranges: Sequence[SquareRange],
) -> jax.Array:
    """Whether some sum is not a normal number."""
    groups: dict[int, list[int]] = {}  # one of all sums that are whole, and one of each other
    for i, batch in enumerate(batches):
        groups.setdefault(i if _may_be_sharded(batch[0].layers) else -1, []).append(i)
    flags = []
    for members in groups.values():
        total = sums.concatenate([totals[i] for i in members])
        small = np.concatenate([ranges[i].small for i in members]).astype(total.dtype)
        nonempty = _nonempty([measured for i in members for measured in batches[i]])
        flags.append(jnp.any(((total < small) & nonempty) | (total == jnp.inf)))
    return flags[0] if len(flags) == 1 else jnp.any(jnp.stack(flags))


def _nonempty(measured: Sequence[Measured]) -> ArrayLike:
    flags = [x.layers.nonempty for x in measured]
    if all(isinstance(x, np.ndarray) for x in flags):
        return np.concatenate(flags)
    return jnp.concatenate(flags)


@jit_static_kwargs
def _plain(total: jax.Array) -> ScaledNorm:
    return ScaledNorm(numerics.safe_sqrt(total), jnp.ones_like(total))


@jit_static_kwargs
def _mixed(total: jax.Array, rescaled: jax.Array, unit: jax.Array) -> ScaledNorm:
    """From plain sums for layers that need no unit, from rescaled sums for the others."""
    return ScaledNorm(numerics.safe_sqrt(jnp.where(unit == 1, total, rescaled)), unit)


def _over_devices(norms: ScaledNorm, mesh_axes: tuple[str, ...]) -> ScaledNorm:
    """Norms of whole layers, from the norms of their shards."""
    return norms.combined(
        lambda x: jax.lax.pmax(x, mesh_axes), lambda x: jax.lax.psum(x, mesh_axes)
    )
