"""What a step is called with: parameters in a tree, and keywords that `tx` reads."""

import inspect
from collections.abc import Callable, Mapping, Sequence
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
# What JAX raises where Python looks at the number that a traced array stands for.
_ASKS_PYTHON = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_call(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[..., Any],
    params: PyTree,
    state: PyTree,
    args: Sequence[Any],
    keywords: Mapping[str, PyTree],
) -> None:
    """A tree of parameters, and no keyword that nobody reads."""
    structure: Structure = jax.tree.structure(params)
    if jax.tree_util.treedef_is_leaf(structure):
        came, remedy = checks.describe(params), "put it in one, as in `{'layers': params}`"
        raise ValueError(f"{_NAME}: `params`: {came}, expected a tree of arrays: {remedy}.")
    keywords = {name: x for name, x in keywords.items() if name != "loss"}  # which the step gives
    for name in sorted(keywords.keys() & _argument_names(loss, 1 + len(args))):
        expected = "expected by position, since keywords are for `tx.update`"
        raise TypeError(f"{_NAME}: `{name}`: an argument of `loss`, {expected}.")
    for name, x in sorted(keywords.items()):
        if not _is_traceable(x) and name not in {*KEYWORDS, *_OF_OPTAX}:
            expected = "expected numbers or arrays, since a program shows whether `tx` reads it"
            raise TypeError(f"{_NAME}: `{name}`: {checks.describe(x)}, {expected}.")
    shown = sorted(name for name, x in keywords.items() if _is_traceable(x))
    for name in _unread(shown, tx, params, state, keywords):
        expected = "expected one that it reads; arguments of `loss` are given by position"
        raise TypeError(f"{_NAME}: `{name}`: a keyword that `tx` does not read, {expected}.")


def _argument_names(function: Callable[..., Any], given: int) -> set[str]:
    """Names of a function's arguments behind those given already, as far as Python knows them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return set()
    by_position = [x for x in parameters if x.kind is not x.KEYWORD_ONLY]
    named = [x for x in parameters if x not in by_position[:given]]
    return {x.name for x in named if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}


@jax.disable_jit(False)
def _unread(
    names: Sequence[str],
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    keywords: Mapping[str, PyTree],
) -> list[str]:
    """Those that an update does not read: a transformation hands on what it does not know."""
    given = {name: keywords[name] for name in names}

    def update(given: dict[str, PyTree]) -> PyTree:
        grads = jax.tree.map(
            lambda w: numerics.zeros_like(w) if checks.is_inexact(w) else None, params
        )
        extra = {"loss": jnp.zeros(()), **keywords, **given}
        return tx.update(grads, state, params, **extra)

    if not given:
        return []
    try:
        jaxpr = jax.make_jaxpr(update)(given).jaxpr
    except _ASKS_PYTHON:  # as `if is_last:` of a bool, which is read; of several it may be any
        alone = [[name] for name in names] if len(names) > 1 else []
        return [x for name in alone for x in _unread(name, tx, params, state, keywords)]
    are_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    read: Any = jax.tree.structure(given)
    return [name for name, xs in read.unflatten(are_read).items() if not any(jax.tree.leaves(xs))]


def _is_traceable(x: PyTree) -> bool:
    """Numbers and arrays, and not None, which stands for what a factory was given."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(
        checks.is_number(y) or checks.is_array(y) or isinstance(y, bool) for y in leaves
    )
