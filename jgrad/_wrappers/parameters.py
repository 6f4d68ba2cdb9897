"""Parameters in float32, and after updates."""

from typing import Any

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
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


def wide(x: Any) -> jax.Array:
    """An inexact array in float32 or wider, any other as it is."""
    x = jnp.asarray(x)
    return numerics.widen(x, numerics.real_dtype(x)) if checks.is_inexact(x) else x
