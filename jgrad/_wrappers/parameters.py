"""The parameters that a wrapper gets: checked, in float32, copied, and after updates."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs.around import Then, in_float32, made_of
from jgrad._inputs.inputs import Inputs
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree


def checked(function: str, params: PyTree) -> PyTree:
    """The parameters of an `init`, with arrays for numbers."""
    arg = ArgLeaves.from_tree(function, "params", params).with_arrays()
    return trees.flatten(params)[1].unflatten(checks.parameters(arg))


def applied(params: PyTree, updates: PyTree, then: Then | None = None) -> PyTree:
    """The parameters after the updates, as `optax.apply_updates` has them; None changes nothing.

    Where a kernel has made float32 ones, it is these: it has written them over the old ones.
    """

    def add(p: jax.Array | None, u: jax.Array | None) -> jax.Array | None:
        if p is None:
            return None
        if u is None or getattr(u, "dtype", None) == jax.dtypes.float0:
            return jnp.asarray(p)
        new = None if then is None else then.new_weight(u)
        if new is not None and new.dtype == jnp.float32:
            return new
        return (numerics.wide(p) + numerics.wide(u)).astype(jnp.result_type(p))

    return jax.tree.map(add, params, updates, is_leaf=trees.is_none)


def wide_gradients(inputs: Inputs, is_wide: Callable[[Leaf], bool]) -> PyTree:
    """Gradients in float32 beside parameters that are optimized in float32."""
    updated = inputs.updated()
    wide = [
        made_of(jnp.asarray(g, jnp.float32), in_float32, g) if is_wide(p) else g
        for g, p in zip(updated.g, updated.reference.leaves, strict=True)
    ]
    return updated.gradients(wide)


# ---- copies in a state -------------------------------------------------------------------------


def copied(params: PyTree, where: Callable[[Leaf], bool] = lambda p: True) -> PyTree:
    """Copies in float32 or wider, which share no buffer with parameters: both can be donated.

    None where `where` is False.
    """
    return trees.map_leaves(
        lambda p: numerics.strong(jnp.array(numerics.wide(p), copy=True)) if where(p) else None,
        params,
    )


def copies_in_state(inputs: Inputs, name: str, tree: PyTree) -> list[Leaf]:
    """The leaves of such a part of the state.

    None where nothing is updated and `init` saw no parameter, as in a part of a model.
    """
    arg = inputs.like_reference(name, tree).with_arrays()
    for i, (x, p) in enumerate(zip(arg.leaves, inputs.reference.leaves, strict=True)):
        if checks.is_inexact(p) and (x is not None or inputs.is_updated[i]):
            inputs.check_kind(arg, i, x, p, is_of_some=False, real=False)
    checks.same_shapes(arg, inputs.reference)
    return list(arg.leaves)
