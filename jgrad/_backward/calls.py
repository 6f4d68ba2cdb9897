"""What a step is called with: parameters in a tree, and keywords that `tx` reads."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import numerics
from jgrad._trees import checks
from jgrad._trees.other_names import KEYWORDS
from jgrad._trees.trees import PyTree, Structure
from jgrad._trees.unpromised import Unpromised

_NAME = "step_in_backward"

partial_eval = Unpromised(_NAME)
_OF_OPTAX = ("value", "grad", "value_fn")


def check_call(
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
    for name in sorted(keywords.keys() & _argument_names(loss)):
        expected = "expected by position, since keywords are for `tx.update`"
        raise TypeError(f"{_NAME}: `{name}`: an argument of `loss`, {expected}.")
    numbers = {name: x for name, x in keywords.items() if _is_traceable(x)}
    others = {name: x for name, x in keywords.items() if name not in numbers}
    for name in sorted(others.keys() - {*KEYWORDS, *_OF_OPTAX}):
        expected = "expected numbers or arrays, of which a program shows whether `tx` reads them"
        raise TypeError(f"{_NAME}: `{name}`: {checks.describe(others[name])}, {expected}.")
    for name in sorted(numbers.keys() - _keywords_read(tx, params, state, numbers, others)):
        expected = "expected one that it reads; arguments of `loss` are given by position"
        raise TypeError(f"{_NAME}: `{name}`: a keyword that `tx` does not read, {expected}.")


def _argument_names(function: Callable[..., Any]) -> set[str]:
    """Names of the arguments of a function, as far as Python knows them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}


@jax.disable_jit(False)
def _keywords_read(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    numbers: dict[str, PyTree],
    others: dict[str, PyTree],
) -> set[str]:
    """The numbers that an update reads: a transformation hands on those that it does not know."""
    if not numbers:
        return set()

    def update(numbers: dict[str, PyTree]) -> PyTree:
        grads = jax.tree.map(
            lambda x: numerics.zeros_like(x) if checks.is_inexact(x) else None, params
        )
        return tx.update(grads, state, params, loss=jnp.zeros(()), **numbers, **others)

    jaxpr = jax.make_jaxpr(update)(numbers).jaxpr
    used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    by_name = jax.tree.unflatten(jax.tree.structure(numbers), used)
    return {name for name, x in by_name.items() if any(jax.tree.leaves(x))}


def _is_traceable(x: PyTree) -> bool:
    """Numbers and arrays, and not None, which stands for what a factory was given."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(checks.is_number(y) or checks.is_array(y) for y in leaves)
