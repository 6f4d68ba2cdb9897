"""The norm of each layer, accurate at every scale, for a whole model at once; and sums of squares.

Both take a function and the arrays that it reads instead of an array, because XLA would write an
array such as `u` to a temporary as large as the parameters. Norms are returned in *batches*,
vectors with an entry per layer of up to 8 arrays, so that a trust ratio is one operation for many
layers. `LayerAxes` says where the layers are.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, Function, jit_static_kwargs
from jgrad._layers.layer_axes import LayerAxes
from jgrad._trees.shardings import may_be_sharded, replicated, varying_axes, varying_over
from jgrad._trees.told import Combine

# Arrays of up to this many elements are rescaled together, on a stacked copy; see `rescaled`.
# On larger ones the copy costs more memory than the smaller program is worth.
_SMALL = 2**14


class SquareRange(NamedTuple):
    """The range in which sums of squares are exact enough, with an entry per layer.

    All are powers of two, so that scaling rounds nothing.

    Attributes:
      small: sums below this may have lost squares to underflow; 2^-64 in float32.
      tiny: sums below this are scaled once more; 2^-100 in float32.
      large_unit: unit for sums that overflowed, 2^84 in float32: then 2^40 elements as large as the
        largest float32 have a finite sum of squares.
      small_unit: unit for small sums, 2^-50 in float32.
      tiny_unit: unit for tiny sums, 2^-80 in float32: then the square of the smallest normal
        float32 is far from 0. For larger norms the derivative, which is divided by the square of
        this unit, would overflow.
    """

    small: np.ndarray
    tiny: np.ndarray
    large_unit: np.ndarray
    small_unit: np.ndarray
    tiny_unit: np.ndarray

    @classmethod
    def of(cls, sums: Sequence[jax.Array]) -> "SquareRange":
        exponents = np.array([jnp.finfo(x.dtype).maxexp for x in sums for _ in range(x.size)])
        half, part = exponents // 2, exponents // 64
        powers = (-half, -50 * part, half + 20, -25 * part, -40 * part)
        real = numerics.real_dtype(*sums)
        return cls(*(np.exp2(power).astype(real) for power in powers))

    @jit_static_kwargs
    def unit(self, total: jax.Array) -> jax.Array:
        """The unit in which each layer is measured, from its plain sum: 1 where this is normal."""
        total = jax.lax.stop_gradient(total)
        unit = jnp.where(total < self.small, self.small_unit, jnp.ones_like(total))
        unit = jnp.where(total < self.tiny, self.tiny_unit, unit)
        return jnp.where(total == jnp.inf, self.large_unit, unit)


def rescaled(calls: Sequence[Call], layers: Sequence[LayerAxes], unit: jax.Array) -> jax.Array:
    """The sums of squares of one batch again, in a unit for each layer.

    This is compiled into every program and hardly ever runs, so it must be small above all. A
    division is what XLA's CPU backend computes once for all kernels that read it. Small arrays that
    are alike are stacked, and one operation computes them: array by array, a CPU's program of LAMB
    on 300 leaves takes a third longer to build. Arrays that may be sharded are taken one by one,
    since their parts would be moved between devices.
    """
    scale = 1 / unit
    f, arrays = calls[0]
    kinds = {(f, axes, *map(jax.typeof, xs)) for (f, xs), axes in zip(calls, layers, strict=True)}
    if len(kinds) > 1 or any(x.size > _SMALL or may_be_sharded(x) for x in arrays):
        scales = jax.lax.split(scale, [axes.num_layers for axes in layers])
        rows = zip(calls, layers, scales, strict=True)
        again = [(_squares_of_array(f, axes, True), (by, *xs)) for (f, xs), axes, by in rows]
        return concatenate(leafwise.run(again))
    columns = list(zip(*(xs for _, xs in calls), strict=True))  # for each argument of f
    shared = tuple(all(x is column[0] for x in column) for column in columns)
    arguments = [x[0] if same else x for x, same in zip(columns, shared, strict=True)]
    return _squares_of_stack(f, shared, layers[0])(scale.reshape(len(calls), -1), *arguments)


@functools.cache
def _squares_of_stack(f: Function, shared: tuple[bool, ...], layers: LayerAxes) -> Function:
    """`_squares_of_array` of arrays that are alike: each argument is a tuple, or shared by all."""

    @jit_static_kwargs
    def stack_squares(scale: jax.Array, *columns: Any) -> jax.Array:
        together = [x if same else _stack(x) for x, same in zip(columns, shared, strict=True)]
        axes = [None if same else 0 for same in shared]
        one = _squares_of_array(f, layers, True)
        sums = jax.vmap(one, in_axes=(0, *axes))(scale, *together)
        return sums.reshape(-1).astype(scale.dtype)

    return stack_squares


@functools.cache  # one function object for each call, so that JAX's caches find it again
def _squares_of_array(f: Function, layers: LayerAxes, is_opaque: bool) -> Function:
    """The function (scale, *arrays) -> sums of |scale f(*arrays)|^2, of shape (num_layers,)."""

    def squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        x = f(*arrays)
        x = numerics.widen(x, numerics.real_dtype(x))
        return numerics.abs_squared(x if scale is None else numerics.scaled(x, scale))

    @jax.jit
    def array_squares(scale: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        by = None if scale is None else layers.to_elements(scale)
        return layers.sum(squares, (by, *(opaque(arrays) if is_opaque else arrays)))

    return array_squares


def opaque(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays, in which XLA sees no constants.

    It computes (s c)^2 as s^2 c^2 for a constant c, such as weights that a jitted function closes
    over. A scale is there because one of these squares is infinite or zero.
    """
    # One by one: together, all would vary over the mesh axes over which one does.
    return list(map(jax.lax.optimization_barrier, arrays))


