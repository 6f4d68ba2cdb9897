"""What a step is called with: parameters in a tree, and keywords that `tx` reads."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval  # may change, checked in JAX 0.7 to 0.12

from jgrad._arithmetic import numerics
from jgrad._trees import checks
from jgrad._trees.other_names import KEYWORDS
from jgrad._trees.trees import PyTree, Structure

_NAME = "step_in_backward"
_OF_OPTAX = ("value", "grad", "value_fn")


def check(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[..., Any],
    params: PyTree,
    state: PyTree,
    keywords: Mapping[str, PyTree],
) -> None:
    """A tree of parameters, and no keyword that nobody reads."""
    structure: Structure = jax.tree.structure(params)
    if jax.tree_util.treedef_is_leaf(structure):
        came, remedy = checks.describe(params), "put it in one, as in `{'layers': params}`"
        raise ValueError(f"{_NAME}: `params`: {came}, expected a tree of arrays: {remedy}.")
    keywords = {name: x for name, x in keywords.items() if name != "loss"}  # which the step gives
    for name in sorted(keywords.keys() & _arguments(loss)):
        expected = "expected by position, since keywords are for `tx.update`"
        raise TypeError(f"{_NAME}: `{name}`: an argument of `loss`, {expected}.")
    for name in sorted(keywords.keys() - _read(tx, params, state, keywords)):
        expected = "expected one that it reads; arguments of `loss` are given by position"
        raise TypeError(f"{_NAME}: `{name}`: a keyword that `tx` does not read, {expected}.")


def _arguments(function: Callable[..., Any]) -> set[str]:
    """Names of the arguments of a function, as far as Python knows them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}


@jax.disable_jit(False)
def _read(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    keywords: Mapping[str, PyTree],
) -> set[str]:
    """The keywords that an update reads; transformations hand on those that they do not know.

    Of numbers and arrays its jaxpr says so. Any other is one that has a name here.
    """
    numbers = {name: x for name, x in keywords.items() if _is_traceable(x)}
    others = {name: x for name, x in keywords.items() if name not in numbers}
    named = others.keys() & {*KEYWORDS, *_OF_OPTAX, *_arguments(tx.update)}
    if not numbers:
        return named

    def update(numbers: dict[str, PyTree]) -> PyTree:
        grads = jax.tree.map(
            lambda x: numerics.zeros_like(x) if checks.is_inexact(x) else None, params
        )
        return tx.update(grads, state, params, loss=jnp.zeros(()), **numbers, **others)

    jaxpr = jax.make_jaxpr(update)(numbers).jaxpr
    used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    by_name = jax.tree.unflatten(jax.tree.structure(numbers), used)
    return named | {name for name, x in by_name.items() if any(jax.tree.leaves(x))}


def _is_traceable(x: PyTree) -> bool:
    return all(checks.is_number(leaf) or checks.is_array(leaf) for leaf in jax.tree.leaves(x))
