"""Jacobians of functions from pytrees to pytrees."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgrad import checks, differentiation, trees
from jgrad.checks import Row
from jgrad.differentiation import Argnums, Arguments
from jgrad.trees import PyTree

Mode = Literal["reverse", "forward"] | None


def jac(func: Callable[..., Any], argnums: Argnums = 0, *, mode: Mode = None) -> Callable[..., Any]:
    """The function that returns the Jacobian of `func`.

        jac(f)(x)[i..., j...] = df[i...] / dx[j...]

    Args:
      func: returns a pytree of real floating arrays.
      argnums: which positional arguments to differentiate: pytrees with floating leaves, and
        possibly others.
      mode: "reverse" (one pass per output element), "forward" (one per input element), or None for
        the one that takes fewer passes. None needs only one evaluation of `func`: its forward mode
        is the transpose of the pullback, so it works for what is differentiable in reverse.

    Returns:
      A function of the arguments of `func` that returns, for each leaf of the output, a tree like
      the argument with leaves of shape `output shape + input shape`, `None` for leaves that are not
      differentiated; a tuple of such trees where `argnums` is a sequence.

    Raises:
      TypeError: from the returned function: an argument has no floating leaf, or an output is not a
        real floating array.
      ValueError: `mode` or, from the returned function, `argnums` is not one of the possible.
    """
    both = value_and_jac(func, argnums, mode=mode)

    @functools.wraps(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return jacobian


def value_and_jac(
    func: Callable[..., Any], argnums: Argnums = 0, *, mode: Mode = None
) -> Callable[..., Any]:
    """The function that returns the value of `func` and its Jacobian, from one evaluation.

        value_and_jac(f)(x) = (f(x), df/dx)

    Args:
      func: as for `jac`.
      argnums: as for `jac`.
      mode: as for `jac`.

    Returns:
      A function of the arguments of `func` that returns `(value, Jacobian)`; the Jacobian is as for
      `jac`.

    Raises:
      As `jac`.
    """
    checks.one_of("jac", "mode", mode, ("reverse", "forward", None))

    @functools.wraps(func)
    def value_and_jacobian(*args: Any, **kwargs: Any) -> Any:
        arguments = Arguments("jac", argnums, args)

        def outputs(leaves: list[Any]) -> tuple[list[jax.Array], PyTree]:
            value = func(*arguments.with_leaves(leaves), **kwargs)
            return _floating_leaves(value), value

        if mode == "forward":
            if arguments.any_complex():
                raise TypeError(
                    "jac: `mode`: 'forward' with a complex argument, expected 'reverse' or None."
                )

            def push(tangent: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
                _, out, value = jax.jvp(outputs, (arguments.leaves,), (tangent,), has_aux=True)
                return out, value

            columns, value = jax.vmap(push, out_axes=(0, None))(_basis(arguments.leaves))
            blocks = _blocks_of_columns(columns, arguments.leaves)
        else:
            leaves, pull, value = jax.vjp(outputs, arguments.leaves, has_aux=True)
            if (
                mode is None
                and _size(leaves) > _size(arguments.leaves)
                and not arguments.any_complex()
            ):
                transposed = jax.linear_transpose(lambda cotangent: pull(cotangent)[0], leaves)
                columns = jax.vmap(lambda tangent: transposed(tangent)[0])(_basis(arguments.leaves))
                blocks = _blocks_of_columns(columns, arguments.leaves)
            else:
                blocks = _blocks_of_rows(
                    jax.vmap(lambda cotangent: pull(cotangent)[0])(_basis(leaves)), leaves
                )
        structure: Any = jax.tree.structure(value)
        return value, structure.unflatten([arguments.result(row) for row in blocks])

    return value_and_jacobian


def _floating_leaves(output: PyTree) -> list[jax.Array]:
    leaves = jax.tree.leaves(output)
    row = Row("jac", "output of func", leaves, lambda: trees.paths(output))
    for i, leaf in enumerate(leaves):
        if not differentiation.is_real_floating(leaf):
            row.fail(i, TypeError, f"{checks.describe(leaf)}, expected a real floating array")
    return [jnp.asarray(leaf) for leaf in leaves]


# The Jacobian of several outputs and inputs is a table of blocks, a row per output leaf.
# Differentiation gives a stack for each leaf of one side, whose first axis runs through all
# elements of the other side.


def _size(leaves: Sequence[jax.Array]) -> int:
    return sum(leaf.size for leaf in leaves)


def _parts(leaves: Sequence[jax.Array]) -> list[slice]:
    """Where the elements of each leaf stand among those of all."""
    ends = np.cumsum([leaf.size for leaf in leaves])
    return [slice(end - leaf.size, end) for leaf, end in zip(leaves, ends, strict=True)]


def _basis(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The unit vectors of the space of `leaves`, stacked along a new first axis."""
    unit = np.eye(_size(leaves))
    return [
        jnp.asarray(unit[:, part].reshape(len(unit), *x.shape), x.dtype)
        for x, part in zip(leaves, _parts(leaves), strict=True)
    ]


def _blocks_of_rows(
    stacks: Sequence[jax.Array], outputs: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    """From a stack per input leaf, of shape (all output elements, *input shape)."""
    return [
        [x[part].reshape(*y.shape, *x.shape[1:]) for x in stacks]
        for y, part in zip(outputs, _parts(outputs), strict=True)
    ]


def _blocks_of_columns(
    stacks: Sequence[jax.Array], inputs: Sequence[jax.Array]
) -> list[list[jax.Array]]:
    """From a stack per output leaf, of shape (all input elements, *output shape)."""
    return [
        [
            jnp.moveaxis(y[part], 0, -1).reshape(*y.shape[1:], *x.shape)
            for x, part in zip(inputs, _parts(inputs), strict=True)
        ]
        for y in stacks
    ]
