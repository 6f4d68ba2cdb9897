"""Copies and averages of parameters in the state of a wrapper."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._inputs.inputs import Inputs
from jgrad._trees import checks, trees
from jgrad._trees.protocols import Leaf, PyTree


def begin(params: PyTree, where: Callable[[jax.Array], bool] = lambda p: True) -> PyTree:
    """Copies in float32 or wider, which share no buffer with parameters: both can be donated.

    None where `where` is False.
    """
    return trees.map_leaves(
        lambda p: numerics.strong(jnp.array(numerics.wide(p), copy=True)) if where(p) else None,
        params,
    )


def in_state(inputs: Inputs, name: str, tree: PyTree) -> list[Leaf]:
    """The leaves of such a part of the state.

    None where nothing is updated and `init` saw no parameter, as in a part of a model.
    """
    arg = inputs.like_reference(name, tree).with_arrays()
    for i, (x, p) in enumerate(zip(arg.leaves, inputs.reference.leaves, strict=True)):
        if checks.is_inexact(p) and (x is not None or inputs.is_updated[i]):
            inputs.check_kind(arg, i, x, p, is_of_some=False, real=False)
    checks.same_shapes(arg, inputs.reference)
    return list(arg.leaves)
