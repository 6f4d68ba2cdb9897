"""Ivy's variables and in-place updates, as pure functions on pytrees.

JAX has neither variables nor in-place updates, so each function returns the new value and leaves
the old one unchanged. To reuse its memory, donate it to `jax.jit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._inputs.aligned import lists_as_arrays
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Tree
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import PyTree


@overload
def variable(x: complex | np.ndarray | np.number, /) -> jax.Array: ...
@overload
def variable(x: Tree, /) -> Tree: ...
def variable(x: PyTree, /) -> PyTree:
    """Converts the leaves of `x` to floating arrays, so that they can be differentiated.

    Args:
      x: a pytree of arrays and numbers; a list of numbers becomes an array.

    Returns:
      A tree of arrays: integer and bool leaves in the default float dtype, others as they are.
      Their dtypes are strong, because weakly typed parameters would be compiled again after one
      update.

    Raises:
      TypeError: a leaf is not a number or an array of numbers.

    Example:
      >>> x = jgrad.variable({"w": jnp.arange(6), "b": 0.5})
      >>> x["w"].dtype.name, x["b"].shape
      ('float32', ())
    """
    checks.arrays_or_numbers("variable", "x", x)
    return trees.map_leaves(numerics.floating, lists_as_arrays("variable", {"x": x})["x"])


def is_variable(x: object, /, exclusive: bool = False) -> bool:
    """Tells whether `x` is an array, as JAX has no separate class of variables.

    Args:
      x: anything.
      exclusive: whether only a dedicated class of variables counts; JAX has none.

    Returns:
      True for an array, traced or not; False if `exclusive` is set.

    Example:
      >>> jgrad.is_variable(jnp.ones(3)), jgrad.is_variable("relu")
      (True, False)
    """
    checks.boolean("is_variable", "exclusive", exclusive)
    return isinstance(x, jax.Array) and not exclusive


def variable_data(x: Tree, /) -> Tree:
    """Returns the array behind a variable, which in JAX is `x` itself.

    Args:
      x: a pytree.

    Returns:
      `x`.

    Example:
      >>> x = {"w": jnp.ones((3, 2))}
      >>> jgrad.variable_data(x) is x
      True
    """
    return x


def inplace_update(x: Tree, val: PyTree, /) -> Tree:
    """Returns `val` with the shapes and dtypes of `x`, to replace it.

        x' = val

    Args:
      x: a pytree of arrays.
      val: a pytree of the same structure or a prefix of it, with leaves that broadcast to those of
        `x`.

    Returns:
      `val`, with the shapes and dtypes of `x`.

    Raises:
      ValueError: structures or shapes do not match.
      TypeError: a leaf is not a number or an array of numbers, or `val` has a dtype that `x` cannot
        hold.

    Example:
      >>> x = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
      >>> new = jgrad.inplace_update(x, 5)
      >>> new["w"].shape, new["b"].dtype.name
      ((3, 2), 'bfloat16')
    """
    return _combined("inplace_update", x, val, lambda x, val: val)


def inplace_increment(x: Tree, val: PyTree, /) -> Tree:
    """Returns `x` increased by `val`.

        x' = x + val

    Args:
      x: a pytree of arrays.
      val: a pytree of the same structure or a prefix of it, with leaves that broadcast to those of
        `x`.

    Returns:
      The sum, with the dtypes of `x`.

    Raises:
      As `inplace_update`.

    Example:
      >>> x = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
      >>> new = jgrad.inplace_increment(x, {"w": jnp.ones(2), "b": 0.5})
      >>> new["w"].shape, new["b"].dtype.name
      ((3, 2), 'bfloat16')
    """
    return _combined("inplace_increment", x, val, jnp.add)


def inplace_decrement(x: Tree, val: PyTree, /) -> Tree:
    """Returns `x` decreased by `val`.

        x' = x - val

    Args:
      x: a pytree of arrays.
      val: a pytree of the same structure or a prefix of it, with leaves that broadcast to those of
        `x`.

    Returns:
      The difference, with the dtypes of `x`.

    Raises:
      As `inplace_update`.

    Example:
      >>> x = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
      >>> new = jgrad.inplace_decrement(x, x)
      >>> new["w"].shape, new["b"].dtype.name
      ((3, 2), 'bfloat16')
    """
    return _combined("inplace_decrement", x, val, jnp.subtract)


def _combined(
    function: str, x: Tree, val: PyTree, combine: Callable[[jax.Array, jax.Array], jax.Array]
) -> Tree:
    checks.arrays_or_numbers(function, "x", x)
    checks.arrays_or_numbers(function, "val", val)
    x, val = lists_as_arrays(function, {"x": x, "val": val}).values()
    checks.same_structure(function, "val", val, "x", x, prefix=True)
    leaves, structure = trees.flatten(x)
    arg = ArgLeaves(function, "val", trees.broadcast(val, x), lambda: trees.paths(x))
    for i, (a, b) in enumerate(zip(leaves, arg.leaves, strict=True)):
        if (a is None) != (b is None):
            expected = "None, as `x` is" if a is None else "an array or a number"
            arg.fail(i, TypeError, f"{checks.describe(b)}, expected {expected}")
        if checks.is_number(b) and not _holds(jnp.asarray(a).dtype, b):
            arg.fail(i, ValueError, f"{b}, expected what {jnp.asarray(a).dtype} can hold")
    reference = ArgLeaves(function, "x", leaves, arg.paths).with_arrays()
    arg = arg.with_arrays()
    checks.broadcastable(arg, reference)
    new: list[jax.Array | None] = []
    for i, (a, b) in enumerate(zip(reference.leaves, arg.leaves, strict=True)):
        if a is None:
            new.append(None)
            continue
        if _kind(b) > _kind(a):
            arg.fail(i, TypeError, f"{checks.describe(b)}, expected what {a.dtype} can hold")
        new.append(combine(a, jnp.broadcast_to(b, a.shape).astype(a.dtype)))
    return structure.unflatten(new)


def _holds(dtype: np.dtype, number: float) -> bool:
    """Whether a number is within the range of a dtype; of what kind it is, `_kind` says."""
    if not jnp.issubdtype(dtype, jnp.number) or not math.isfinite(number):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).min <= number <= jnp.iinfo(dtype).max)
    return abs(number) <= float(jnp.finfo(dtype).max)


def _kind(x: jax.Array) -> int:
    """bool, integers, floats, complex: each can be held by those after it."""
    kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
    return [jnp.issubdtype(x.dtype, kind) for kind in kinds].index(True)
