"""Converts one leaf of a state to the form of another: its dtype, or 8 bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._quantized import encoding, words
from jgrad._quantized.codec import codec_of
from jgrad._quantized.geometry import geometry
from jgrad._trees import checks, host_memory, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.forms import Blocks, Factors
from jgrad._trees.protocols import Leaf, PyTree

_GUESS = "rows and columns, of which others can only be guessed, expected `reset=` for this leaf"


def converted(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the form and the memory of another; the same array where it has both already."""
    if isinstance(x, Blocks):
        encoding.check(arg, i, x)
        if form_of(x) == form_of(like):
            return in_memory_of(like, words.as_stored(x, like))
    elif checks.is_array(x) and not trees.is_leaf(like) and x.dtype == like.dtype:
        return in_memory_of(like, x)
    new = host_memory.where_it_lies(functools.partial(_on_device, arg, i, like), x)
    return in_memory_of(like, new)


def _on_device(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the form of another."""
    if isinstance(like, Blocks):
        codec = codec_of(like)
        if not (codec_of(x) == codec if isinstance(x, Blocks) else _is_alike(x, like.scale)):
            expected = f"a floating array, or Blocks of {codec.dtype.name}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
        array = x if isinstance(x, Blocks) else x.astype(jnp.float32)
        return words.as_stored(encoding.recoded(array, geometry(like), codec), like)
    if isinstance(x, Blocks):
        x = encoding.decoded(x)
    if isinstance(x, Factors) and not isinstance(like, Factors):
        arg.fail(i, ValueError, _GUESS)
    if isinstance(like, Factors):
        return _factors(arg, i, like, x)
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
    return _on_device(arg, i, like, zero) if trees.is_leaf(like) else zero


def form_of(x: Leaf) -> tuple[Any, ...]:
    """What equal forms have in common, of which the first is as accounts call it."""
    if isinstance(x, Factors):
        return f"rows and columns in {x.dtype}", x.rows.shape, x.columns.shape
    return ("8 bits", geometry(x), codec_of(x)) if isinstance(x, Blocks) else (str(x.dtype),)


def in_memory_of(like: PyTree, tree: PyTree) -> PyTree:
    """A tree, each array in the memory, host's or device's, of the one in another tree."""

    def moved(x: Leaf, like: Leaf) -> Leaf:
        is_there, is_wanted = map(host_memory.is_on_host, (x, like))
        if is_there == is_wanted or not (_is_concrete(x) and _is_concrete(like)):
            return x
        return host_memory.to_host(x) if is_wanted else host_memory.to_device(x)

    return jax.tree.map(moved, tree, like)


def _is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_alike(x: Leaf, like: Leaf) -> bool:
    """Both real, both complex, or both integers."""
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer)
    return checks.is_array(x) and any(
        jnp.issubdtype(x.dtype, kind) and jnp.issubdtype(like.dtype, kind) for kind in kinds
    )
