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
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._inputs import numbers
from jgrad._inputs.aligned import ARRAYS, MOMENTS, AlignedArguments, Role, Roles
from jgrad._inputs.moment import Moment
from jgrad._layers.layer_axes import static_axes
from jgrad._packed import packing
from jgrad._trees import checks, trees, values
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree

F = TypeVar("F", bound=Callable[..., Any])

# For each argument that is replaced, the others that its new value is computed from; None for all.
Replaced = Mapping[str, Sequence[str] | None]
Arguments = dict[str, Any]


def update(
    replaced: Replaced,
    before: Callable[[Arguments], Arguments] | None = None,
    /,
    **roles: Role,
) -> Callable[[F], F]:
    """Makes a functional update of its body, which computes on lists with an entry per leaf.

    The signature and the docstring are those of the body, and so are the static options. The body
    gets for an argument with a role what `AlignedArguments` makes of it, for a moment a `Moment`,
    and for `layer_axes` the layers of each leaf. It returns what is added to the weights, new
    gradients, and new moments. All is compiled as one program.

    Args:
      replaced: what the results replace, in order.
      before: looks at all arguments, before anything is traced, and may replace some.
      **roles: what each argument is, arrays before numbers. Messages blame the first that is wrong.
    """

    def decorate(body: F) -> F:
        name, signature = body.__name__, inspect.signature(body)
        parameters = signature.parameters
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
        defaults = {p.name: p.default for p in parameters.values() if p.name not in positional}

        def program(named: Arguments, options: tuple[tuple[str, Any], ...]) -> Any:
            arguments = AlignedArguments(name, roles, named)
            entries = {
                key: Moment(arguments[key]) if role in MOMENTS else arguments[key]
                for key, role in roles.items()
            }
            static = dict(options)
            if "layer_axes" in static:
                static["layer_axes"] = arguments.layer_axes(static["layer_axes"])
            first = list(map(entries.pop, positional))
            results = body(*first, **entries, **static)
            return _results(arguments, roles, replaced, results, static)

        program.__name__ = name  # what profiles show
        compiled = jax.jit(program, static_argnums=1)

        @functools.wraps(body)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) != len(positional) or not kwargs.keys() <= defaults.keys():
                return explained(body)(*args, **kwargs)  # an error
            given = defaults | dict(zip(positional, args, strict=True)) | kwargs
            values.no_out(name, given["out"])
            given = given if before is None else before(given)
            named = canonicalize(name, roles, {key: given.pop(key) for key in roles})
            if "layer_axes" in given:
                axes = static_axes(name, given["mesh_axes"], given["layer_axes"])
                given |= {"mesh_axes": None, "layer_axes": axes}
            options = tuple(given.items())
            try:
                hash(options)
            except TypeError:
                return program(named, options)  # the body says which option has no such values
            return compiled(named, options)

        return cast(F, call)

    return decorate


def _results(
    arguments: AlignedArguments, roles: Roles, replaced: Replaced, results: Any, static: Arguments
) -> Any:
    """The results of a body as trees: one, or a tuple."""
    trees_of_results = []
    columns = zip(replaced.items(), results if len(replaced) > 1 else (results,), strict=True)
    for (key, computed_from), new in columns:
        if roles[key] is Role.WEIGHTS:
            stop = static["stop_gradients"]
            trees_of_results.append(arguments.new_weights(new, stop_gradients=stop))
        else:
            trees_of_results.append(arguments.replaced(key, new, computed_from))
    return tuple(trees_of_results) if len(trees_of_results) > 1 else trees_of_results[0]


def canonicalize(function: str, roles: Roles, named: dict[str, PyTree]) -> dict[str, Any]:
    """Strongly typed arrays for arrays, scalars for numbers, forms of betas."""
    canonical: dict[str, Any] = {}
    for name, role in roles.items():
        if role is Role.RATE:
            # Of any sign, but finite.
            numbers.in_range(ArgLeaves.from_tree(function, name, named[name]))
    for name, tree in lists_as_arrays(function, named).items():
        role = roles[name]
        if role in ARRAYS:
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
    if {list, tuple}.isdisjoint(map(type, named.values())):
        return named
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
    if role is not Role.WEIGHTS and checks.is_number(tree):
        return numbers.strong_scalar(tree)
    if all(  # `weak_type` is not documented, checked in JAX 0.8 to 0.12
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
