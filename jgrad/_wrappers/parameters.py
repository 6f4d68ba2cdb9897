"""Parameters in float32, and after updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs.around import in_float32, offer
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree


def applied(params: PyTree, updates: PyTree) -> PyTree:
    """The parameters after the updates, as `optax.apply_updates` has them; None changes nothing."""

    def add(p: Any, u: Any) -> Any:
        if p is None:
            return None
        if u is None or getattr(u, "dtype", None) == jax.dtypes.float0:
            return jnp.asarray(p)
        return (wide(p) + wide(u)).astype(jnp.result_type(p))

    return jax.tree.map(add, params, updates, is_leaf=trees.is_none)


def wide_gradients(grads: PyTree, params: PyTree, is_wide: Callable[[Any], bool]) -> PyTree:
    """Gradients in float32 beside parameters that are optimized in float32."""

    def wide_one(g: Any, p: Any) -> Any:
        if g is None or not is_wide(p):
            return g
        new = jnp.asarray(g, jnp.float32)
        offer(new, in_float32, g)
        return new

    return jax.tree.map(wide_one, grads, params, is_leaf=trees.is_none)


def wide(x: Any) -> jax.Array:
    """An inexact array in float32 or wider, any other as it is."""
    x = jnp.asarray(x)
    return numerics.widen(x, numerics.real_dtype(x)) if checks.is_inexact(x) else x