def concatenate(sums: Sequence[jax.Array]) -> jax.Array:
    """Vectors as one, in the widest of their dtypes."""
    real = numerics.real_dtype(*sums)
    return jax.lax.concatenate([numerics.widen(x, real) for x in sums], 0)


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    """The arrays along a new axis, which is not sharded where an axis of theirs is."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in arrays], 0)


T = TypeVar("T")

# Arrays per batch. XLA's CPU backend compiles equal kernels once, but a scalar sliced from a vector
# is a kernel of its own for each position: one vector of 1000 norms is 1000 kernels of 5 to 10 ms
# each to compile, batches of 8 are 8. LARS on 24 and 200 leaves compiles in 0.9 and 6.2 s with 4,
# 0.9 and 4.5 with 8, 1.4 and 4.6 with 16. For sharded arrays, each batch also needs collectives.
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
        norms, top, scale = self.aligned(largest)
        return ScaledNorm(top * numerics.safe_sqrt(total(jnp.square(norms / top))), scale)

    def aligned(self, largest: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mantissas in the largest scale, what they are divided by next, and the scale."""
        scales = jax.lax.stop_gradient(self.scale)
        scale = largest(scales)
        norms = self.mantissa * (scales / scale)
        # Mantissas are below the root of the largest number, so their reciprocals do not overflow.
        top = largest(jax.lax.stop_gradient(norms))
        return norms, jnp.where((top == 0) | (top == jnp.inf), jnp.ones_like(top), top), scale


def layer_norms(
    layers: Sequence[LayerAxes], *groups: Sequence[Call], scale_free: bool = False
) -> list[list[jax.Array]]:
    """|f(*arrays)| of each layer, a list of batches for each group, in float32 or wider.

    At most the largest number. With `scale_free`, for ratios, a larger norm in the last group is
    told from it: then all norms of the layer are in another unit.

    The plain sum of squares overflows from 1e19 and vanishes below 1e-23 in float32. A scaled sum
    for every layer would be expensive at each step, to run and to compile. So the plain sums come
    first. One `lax.cond` for the whole model repeats them, each layer scaled by a power of two of
    its own, in the rare step in which some sum is not a normal number. A sum of zero also takes
    this path: it may be an underflow. The derivative of a norm at zero is zero. Layers whose sums
    are normal keep them, so that no norm depends on other layers, not even by a rounding, and
    replicas of a layer on several devices stay equal bit for bit.

    Inside `shard_map` there is a `cond` for each set of mesh axes along which layers vary. Under
    `vmap` it becomes a choice, and what is chosen varies as the condition does. One for all would
    make replicas vary.

    Norms of sharded layers are combined over devices after the `cond`, so that no device waits for
    another inside a branch that the other does not take.

    Quickest to compile where arrays of one shape stand side by side.
    """
    calls = list(itertools.chain(*groups))
    arrays = {id(x): x for _, xs in calls for x in xs}
    spans = _spans(layers, arrays.values())
    if len(spans) > 1:
        parts = [
            layer_norms(layers[span], *(group[span] for group in groups), scale_free=scale_free)
            for span in spans
        ]
        return [list(itertools.chain(*batches)) for batches in zip(*parts, strict=True)]
    if not layers:
        return [[] for _ in groups]
    position = {key: i for i, key in enumerate(arrays)}
    static = tuple((f, tuple(position[id(x)] for x in xs)) for f, xs in calls)
    return _norms(list(arrays.values()), layers=tuple(layers), calls=static, scale_free=scale_free)


