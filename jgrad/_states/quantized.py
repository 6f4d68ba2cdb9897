"""The old names of `carry_over`, for states in 8 bits; they work for one release."""

from typing import Any

import jax
import jax.numpy as jnp

from jgrad._states.carry_over import carry_over
from jgrad._trees import trees, variables
from jgrad._trees.blocks import Blocks
from jgrad._trees.renamed import warn_of_name
from jgrad._trees.trees import PyTree


def unquantized(state: PyTree) -> PyTree:
    """The state with arrays of float32 for `Blocks`. An old name: use `carry_over`.

        array = decode(codes) scale

    Args:
      state: any tree, such as the state of an optimizer, or its moments alone.

    Returns:
      The tree.

    Raises:
      As `carry_over`.

    Example:
      >>> params = {"w": jnp.ones((64, 256))}
      >>> state = jgrad.adam(1e-3, moment_dtype="8bit").init(params)
      >>> shapes = jax.eval_shape(jgrad.adam(1e-3).init, params)
      >>> arrays, _ = jgrad.carry_over(state, like=shapes)  # in place of `unquantized(state)`
      >>> arrays.mw["w"].shape, arrays.mw["w"].dtype.name
      ((64, 256), 'float32')
    """
    warn_of_name("unquantized", "carry_over")
    state = variables.variables_of_blocks(state)
    return carry_over(state, like=trees.map_leaves(_shape, state), strict=True)[0]


def quantized(state: PyTree, *, like: PyTree) -> PyTree:
    """The state in the form of another. An old name: use `carry_over`.

        codes, scale = encode(array), to the nearest code

    Args:
      state: a tree of arrays and `Blocks`.
      like: a tree of the same structure, such as `jax.eval_shape(tx.init, params)`.

    Returns:
      The tree.

    Raises:
      As `carry_over`.

    Example:
      >>> params = {"w": jnp.ones((64, 256))}
      >>> restored = jgrad.adam(1e-3).init(params)  # float32: a checkpoint of another recipe
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> like = jax.eval_shape(tx.init, params)
      >>> state, _ = jgrad.carry_over(restored, like=like)  # in place of `quantized`
      >>> state.mw["w"].codes.dtype.name, state.vw["w"].codes.dtype.name
      ('int8', 'uint8')
    """
    warn_of_name("quantized", "carry_over")
    return carry_over(state, like=like, strict=True)[0]


def _shape(x: Any) -> Any:
    if isinstance(x, Blocks):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return x
