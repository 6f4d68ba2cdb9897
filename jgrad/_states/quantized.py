"""States in 8 bits as arrays, and back: for checkpoints that any recipe reads."""

import functools
from typing import Any

import jax.numpy as jnp

from jgrad._quantized import encoding
from jgrad._quantized.codec import codec_of
from jgrad._quantized.geometry import geometry
from jgrad._trees import checks, trees
from jgrad._trees.blocks import Blocks
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.host_memory import where_it_lies
from jgrad._trees.trees import PyTree

_QUANTIZED = "quantized"


def unquantized(state: PyTree) -> PyTree:
    """The state with arrays of float32 for `Blocks`, packed or not.

        array = decode(codes) scale

    The state of the same optimizer without `moment_dtype="8bit"`. Everything else is unchanged.

    Args:
      state: any tree, such as the state of an optimizer, or its moments alone.

    Returns:
      The tree.

    Raises:
      TypeError: codes that are not int8 or uint8.
      ValueError: scales of other blocks than those of 256 elements.

    Example:
      >>> state = jgrad.adam(1e-3, moment_dtype="8bit").init({"w": jnp.ones((64, 256))})
      >>> arrays = jgrad.unquantized(state)
      >>> arrays.mw["w"].shape, arrays.mw["w"].dtype.name
      ((64, 256), 'float32')
    """
    arg = ArgLeaves.from_tree("unquantized", "state", state)
    for i, x in enumerate(arg.leaves):
        if isinstance(x, Blocks):
            encoding.check(arg, i, x)
    return trees.map_leaves(
        lambda x: where_it_lies(encoding.decoded, x) if isinstance(x, Blocks) else x, state
    )


def quantized(state: PyTree, *, like: PyTree) -> PyTree:
    """The state in the form of another: `Blocks` where that has them, and arrays elsewhere.

        codes, scale = encode(array), to the nearest code

    For a checkpoint of another recipe: one of float32 moments for an optimizer with
    `moment_dtype="8bit"`, or the reverse. Codes that are in the right blocks already stay as they
    are, and what `unquantized` made of codes gets codes of the same numbers. To pack or unpack a
    state as well, use `pack(state, like=like)` and `unpack`.

    Args:
      state: a tree of arrays and `Blocks`.
      like: a tree of the same structure, such as `jax.eval_shape(tx.init, params)`. Floating arrays
        get its dtypes.

    Returns:
      The tree.

    Raises:
      ValueError: structures or shapes differ, or scales are those of other blocks.
      TypeError: codes of another dtype, or an array where `like` has none.

    Example:
      >>> params = {"w": jnp.ones((64, 256))}
      >>> restored = jgrad.adam(1e-3).init(params)  # float32: a checkpoint of another recipe
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> state = jgrad.quantized(restored, like=jax.eval_shape(tx.init, params))
      >>> state.mw["w"].codes.dtype.name, state.vw["w"].codes.dtype.name
      ('int8', 'uint8')
    """
    checks.same_structure(_QUANTIZED, "state", state, "like", like)
    arg = ArgLeaves.from_tree(_QUANTIZED, "state", state).with_arrays()
    expected = trees.flatten(like)[0]
    checks.same_shapes(arg, arg._replace(name="like", leaves=expected))
    pairs = enumerate(zip(arg.leaves, expected, strict=True))
    new = [where_it_lies(functools.partial(_like, arg, i, like), x) for i, (x, like) in pairs]
    return trees.flatten(like)[1].unflatten(new)


def _like(arg: ArgLeaves, i: int, like: Any, x: Any) -> Any:
    """One leaf in the form of another."""
    if isinstance(x, Blocks):
        encoding.check(arg, i, x)
    if isinstance(like, Blocks):
        codec = codec_of(like)
        same_kind = codec_of(x) == codec if isinstance(x, Blocks) else _is_floating(x)
        if not same_kind:
            expected = f"a floating array, or Blocks of {codec.kind}"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
        array = x if isinstance(x, Blocks) else x.astype(jnp.float32)
        return encoding.recoded(array, geometry(like), codec)
    if isinstance(x, Blocks):
        x = encoding.decoded(x)
    if not hasattr(like, "dtype") or getattr(x, "dtype", None) == like.dtype:
        return x
    if not (_is_floating(x) and jnp.issubdtype(like.dtype, jnp.floating)):
        arg.fail(i, TypeError, f"{checks.describe(x)}, expected {like.dtype}")
    return x.astype(like.dtype)


def _is_floating(x: Any) -> bool:
    return checks.is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.floating))
