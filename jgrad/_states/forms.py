"""Converts one leaf of a state to the form of another: its dtype, or 8 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        if not (codec_of(x) == codec if isinstance(x, Blocks) else _is_alike(x, like.scale)):
            expected = f"a floating array, or Blocks of {codec.dtype.name}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
        array = x if isinstance(x, Blocks) else x.astype(jnp.float32)
        return encoding.recoded(array, geometry(like), codec)
    if isinstance(x, Blocks):
        x = encoding.decoded(x)
    if isinstance(x, Factors) and not isinstance(like, Factors):
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
        wide = numerics.wide(x)
        over = [np.flatnonzero(np.not_equal(x.shape, of.shape)).tolist() for of in like]
        x = Factors(*(jnp.mean(wide, axis=axes, keepdims=True) for axes in over))
    if [y.shape for y in x] != [y.shape for y in like]:
        arg.fail(i, ValueError, _GUESS)
    return Factors(
        *(a if a.dtype == b.dtype else a.astype(b.dtype) for a, b in zip(x, like, strict=True))
    )


def zeros(arg: ArgLeaves, i: int, like: Leaf, beside: Leaf) -> Leaf:
    """Zeros in the form of a leaf, sharded as an array of its shape, if there is one."""
    if isinstance(beside, Factors):
        beside = beside.rows * beside.columns
    if isinstance(beside, Blocks):
        beside = encoding.decoded(beside)
    dtype = jnp.float32 if isinstance(like, Blocks) else like.dtype
    zero = jnp.zeros(like.shape, dtype) if beside is None else numerics.zeros_like(beside, dtype)
    return converted(arg, i, like, zero)


def form_of(x: Leaf) -> tuple[Any, ...]:
    """What equal forms have in common, of which the first is as accounts call it."""
    if isinstance(x, Factors):
        return f"rows and columns in {x.dtype}", x.rows.shape, x.columns.shape
    return ("8 bits", geometry(x), codec_of(x)) if isinstance(x, Blocks) else (str(x.dtype),)


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
