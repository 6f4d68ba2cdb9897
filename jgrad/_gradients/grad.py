"""Gradients and Hessian-vector products of functions of pytrees.

Compared with `jax.grad`, arguments may also have integer, bool and PRNG-key leaves, whose gradient
is `None`; an output with one element counts as a scalar, whatever its rank; `func` is called
exactly once; and errors name the leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, overload

import jax
import jax.numpy as jnp

from jgrad._gradients import arguments as differentiation
from jgrad._gradients.arguments import Argnums, Arguments
from jgrad._trees import checks
from jgrad._trees.annotations import (
    Aux,
    First,
    Others,
    Rest,
    Tree,
    Value,
    ValueAndAux,
    WithArguments,
)
from jgrad._trees.protocols import Leaf, PyTree

# Set on what `grad` returns, to itself. The gradient of a gradient differentiates the sum of its
# elements, and `functools.wraps` also copies attributes to wrappers that are not gradients.
_GRADIENT = "_jgrad_gradient"


# Type checkers know the type of the first argument, which most people differentiate.
@overload
def grad(
    func: Callable[Concatenate[First, Rest], Any],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[False] = False,
) -> WithArguments[First, Rest, First]: ...
@overload
def grad(
    func: Callable[Concatenate[First, Rest], tuple[Any, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
) -> WithArguments[First, Rest, tuple[First, Aux]]: ...
@overload
def grad(
    func: Callable[..., PyTree], argnums: Argnums = 0, *, has_aux: Literal[False] = False
) -> Callable[..., PyTree]: ...
@overload
def grad(
    func: Callable[..., ValueAndAux], argnums: Argnums = 0, *, has_aux: bool
) -> Callable[..., PyTree]: ...
def grad(
    func: Callable[..., PyTree], argnums: Argnums = 0, *, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Returns a function that computes the gradient of `func`.

        grad(f)(x) = df/dx

    Nested calls on an array differentiate the sum of the inner gradient. If `f` is elementwise up
    to a final sum, `grad(grad(f))` is therefore the second derivative of each element, and n nested
    calls give the n-th.

    Args:
      func: a function that returns a real floating array with one element; with `has_aux`, a pair
        of this and anything else.
      argnums: which positional arguments to differentiate with respect to: pytrees with floating or
        complex leaves, and possibly others. Gradients of complex leaves are as in `jax.grad`, so
        the direction of steepest ascent is their conjugate.
      has_aux: see `func`.

    Returns:
      A function with the arguments of `func`. It returns the gradient, a tree like the argument
      with leaves of the same shapes and dtypes, and `None` for leaves that are not differentiable.
      If `argnums` is a sequence, it returns a tuple of such trees; with `has_aux`, a pair of the
      gradient and the auxiliary output.

    Raises:
      TypeError: from the returned function: an argument has no floating leaf, or the output is not
        a single real floating array.
      ValueError: from the returned function: the output has several elements, or `argnums` is out
        of range.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2), "epoch": 4}
      >>> loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
      >>> grads = jgrad.grad(loss)(params, jnp.ones(3))
      >>> jax.tree.map(jnp.shape, grads)
      {'b': (2,), 'epoch': None, 'w': (3, 2)}
    """
    both = _value_and_grad("grad", func, argnums, has_aux=has_aux)

    @functools.wraps(func)
    def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    setattr(gradient, _GRADIENT, gradient)
    return gradient


