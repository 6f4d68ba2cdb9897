"""8-bit codes as words of 32 bits, as `offload` keeps them in host memory.

XLA for TPUs tiles bytes otherwise on the host than on the device, so it would copy a whole stack of
them for each layer. It does not with words, and four rows of codes on a TPU are the bytes of a row
of words. The dtype of words says the codec, int32 for int8 and uint32 for uint8, and the scales say
along which axis four codes are a word.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

from jgrad._quantized.blocks import CODES, IN_WORD, Blocks, axis_of_words
from jgrad._quantized.geometry import in_rows
from jgrad._trees import checks, forms, host_memory
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import barrier

_OTHERS = CODES | {codes: words for words, codes in CODES.items()}


def to_words(x: Blocks) -> Blocks:
    """An array in 8 bits with words for codes, where these belong in host memory."""
    codes, scale = jax.tree.leaves(x)
    axis = _axis(codes) if in_rows(Blocks(codes, scale)) else None
    if axis is None or not host_memory.is_large_shape(_shape(codes, axis)):
        return x
    return _converted(x, axis)


def belong_on_host(x: Blocks, is_large: Callable[[Leaf], bool]) -> list[bool]:
    """Whether its arrays do: codes in words, and their scales if they are large.

    Scales of a matrix stay: XLA lays them out with rows along the lanes, where it cannot slice them
    on the host, as an embedding is sliced.
    """
    in_words, scale = _axis_of(x) is not None, jax.tree.leaves(x)[-1]
    return [in_words, in_words and scale.ndim > 2 and is_large(scale)]


def to_codes(x: Blocks) -> Blocks:
    """An array in 8 bits with codes for words, in the memory where these lie."""
    axis = _axis_of(x)
    return x if axis is None else _apart(_converted(x, axis))


def stored_as(x: Blocks, like: PyTree) -> Blocks:
    """An array in 8 bits with words where another one has them, and codes where that has codes."""
    axis = _axis_of(like)
    if _axis_of(x) == axis:
        return x
    x = to_codes(x)
    return x if axis is None else _converted(_apart(x), axis)


def _axis_of(x: PyTree) -> int | None:
    """Along which axis four codes are a word, of an array in 8 bits or of variables of one."""
    parts = jax.tree.leaves(x) if isinstance(x, Blocks) else ()
    return axis_of_words(*parts) if len(parts) == len(Blocks._fields) else None


def _axis(codes: jax.Array) -> int | None:
    """Along which axis four codes become a word; None where they, or those of a shard, do not.

    The last one of rows. Where that is as short as stacks of layers are, a longer one before it,
    since words of several layers have no layers.
    """
    shard: tuple[int, ...] = jax.typeof(codes).sharding.shard_shape(codes.shape)
    fits = [k for k, n in enumerate(shard[:-1]) if n % IN_WORD == 0]
    return max(fits, key=lambda k: (codes.shape[k] >= host_memory.ROWS, k), default=None)


def _apart(x: Blocks) -> Blocks:
    """The same, so that XLA joins nothing with a step on codes, which stays the same program."""
    codes, scale = jax.tree.leaves(x)
    if isinstance(codes, jax.core.Tracer) and not host_memory.is_on_host(codes):
        codes = barrier(codes)
    return jax.tree.unflatten(jax.tree.structure(x), [codes, scale])


def _shape(x: jax.Array, axis: int) -> tuple[int, ...]:
    """Of words of codes, or of the codes of words."""
    n = x.shape[axis] * IN_WORD if x.dtype in CODES else x.shape[axis] // IN_WORD
    return (*x.shape[:axis], n, *x.shape[axis + 1 :])


def _converted(x: Blocks, axis: int) -> Blocks:
    """Words for codes, or codes for words, in the memory where they lie."""
    codes, scale = jax.tree.leaves(x)
    return jax.tree.unflatten(jax.tree.structure(x), [_other(codes, axis), scale])


def _other(x: Leaf, axis: int) -> Leaf:
    """The words of codes, or the codes of words."""
    shape, dtype = _shape(x, axis), _OTHERS[x.dtype]
    bits = functools.partial(_bits, shape=shape, dtype=dtype, axis=axis)
    if not checks.is_array(x):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(x, "sharding", None))
    if isinstance(x, np.ndarray):
        return bits(x)
    is_here = not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    # By its sharding: the types of arrays that orbax restored say "device" until they are copied.
    if is_here and x.sharding.memory_kind == host_memory.KIND:
        shards = x.shape[axis] // x.sharding.shard_shape(x.shape)[axis]
        if shape[axis] % shards == 0:  # all layers together need not fit on the device
            return jax.device_put(bits(np.asarray(x)), x.sharding)
    with jax.named_scope(forms.SCOPE):
        return host_memory.where_it_lies(bits, x)


def _bits(x: Leaf, shape: tuple[int, ...], dtype: np.dtype, axis: int) -> Leaf:
    """The same bits in another shape and dtype: bytes of a word come after those of its axis."""

    def bitcast(x: Leaf, dtype: np.dtype) -> Leaf:
        if isinstance(x, np.ndarray):
            return np.ascontiguousarray(x).view(dtype)
        return jax.lax.bitcast_convert_type(x, dtype)

    if x.dtype in CODES:
        x = bitcast(x, dtype).reshape((*x.shape, IN_WORD))
        order = list(range(len(shape)))
        order.insert(axis + 1, len(shape))
        return x.transpose(order).reshape(shape)
    x = x.reshape((*shape[: axis + 1], IN_WORD, *shape[axis + 1 :]))
    order = [*(k for k in range(x.ndim) if k != axis + 1), axis + 1]
    return bitcast(x.transpose(order), dtype).reshape(shape)
