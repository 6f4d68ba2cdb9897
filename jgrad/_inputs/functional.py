"""The way through a functional update: canonicalize, jit, check, compute, cast back.

A method says once, by `@functional.update(w=Role.WEIGHTS, dcdw=Role.GRADIENT, ...)`, what each
argument is. `canonicalize` runs at every call, before anything is traced, and looks only at what
Python knows. The checks of `AlignedArguments` run while tracing, once per signature.

What functional updates share:

- Trees. Any argument may be a pytree, a prefix of one, or an array or number, which stands for
  every leaf below it. A result is as fine as the finest argument that it is computed from.
- Shapes. A gradient has its parameter's shape. Moments and `lr` may have any shape that
  broadcasts to it. All other arguments have one element per leaf.
- Dtypes. Weights and moments keep theirs. The arithmetic is in float32, or in float64 where an
  array is. Integer gradients, moments and numbers are read as the default float dtype; integer
  weights are an error.
- `None` as a gradient leaves its leaf, and the moments of it, unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._inputs import numbers
from jgrad._inputs.aligned import AlignedArguments, Role, Roles
from jgrad._packed import packing
from jgrad._trees import checks, trees, values
from jgrad._trees.trees import PyTree


def update(**roles: Role) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a functional update of a function of `AlignedArguments`.

    The decorated `_name(arguments, *, options...)` becomes a function of keyword arguments: those
    with a role, `out`, and the options, which are static. It is compiled as one program, and called
    `name` in messages.

    Args:
      **roles: what each argument is, arrays before numbers. Messages blame the first that is wrong.
    """

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        name = compute.__name__.removeprefix("_")

        def program(named: dict[str, PyTree], options: tuple[tuple[str, Any], ...]) -> Any:
            return compute(AlignedArguments(name, roles, named), **dict(options))

        program.__name__ = name  # what profiles show
        compiled = jax.jit(program, static_argnums=1)

        @functools.wraps(compute)
        def call(*, out: None = None, **named: Any) -> Any:
            values.no_out(name, out)
            trees_ = {key: named.pop(key) for key in roles}
            return compiled(canonicalize(name, roles, trees_), tuple(named.items()))

        return call

    return decorate


def canonicalize(function: str, roles: Roles, named: dict[str, PyTree]) -> dict[str, Any]:
    """Strongly typed arrays for arrays, scalars for numbers, forms of betas."""
    canonical: dict[str, Any] = {}
    for name, role in roles.items():
        if role is Role.RATE:
            values.in_range(function, name, named[name])  # of any sign, but finite
    for name, tree in lists_as_arrays(function, named).items():
        role = roles[name]
        if role.is_array:
            canonical[name] = _strong_arrays(function, name, tree, role)
        elif role is Role.BETA:
            canonical[name] = numbers.betas(function, name, tree)
        elif role is Role.OPTIONAL_NUMBER and tree is None:
            canonical[name] = None
        else:
            canonical[name] = numbers.number(function, name, tree)
    return canonical


def lists_as_arrays(function: str, named: dict[str, PyTree]) -> dict[str, PyTree]:
    """A list of numbers is an array, as in Ivy, unless another list holds arrays: it is a tree."""
    lists = {name: tree for name, tree in named.items() if _is_list(tree)}
    if not all(map(_is_numbers, lists.values())) or (lists and packing.any_packed(*named.values())):
        return named
    as_arrays = {}
    for name, tree in lists.items():
        try:
            as_arrays[name] = np.asarray(tree)
        except ValueError:
            raise ValueError(
                f"{function}: `{name}`: {checks.describe(tree)}, expected rows of one length."
            ) from None
    return named | as_arrays


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)  # no NamedTuple: that is a tree


def _is_numbers(x: Any) -> bool:
    """A list, however deep, of numbers and nothing else."""
    leaves = jax.tree.leaves(x, is_leaf=lambda node: not _is_list(node))
    return bool(leaves) and all(map(checks.is_number, leaves))


def _strong_arrays(function: str, name: str, tree: PyTree, role: Role) -> PyTree:
    if all(
        isinstance(x, jax.Array) and not getattr(x, "weak_type", True)
        for x in jax.tree.leaves(tree)
    ):
        return tree  # the short way: most of what an eager call spends outside XLA is spent here
    tree = checks.values_of(tree)
    checks.arrays_or_numbers(function, name, tree)
    if (
        role is Role.WEIGHTS
    ):  # an integer among weights is an error, and must still be seen to be one
        tree = trees.map_leaves(
            lambda x: np.asarray(x) if isinstance(x, (int, np.integer)) else x, tree
        )
    return trees.map_leaves(
        lambda x: numbers.strong_scalar(x) if checks.is_number(x) else numerics.strong(x), tree
    )