@overload
def value_and_grad(
    func: Callable[Concatenate[First, Rest], ValueAndAux],
    argnums: Literal[0] = 0,
    *,
    has_aux: bool,
) -> WithArguments[First, Rest, tuple[ValueAndAux, First]]: ...
@overload
def value_and_grad(
    func: Callable[..., ValueAndAux], argnums: Argnums = 0, *, has_aux: bool
) -> Callable[..., tuple[ValueAndAux, PyTree]]: ...
@overload
def value_and_grad(
    func: Callable[Concatenate[First, Rest], Value],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[False] = False,
) -> WithArguments[First, Rest, tuple[Value, First]]: ...
@overload
def value_and_grad(
    func: Callable[..., Value], argnums: Argnums = 0, *, has_aux: Literal[False] = False
) -> Callable[..., tuple[Value, PyTree]]: ...
def value_and_grad(
    func: Callable[..., PyTree], argnums: Argnums = 0, *, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Returns a function that computes the value of `func` and its gradient in one evaluation.

        value_and_grad(f)(x) = (f(x), df/dx)

    Args:
      func: as for `grad`.
      argnums: as for `grad`.
      has_aux: as for `grad`.

    Returns:
      A function with the arguments of `func` that returns `(value, gradient)` or, with `has_aux`,
      `((value, aux), gradient)`. The gradient is as for `grad`.

    Raises:
      As `grad`.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
      >>> value, grads = jgrad.value_and_grad(loss)(params, jnp.ones(3))
      >>> value.shape, grads["w"].shape
      ((), (3, 2))
    """
    return _value_and_grad("value_and_grad", func, argnums, has_aux=has_aux)


def _value_and_grad(
    name: str, func: Callable[..., PyTree], argnums: Argnums, *, has_aux: bool
) -> Callable[..., PyTree]:
    """`value_and_grad` under the name that messages give."""
    checks.boolean(name, "has_aux", has_aux)

    @functools.wraps(func)
    def value_and_gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arguments = Arguments(name, argnums, args)

        def scalar(leaves: list[Leaf]) -> tuple[jax.Array, PyTree]:
            output = func(*arguments.with_leaves(leaves), **kwargs)
            value = differentiation.first_of_pair(name, output) if has_aux else output
            is_gradient = getattr(func, _GRADIENT, None) is func
            scalar_of = _sum_of_gradient if is_gradient else differentiation.scalar
            return scalar_of(name, value), output

        (_, output), gradient = jax.value_and_grad(scalar, has_aux=True)(arguments.leaves)
        return output, arguments.result(gradient)

    return value_and_gradient


@overload
def hvp(
    func: Callable[..., PyTree], primals: tuple[First], tangents: Sequence[PyTree]
) -> First: ...
@overload
def hvp(
    func: Callable[..., PyTree], primals: tuple[First, Value, *Others], tangents: Sequence[PyTree]
) -> tuple[First, Value, *Others]: ...
@overload
def hvp(
    func: Callable[..., PyTree], primals: Sequence[PyTree], tangents: Sequence[PyTree]
) -> PyTree: ...
def hvp(
    func: Callable[..., PyTree], primals: Sequence[PyTree], tangents: Sequence[PyTree]
) -> PyTree:
    """Multiplies the Hessian of `func` by a vector, using forward-over-reverse differentiation.

        hvp(f, (x,), (v,)) = d/de grad f(x + e v) at e = 0

    Args:
      func: a function that returns a real floating array with one element.
      primals: its positional arguments, as for `jax.jvp`: pytrees with floating leaves, and
        possibly others.
      tangents: a vector for each of these: trees of the same structure with leaves of the same
        shapes and dtypes; `None` for leaves that are not differentiable.

    Returns:
      The product, a tree like the argument with `None` for leaves that are not differentiable; for
      several arguments, a tuple of such trees, each summed over the tangents of all arguments.

    Raises:
      TypeError: `primals` or `tangents` is not a tuple or list, an argument has no floating leaf, a
        tangent has the wrong type, or the output of `func` is not a single real floating array.
      ValueError: lengths, tree structures or shapes do not match, or the output has several
        elements.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> loss = lambda params: jnp.sum(params["w"] ** 4) + jnp.sum(params["b"] ** 2)
      >>> product = jgrad.hvp(loss, (params,), (params,))
      >>> product["w"].shape
      (3, 2)
    """
    for name, x in (("primals", primals), ("tangents", tangents)):
        if not isinstance(x, (tuple, list)):
            expected = "a tuple with an entry per argument of `func`, such as `(x,)`"
            raise TypeError(f"hvp: `{name}`: {checks.describe(x)}, expected {expected}.")
    if len(primals) != len(tangents):
        raise ValueError(
            f"hvp: `tangents`: {len(tangents)} entries, expected {len(primals)}, as `primals` has."
        )
    if not primals:
        raise ValueError("hvp: `primals`: no entries, expected one per argument of `func`.")
    arguments = Arguments("hvp", tuple(range(len(primals))), tuple(primals))

    def scalar(leaves: list[Leaf]) -> jax.Array:
        return differentiation.scalar("hvp", func(*arguments.with_leaves(leaves)))

    _, products = jax.jvp(jax.grad(scalar), (arguments.leaves,), (arguments.tangents(tangents),))
    product = arguments.result(products)
    return product if len(primals) > 1 else product[0]


def stop_gradient(x: Tree, /, *, preserve_type: bool = True, out: None = None) -> Tree:
    """Returns `x` unchanged, but treats it as a constant in differentiation.

        stop_gradient(x) = x, with derivative 0

    Args:
      x: a pytree; leaves that are not arrays are returned as they are.
      preserve_type: ignored; Ivy has it because its variables may change type.
      out: None.

    Returns:
      A tree like `x`.

    Raises:
      NotImplementedError: `out` is given.

    Example:
      >>> targets = lambda w: jgrad.stop_gradient(jnp.tanh(w))
      >>> bool(jgrad.grad(lambda w: jnp.sum(targets(w)))(jnp.ones(3)).any())
      False
    """
    checks.no_out("stop_gradient", out)
    checks.boolean("stop_gradient", "preserve_type", preserve_type)
    constant: Tree = jax.tree.map(
        lambda leaf: jax.lax.stop_gradient(leaf) if checks.is_array(leaf) else leaf, x
    )
    return constant


def _sum_of_gradient(name: str, gradient: PyTree) -> jax.Array:
    """What the gradient of a gradient differentiates."""
    if not differentiation.is_real_floating(gradient):
        expected = "that of one real array; take `jac` of it, or `hvp`"
        raise TypeError(
            f"{name}: the inner gradient is {checks.describe(gradient)}, expected {expected}."
        )
    return jnp.sum(gradient)
