"""One of two results, by a branch or element by element, in dtypes that stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._trees import checks
from jgrad._trees.trees import PyTree


def branch(use: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]) -> PyTree:
    """`jax.lax.cond`; Python's `if` in an eager call, where a `cond` is compiled at each call."""
    if isinstance(use, jax.core.Tracer):
        return jax.lax.cond(use, then, otherwise)
    return then() if use else otherwise()


def choose(use_new: Any, new: PyTree, old: PyTree, *, settled: bool) -> PyTree:
    """`new` or `old`, in the dtypes of `old`; for all but inexact arrays if these are settled."""

    def choice(n: Any, o: Any) -> Any:
        if n is o or use_new is True or (settled and checks.is_inexact(n)):
            return n
        return jnp.where(use_new, in_dtypes(n, o), o)

    return in_dtypes(jax.tree.map(choice, new, old), old)


def in_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, which some transformations let drift."""
    return jax.tree.map(lambda n, o: n.astype(o.dtype) if checks.is_numeric(o) else n, new, old)