def global_norm(arrays: Sequence[jax.Array], layers: Sequence[LayerAxes]) -> ScaledNorm:
    """The norm of all arrays together, each of which is one layer.

    One sum, and one scale where that is not a normal number, are for all arrays of a precision: a
    sum in float64 says nothing of squares in float32.
    """
    groups: dict[Any, list[int]] = {}
    for i in sorted(range(len(arrays)), key=lambda i: layers[i].sort_key):
        groups.setdefault((*layers[i].devices, numerics.real_dtype(arrays[i])), []).append(i)
    norms = []
    is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    size = len(arrays) if is_traced else _EAGER
    for (_, mesh_axes, _), members in groups.items():
        for start in range(0, len(members), size):
            norm = _norm_of_all(list(map(arrays.__getitem__, members[start : start + size])))
            norms.append(_over_devices(norm, mesh_axes) if mesh_axes else norm)
    if not norms:
        return ScaledNorm(jnp.zeros(()), jnp.ones(()))
    if len(norms) == 1:
        return ScaledNorm(*(x.reshape(()) for x in norms[0]))
    return ScaledNorm(*map(concatenate, zip(*norms, strict=True))).combined(jnp.max, jnp.sum)


def norm_of_norms(batches: Sequence[jax.Array]) -> ScaledNorm:
    """The norm of all arrays together, from those of all layers."""
    if not batches:
        return ScaledNorm(jnp.zeros(()), jnp.ones(()))
    norms = concatenate(batches)
    return ScaledNorm(norms, jnp.ones_like(norms)).combined(jnp.max, jnp.sum)


def _joined(a: ScaledNorm, b: ScaledNorm) -> ScaledNorm:
    """The norm of all arrays together, from those of two shares of them."""
    return ScaledNorm(*map(jnp.stack, zip(a, b, strict=True))).combined(jnp.max, jnp.sum)


def _neutral(norm: ScaledNorm) -> ScaledNorm:
    return ScaledNorm(jnp.zeros_like(norm.mantissa), jnp.ones_like(norm.scale))


OF_SHARES = Combine(_joined, _neutral)


def _spans(layers: Sequence[LayerAxes], arrays: Iterable[jax.Array]) -> list[slice]:
    """Which layers share a program: those that vary alike; in an eager call so many at a time."""
    count = len(layers)
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


class MeasuredBatch(NamedTuple):
    """A batch of layers, whose norms are measured.

    Attributes:
      calls: what is measured, an entry per array.
      layers: where the layers are, an entry per array.
      total: the plain sum of squares of each layer.
      limits: the range in which these are exact enough.
    """

    calls: Sequence[Call]
    layers: Sequence[LayerAxes]
    total: jax.Array
    limits: SquareRange

    def rescaled(self) -> ScaledNorm:
        """The norms, from sums in a unit for each layer where the plain sum is not normal."""
        # On GPUs, XLA computes both branches at each step, unless one has an operation that it
        # considers expensive, such as a barrier.
        total = jax.lax.optimization_barrier(self.total)
        unit = self.limits.unit(total)
        return _mixed(total, rescaled(self.calls, self.layers, unit), unit)


def measured(calls: Sequence[Call], layers: Sequence[LayerAxes]) -> list[MeasuredBatch]:
    """What the calls of all layers return, in batches."""
    pairs = zip(calls, layers, strict=True)
    plain = leafwise.run(
        [(_squares_of_array(f, axes, False), (None, *xs)) for (f, xs), axes in pairs]
    )
    columns = zip(*(in_batches(layers, x) for x in (calls, layers, plain)), strict=True)
    return [MeasuredBatch(x, axes, concatenate(y), SquareRange.of(y)) for x, axes, y in columns]


@jit_static_kwargs
def _norms(
    arrays: list[jax.Array],
    *,
    layers: tuple[LayerAxes, ...],
    calls: tuple[tuple[Function, tuple[int, ...]], ...],
    scale_free: bool,
) -> list[list[jax.Array]]:
    """The norms of each group of calls, which name positions in the list of arrays."""
    arrays = alike(arrays)
    calls_now = [(f, tuple(arrays[i] for i in positions)) for f, positions in calls]
    batches: list[MeasuredBatch] = []
    for start in range(0, len(calls), len(layers)):
        batches += measured(calls_now[start : start + len(layers)], layers)
    count = len(calls) // len(layers)
    norms = jax.lax.cond(
        any_unusual(batches),
        lambda: [batch.rescaled() for batch in batches],
        lambda: [plain_norm(batch.total) for batch in batches],
    )
    mesh_axes = [batch.layers[0].mesh_axes for batch in batches]
    whole = [
        _over_devices(x, axes) if axes else x for x, axes in zip(norms, mesh_axes, strict=True)
    ]
    per_group = len(batches) // count
    values = [x.value() for x in whole]
    if scale_free:
        values = [
            _in_unit_of(last, x, value)
            for x, value, last in zip(whole, values, whole[-per_group:] * count, strict=True)
        ]
    return [values[i : i + per_group] for i in range(0, len(values), per_group)]


