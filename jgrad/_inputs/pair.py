"""An `init`/`update` pair for trees as users have them: whole models, and variables for arrays.

Behind it the leaves of parameters that are not `None` are arrays, or are numbers with a gradient,
or are wrong; so that methods and wrappers see no model, only a tree of arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree


def pair(
    init: Callable[[PyTree], Any], update: Callable[..., tuple[PyTree, Any]]
) -> optax.GradientTransformationExtraArgs:
    """The transformation, of functions that see arrays alone."""

    def init_of_model(params: PyTree) -> Any:
        return init(arrays_of(params))

    def update_of_model(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        updates, state = checks.values_of(updates), checks.values_of(state)
        return update(updates, state, _with_gradient(params, updates), **extra_args)

    return optax.GradientTransformationExtraArgs(init_of_model, update_of_model)


def arrays_of(params: PyTree) -> PyTree:
    """`None` for leaves of a model that are no arrays and have no gradient: functions, strings.

    A number of Python stays, since `jax.grad` differentiates it.
    """
    return _with_gradient(params, None)


def _with_gradient(params: PyTree, updates: PyTree) -> PyTree:
    """`None` for leaves that are no arrays and whose gradient is None."""
    params = checks.values_of(params)
    leaves, structure = trees.flatten(params)
    if jax.tree_util.treedef_is_leaf(structure):
        return params  # no model: `None`, or one parameter
    gradients, of_gradients = trees.flatten(updates)
    known = of_gradients == structure
    if not known:
        gradients = [None] * len(leaves)

    def is_left_out(p: Any, g: Any) -> bool:
        return g is None and (checks.is_no_parameter(p) or (known and checks.is_number(p)))

    left_out = [is_left_out(p, g) for p, g in zip(leaves, gradients, strict=True)]
    if not any(left_out):
        return params  # the same object, in most calls
    return structure.unflatten([None if x else p for p, x in zip(leaves, left_out, strict=True)])
