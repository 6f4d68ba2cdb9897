"""Float32 copies of half-precision parameters, kept in the state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._inputs.state import empty
from jgrad._inputs.update import Leaves
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inner as wrapping

_NAME = "master_weights"


class MasterState(NamedTuple):
    """State of `master_weights`. The field names are a file format: checkpoints hold them.

    Attributes:
      master: a float32 copy of each half-precision parameter, an empty array for each other one.
      inner: state of the transformation inside.
    """

    master: PyTree
    inner: PyTree


def master_weights(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Optimizes float32 copies of half-precision parameters, which follow them.

        master' = master + tx(float32 g, master)
        updates = round(master') - w

    A bfloat16 number of 1 has 2^-8 to the one below: steps under half of that are lost. The copies
    lose none, and `w + updates` is `master'` rounded to the dtype of w; where a weight does not
    stay within a factor of two of itself, to within a unit in the last place, once. Parameters of
    other dtypes are optimized as they are. Memory, per half-precision parameter: 4 bytes, and the
    state of `tx` as for a float32 parameter.

    Args:
      tx: any transformation. It sees float32 gradients and parameters for half-precision ones.

    Returns:
      A transformation with state `MasterState(master, inner)`. Its update needs the parameters.

    Raises:
      TypeError: `tx` is no transformation.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    """
    tx = wrapping.inner(_NAME, tx)

    def init(params: PyTree) -> MasterState:
        checks.parameters(checks.Row.of(_NAME, "params", params).with_arrays())
        master = trees.map_leaves(lambda p: wrapping.wide(p) if _is_half(p) else empty(p), params)
        return MasterState(master, tx.init(_whole(master, params)))

    def update(
        updates: PyTree, state: MasterState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, MasterState]:
        wrapping.check_state(_NAME, state, MasterState)
        leaves = Leaves(_NAME, updates, params)
        leaves.require_params("the master copy")
        copies = leaves.row("state.master", state.master)
        none = jax.ShapeDtypeStruct((0,), jnp.float32)
        expected = [p if p is None or _is_half(p) else none for p in leaves.reference.leaves]
        checks.same_shapes(copies, leaves.reference._replace(leaves=expected))
        master = _whole(state.master, params)
        wide = jax.tree.map(
            lambda g, p: jnp.asarray(g, jnp.float32) if g is not None and _is_half(p) else g,
            updates,
            params,
            is_leaf=trees.is_none,
        )
        steps, inner = tx.update(wide, state.inner, master, **extra_args)
        new = wrapping.applied(master, steps)

        def follow(new: Any, step: Any, p: Any) -> Any:
            if not _is_half(p):
                return step
            # From -60000 to 60000 is further than float16 reaches: the next step does the rest.
            rounded = wrapping.wide(new.astype(p.dtype))
            far, largest = rounded - wrapping.wide(p), float(jnp.finfo(p.dtype).max)
            near = jnp.clip(far, -largest, largest)
            # Beyond float16 itself, the update is infinite, for `skip_nonfinite` to see.
            return jnp.where(jnp.isinf(rounded), far, near).astype(p.dtype)

        def keep(new: Any, old: Any, p: Any) -> Any:
            return new if _is_half(p) else old

        return (
            jax.tree.map(follow, new, steps, params, is_leaf=trees.is_none),
            MasterState(
                jax.tree.map(keep, new, state.master, params, is_leaf=trees.is_none), inner
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_half(p: Any) -> bool:
    dtype = jnp.result_type(float if p is None else p)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _whole(master: PyTree, params: PyTree) -> PyTree:
    """The parameters, with the copy where there is one."""
    return jax.tree.map(lambda m, p: m if _is_half(p) else p, master, params, is_leaf=trees.is_none)