@jit_static_kwargs
def _sum_of_squares(scale: jax.Array | None, x: jax.Array) -> jax.Array:
    """The sum of |scale x|^2 over all elements, as a vector with one entry."""
    x = numerics.widen(x, numerics.real_dtype(x))
    x = x if scale is None else numerics.scaled(x, scale.reshape(()))
    return replicated(jnp.sum(numerics.abs_squared(x))).reshape(-1)


@jit_static_kwargs
def _norm_of_all(arrays: list[jax.Array]) -> ScaledNorm:
    """One norm, as vectors with one entry, of arrays of one precision."""
    arrays = alike(arrays)

    def total(scale: jax.Array | None) -> jax.Array:
        calls: list[Call] = [(_sum_of_squares, (scale, x)) for x in arrays]
        if scale is not None:
            # XLA would write a scale for each element if it saw that arrays share one.
            calls = [(f, jax.lax.optimization_barrier(pair)) for f, pair in calls]
        return jnp.sum(concatenate(leafwise.run(calls)), keepdims=True)

    plain = total(None)
    limits = SquareRange.of([plain])

    def rescaled() -> ScaledNorm:
        unit = limits.unit(plain)
        return ScaledNorm(numerics.safe_sqrt(total(1 / unit)), unit)

    unusual = jnp.any((plain < limits.small) | (plain == jnp.inf))
    return jax.lax.cond(unusual, rescaled, lambda: plain_norm(plain))


def alike(arguments: T) -> T:
    """Arrays that all vary as a condition on some of them: under `vmap` it chooses among them."""
    alike: T = varying_over(arguments, varying_axes(*jax.tree.leaves(arguments)))
    return alike


def any_unusual(batches: Sequence[MeasuredBatch]) -> jax.Array:
    """Whether some sum is not a normal number."""
    together: dict[int, list[MeasuredBatch]] = {}  # all whole sums, and each other on its own
    for i, batch in enumerate(batches):
        key = i if _may_be_sharded(batch.layers[0]) else -1
        together.setdefault(key, []).append(batch)
    flags = []
    for members in together.values():
        total = concatenate([batch.total for batch in members])
        small = np.concatenate([batch.limits.small for batch in members])
        nonempty = _nonempty([axes for batch in members for axes in batch.layers])
        flags.append(jnp.any(((total < small) & nonempty) | (total == jnp.inf)))
    return flags[0] if len(flags) == 1 else jnp.any(jnp.stack(flags))


def _nonempty(layers: Sequence[LayerAxes]) -> ArrayLike:
    flags = [axes.nonempty for axes in layers]
    is_known = all(isinstance(x, np.ndarray) for x in flags)
    return np.concatenate(flags) if is_known else jnp.concatenate(flags)


@jit_static_kwargs
def plain_norm(total: jax.Array) -> ScaledNorm:
    return ScaledNorm(numerics.safe_sqrt(total), jnp.ones_like(total))


@jit_static_kwargs
def _mixed(total: jax.Array, rescaled: jax.Array, unit: jax.Array) -> ScaledNorm:
    """From plain sums for layers that need no unit, from rescaled sums for the others."""
    return ScaledNorm(numerics.safe_sqrt(jnp.where(unit == 1, total, rescaled)), unit)


@jit_static_kwargs
def _in_unit_of(last: ScaledNorm, norm: ScaledNorm, value: jax.Array) -> jax.Array:
    """The value of a norm, divided by 2^24 where the last norm of its layer would overflow.

    What is not zero stays so, since layers of zeros have a ratio of their own.
    """
    overflows = (last.mantissa * last.scale == jnp.inf) & (last.mantissa != jnp.inf)
    small = numerics.positive(norm.mantissa * (norm.scale * 2.0**-24))
    return jnp.where(overflows & (norm.mantissa > 0), small, value)


def _over_devices(norms: ScaledNorm, mesh_axes: tuple[str, ...]) -> ScaledNorm:
    """Norms of whole layers, from the norms of their shards."""
    return norms.combined(
        lambda x: jax.lax.pmax(x, mesh_axes), lambda x: jax.lax.psum(x, mesh_axes)
    )
