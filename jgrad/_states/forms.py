"""One leaf of a state in the form of another: a dtype, or 8 bits."""

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._quantized import encoding
from jgrad._quantized.codec import codec_of
from jgrad._quantized.geometry import geometry
from jgrad._trees import checks, host_memory
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import Blocks, Factors
from jgrad._trees.protocols import Leaf

_GUESS = "rows and columns, of which others can only be guessed, expected `reset=` for this leaf"


def converted(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the form of another; the same array where it has it already."""
    if isinstance(x, Blocks):
        encoding.check(arg, i, x)
    if isinstance(like, Blocks):
        codec = codec_of(like)
        is_floating = checks.is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.floating))
        same_kind = codec_of(x) == codec if isinstance(x, Blocks) else is_floating
        if not same_kind:
            expected = f"a floating array, or Blocks of {codec.kind}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
        array = x if isinstance(x, Blocks) else x.astype(jnp.float32)
        return encoding.recoded(array, geometry(like), codec)
    if isinstance(x, Blocks):
        x = encoding.decoded(x)
    if isinstance(x, Factors) and getattr(like, "_fields", None) != Factors._fields:
        arg.fail(i, ValueError, _GUESS)
    if isinstance(like, Factors):
        return _factors(arg, i, like, x)
    if getattr(x, "dtype", None) == like.dtype:
        return x
    if not _is_alike(x, like):
        arg.fail(i, TypeError, f"{checks.describe(x)}, expected {like.dtype}")
    return x.astype(like.dtype)


def _factors(arg: ArgLeaves, i: int, like: Factors, x: Leaf) -> Factors:
    """Rows and columns, of the means of an array, or of others along the same axes."""
    if not isinstance(x, Factors):
        if not _is_alike(x, like):
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected real floating numbers")
        wide = numerics.widen(x, numerics.real_dtype(x))
        sizes = [enumerate(zip(x.shape, of.shape, strict=True)) for of in like]
        over = [tuple(axis for axis, (a, b) in pairs if a != b) for pairs in sizes]
        x = Factors(*(jnp.mean(wide, axis=axes, keepdims=True) for axes in over))
    if [y.shape for y in x] != [y.shape for y in like]:
        arg.fail(i, ValueError, _GUESS)
    return Factors(
        *(a if a.dtype == b.dtype else a.astype(b.dtype) for a, b in zip(x, like, strict=True))
    )


def zeros(like: Leaf, beside: Leaf) -> Leaf:
    """Zeros in the form of a leaf, sharded as an array of its shape, if there is one."""
    if isinstance(like, Factors):
        return Factors(*(zeros(x, None) for x in like))
    array = beside if getattr(beside, "shape", None) == like.shape else None
    if isinstance(array, Factors):
        array = array.rows * array.columns
    if isinstance(array, Blocks):
        array = encoding.decoded(array)
    dtype = jnp.float32 if isinstance(like, Blocks) else like.dtype
    zero = jnp.zeros(like.shape, dtype) if array is None else numerics.zeros_like(array, dtype)
    if not isinstance(like, Blocks):
        return zero
    blocks = geometry(like)
    return encoding.zeros(zero, blocks.stacked, blocks.form(codec_of(like)))


def description(x: Leaf) -> str:
    """The form of a leaf, in few words."""
    if isinstance(x, Factors):
        return f"rows and columns in {x.dtype}"
    return "8 bits" if isinstance(x, Blocks) else str(x.dtype)


def is_form_of(x: Leaf, like: Leaf) -> bool:
    """Whether a leaf has the form of another."""
    if isinstance(x, Factors) or isinstance(like, Factors):
        both = isinstance(x, Factors) and isinstance(like, Factors)
        return both and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(x, like, strict=True)
        )
    if not isinstance(x, Blocks):
        return not isinstance(like, Blocks) and bool(x.dtype == like.dtype)
    is_blocks = isinstance(like, Blocks)
    return is_blocks and geometry(x) == geometry(like) and codec_of(x) == codec_of(like)


def in_memory_of(like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the memory, host's or device's, of another that is an array."""
    concrete = [y for y in jax.tree.leaves((like, x)) if isinstance(y, jax.Array)]
    if len(concrete) < 2 or any(isinstance(y, jax.core.Tracer) for y in concrete):
        return x
    is_there, is_wanted = (host_memory.place_on_host(y) is not None for y in (x, like))
    if is_there == is_wanted:
        return x
    return host_memory.to_host(x) if is_wanted else host_memory.to_device(x)


def _is_alike(x: Leaf, like: Leaf) -> bool:
    """Both real, both complex, or both integers."""
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer)
    return checks.is_array(x) and any(
        jnp.issubdtype(x.dtype, kind) and jnp.issubdtype(like.dtype, kind) for kind in kinds
    )
