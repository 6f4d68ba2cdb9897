"""Jacobians of functions from pytrees to pytrees."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._gradients import arguments as differentiation
from jgrad._gradients.arguments import Argnums, Arguments
from jgrad._trees import checks
from jgrad._trees.annotations import First, Rest, Value, ValueAndAux, WithArguments
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.trees import Structure

Mode = Literal["reverse", "forward"] | None

# From the leaves that are differentiated to those of the output, and the output itself.
Outputs = Callable[[list[jax.Array]], tuple[list[jax.Array], PyTree]]
Grid = list[list[jax.Array]]


# Type checkers know the Jacobian of one array by the first argument, which is like that.
@overload
def jac(
    func: Callable[Concatenate[First, Rest], jax.Array],
    argnums: Literal[0] = 0,
    *,
    mode: Mode = None,
    has_aux: Literal[False] = False,
) -> WithArguments[First, Rest, First]: ...
@overload
def jac(
    func: Callable[..., ValueAndAux], argnums: Argnums = 0, *, mode: Mode = None, has_aux: bool
) -> Callable[..., PyTree]: ...
@overload
def jac(
    func: Callable[..., PyTree],
    argnums: Argnums = 0,
    *,
    mode: Mode = None,
    has_aux: Literal[False] = False,
) -> Callable[..., PyTree]: ...
def jac(
    func: Callable[..., PyTree],
    argnums: Argnums = 0,
    *,
    mode: Mode = None,
    has_aux: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function that computes the Jacobian of `func`.

        jac(f)(x)[i..., j...] = df[i...] / dx[j...]

    Args:
      func: a function that returns a pytree of real floating arrays; with `has_aux`, a pair of this
        and anything else.
      argnums: which positional arguments to differentiate with respect to: pytrees with floating
        leaves, and possibly others.
      mode: "reverse" (one pass per output element), "forward" (one pass per input element), or None
        for whichever takes fewer passes. None evaluates `func` once and gets forward mode by
        transposing the pullback. If `func` contains a `jax.custom_vjp` whose backward pass is not
        linear, there is no such transpose; use "reverse".
      has_aux: see `func`.

    Returns:
      A function with the arguments of `func` that returns, for each leaf of the output, a tree like
      the argument, with leaves of shape `output shape + input shape` in the dtype of the input, and
      `None` for leaves that are not differentiable; a tuple of such trees if `argnums` is a
      sequence. With `has_aux`, it returns a pair of the Jacobian and the auxiliary output.

    Raises:
      TypeError: from the returned function: an argument has no floating leaf, an output leaf is not
        a real floating array, or with `has_aux` the output is not a pair.
      ValueError: `mode` is unknown; from the returned function, `argnums` is out of range.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> model = lambda params, x: x @ params["w"] + params["b"]
      >>> jacobian = jgrad.jac(model)(params, jnp.ones(3))
      >>> jacobian["w"].shape, jacobian["b"].shape
      ((2, 3, 2), (2, 2))
    """
    both = _value_and_jac("jac", func, argnums, mode, has_aux=has_aux)

    @functools.wraps(func)
    def jacobian(*args: PyTree, **kwargs: PyTree) -> PyTree:
        output, table = both(*args, **kwargs)
        return (table, output[1]) if has_aux else table

    return jacobian


