"""The one state type of the optimizers, and its first value."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad import checks, numerics, trees
from jgrad.trees import PyTree


class OptState(NamedTuple):
    """State of every optimizer here; what a method does not use is `None`.

    The field names are a file format: checkpoints hold them.

    Attributes:
      step: number of updates done, an int32 scalar; it saturates.
      mw: first moment, or momentum; a tree like the parameters.
      vw: second moment, real; a tree like the parameters.
    """

    step: jax.Array
    mw: PyTree
    vw: PyTree


def first_state(
    function: str, params: PyTree, moment_dtype: DTypeLike | None, *, mw: bool, vw: bool
) -> OptState:
    """The state before the first update; `mw` and `vw` have buffers of their own, for donation."""

    def zeros(p: jax.Array, *, real: bool) -> jax.Array:
        if not jnp.issubdtype(p.dtype, jnp.inexact):
            return jnp.zeros((0,), jnp.float32)  # no moments, but a place in the tree
        dtype = numerics.real_dtype(p) if moment_dtype is None else np.dtype(moment_dtype)
        if jnp.iscomplexobj(p) and not real:
            dtype = numerics.complex_dtype(dtype)
        return jnp.zeros_like(p, dtype=dtype)

    structure = trees.flatten(params)[1]
    leaves = checks.parameters(checks.Row.of(function, "params", params).with_arrays())

    def moments(*, real: bool) -> PyTree:
        return structure.unflatten([p if p is None else zeros(p, real=real) for p in leaves])

    return OptState(
        jnp.zeros((), jnp.int32),
        moments(real=False) if mw else None,
        moments(real=True) if vw else None,
    )