@overload
def value_and_jac(
    func: Callable[Concatenate[First, Rest], jax.Array],
    argnums: Literal[0] = 0,
    *,
    mode: Mode = None,
    has_aux: Literal[False] = False,
) -> WithArguments[First, Rest, tuple[jax.Array, First]]: ...
@overload
def value_and_jac(
    func: Callable[..., ValueAndAux], argnums: Argnums = 0, *, mode: Mode = None, has_aux: bool
) -> Callable[..., tuple[ValueAndAux, PyTree]]: ...
@overload
def value_and_jac(
    func: Callable[..., Value],
    argnums: Argnums = 0,
    *,
    mode: Mode = None,
    has_aux: Literal[False] = False,
) -> Callable[..., tuple[Value, PyTree]]: ...
def value_and_jac(
    func: Callable[..., PyTree],
    argnums: Argnums = 0,
    *,
    mode: Mode = None,
    has_aux: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function that computes the value of `func` and its Jacobian in one evaluation.

        value_and_jac(f)(x) = (f(x), df/dx)

    Args:
      func: as for `jac`.
      argnums: as for `jac`.
      mode: as for `jac`.
      has_aux: as for `jac`.

    Returns:
      A function with the arguments of `func` that returns `(value, Jacobian)` or, with `has_aux`,
      `((value, aux), Jacobian)`. The Jacobian is as for `jac`.

    Raises:
      As `jac`.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> model = lambda params, x: x @ params["w"] + params["b"]
      >>> value, jacobian = jgrad.value_and_jac(model)(params, jnp.ones(3))
      >>> value.shape, jacobian["w"].shape
      ((2,), (2, 3, 2))
    """
    return _value_and_jac("value_and_jac", func, argnums, mode, has_aux=has_aux)


def _value_and_jac(
    name: str, func: Callable[..., PyTree], argnums: Argnums, mode: Mode, *, has_aux: bool
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`value_and_jac` under the name that messages give."""
    checks.boolean(name, "has_aux", has_aux)
    checks.one_of(name, "mode", mode, ("reverse", "forward", None))

    @functools.wraps(func)
    def value_and_jacobian(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        arguments = Arguments(name, argnums, args)

        def outputs(leaves: list[Leaf]) -> tuple[list[jax.Array], PyTree]:
            output = func(*arguments.with_leaves(leaves), **kwargs)
            value = differentiation.first_of_pair(name, output) if has_aux else output
            return _floating_leaves(name, value), output

        inputs = arguments.leaves
        if mode == "forward":
            if any(map(jnp.iscomplexobj, inputs)):
                expected = "'reverse' or None"
                raise TypeError(
                    f"{name}: `mode`: 'forward' with a complex argument, expected {expected}."
                )
            output, grid = _forward(outputs, inputs)
        else:
            output, grid = _reverse(outputs, inputs, may_transpose=mode is None)
        structure: Structure = jax.tree.structure(output[0] if has_aux else output)
        return output, structure.unflatten([arguments.result(row) for row in grid])

    return value_and_jacobian


def _forward(outputs: Outputs, inputs: list[jax.Array]) -> tuple[PyTree, Grid]:
    """Value and Jacobians, by a push for each element of the input."""
    form: list[tuple[Structure, list[Leaf]]] = []

    def push(tangent: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        _, out, value = jax.jvp(outputs, (inputs,), (tangent,), has_aux=True)
        leaves, structure = jax.tree.flatten(value)
        # What else there is in `aux`, such as a string, cannot go through `vmap`.
        form.append((structure, [None if checks.is_array(x) else x for x in leaves]))
        return out, [x for x in leaves if checks.is_array(x)]

    along = jax.vmap(push, out_axes=(0, None), axis_size=_size(inputs))
    columns, arrays = along(_basis(inputs))
    ((structure, others),), rest = form, iter(arrays)
    value = structure.unflatten([next(rest) if x is None else x for x in others])
    return value, _grid_of_columns(columns, inputs)


def _reverse(
    outputs: Outputs, inputs: list[jax.Array], *, may_transpose: bool
) -> tuple[PyTree, Grid]:
    """Value and Jacobians, by a pull for each element of the output.

    Or by a push for each element of the input, if those are fewer: transposed, the pullback is one.
    """
    leaves, pull, value = jax.vjp(outputs, inputs, has_aux=True)

    def one(cotangent: list[jax.Array]) -> list[jax.Array]:
        return pull(cotangent)[0]

    fewer_inputs = _size(inputs) < _size(leaves)
    if may_transpose and fewer_inputs and not any(map(jnp.iscomplexobj, inputs)):
        push = jax.linear_transpose(one, leaves)
        along = jax.vmap(lambda tangent: push(tangent)[0], axis_size=_size(inputs))
        # If a custom backward pass has no transpose, the code below is right all the same.
        with contextlib.suppress(NotImplementedError, AssertionError):
            return value, _grid_of_columns(along(_basis(inputs)), inputs)
    return value, _grid_of_rows(jax.vmap(one, axis_size=_size(leaves))(_basis(leaves)), leaves)


def _floating_leaves(name: str, output: PyTree) -> list[jax.Array]:
    arg = ArgLeaves.from_tree(name, "output of func", output)
    for i, leaf in enumerate(arg.leaves):
        if leaf is not None and not differentiation.is_real_floating(leaf):
            arg.fail(i, TypeError, f"{checks.describe(leaf)}, expected a real floating array")
    return [jnp.asarray(leaf) for leaf in arg.leaves if leaf is not None]


# The Jacobian of several outputs and inputs is a grid of arrays, a row per output leaf.
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
        differentiation.typed_as(x, unit[:, part].reshape(len(unit), *x.shape))
        for x, part in zip(leaves, _parts(leaves), strict=True)
    ]


def _grid_of_rows(stacks: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> Grid:
    """From a stack per input leaf, of shape (all output elements, *input shape)."""
    return [
        [x[part].reshape(*y.shape, *x.shape[1:]) for x in stacks]
        for y, part in zip(outputs, _parts(outputs), strict=True)
    ]


def _grid_of_columns(stacks: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> Grid:
    """From a stack per output leaf, of shape (all input elements, *output shape)."""
    return [
        [
            jnp.moveaxis(y[part], 0, -1).reshape(*y.shape[1:], *x.shape).astype(x.dtype)
            for x, part in zip(inputs, _parts(inputs), strict=True)
        ]
        for y in stacks
    ]
