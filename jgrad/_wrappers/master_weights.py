"""Float32 copies of half-precision parameters, kept in the state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgrad._inputs.inputs import Inputs
from jgrad._inputs.transformation import pair
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree
from jgrad._wrappers import inside, parameters
from jgrad._wrappers.hand_over import WrapperInputs

_NAME = "master_weights"


class MasterState(NamedTuple):
    """State of `master_weights`. The field names are a file format: checkpoints hold them.

    Attributes:
      master: a float32 copy of each half-precision parameter, None for each other one.
      inner: state of the transformation inside.

    Example:
      >>> params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
      >>> state = jgrad.master_weights(jgrad.adam(1e-3)).init(params)
      >>> state.master["w"].dtype.name, state.master["b"]
      ('float32', None)
      >>> int(state.inner.step)
      0
    """

    master: PyTree
    inner: PyTree

    @property
    def __jgrad_unrounded__(self) -> bool:
        """Says that `accumulate` is to hand on means in float32."""
        return True


MasterState.__module__ = "jgrad"  # where users import it from, and what a pickle names


@explained
def master_weights(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Optimizes float32 copies of half-precision parameters, and rounds them to the parameters.

        master' = master + tx(float32 g, master)
        updates = round(master') - w

    Just below 1, bfloat16 numbers are 2^-8 apart, so a smaller step than half of that rounds away.
    The copies keep such steps. `w + updates` is `master'` rounded to the dtype of w; in a step that
    changes a weight by more than a factor of two it may be one unit in the last place off, and the
    next step corrects it. Parameters of other dtypes are optimized as they are. Memory, per
    half-precision parameter: 4 bytes, and the state of `tx` as for a float32 parameter.

    Args:
      tx: any transformation. It sees float32 gradients and parameters for half-precision ones.

    Returns:
      A transformation with state `MasterState(master, inner)`. Its update needs the parameters.

    Raises:
      TypeError: `tx` is not a transformation.

    Example:
      >>> params = grads = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
      >>> tx = jgrad.master_weights(jgrad.gradient_descent(1e-4))
      >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> bool((state.master["w"] < 1).all()), bool((updates["w"] == 0).all())
      (True, True)

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
    """
    tx = inside.transformation(_NAME, tx)

    def init(params: PyTree) -> MasterState:
        checks.parameters(ArgLeaves.from_tree(_NAME, "params", params).with_arrays())
        master = trees.map_leaves(lambda p: parameters.wide(p) if _is_half(p) else None, params)
        return MasterState(master, tx.init(_optimized(master, params)))

    def update(
        updates: PyTree,
        state: MasterState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, MasterState]:
        inside.check_state(_NAME, state, MasterState)
        inputs = WrapperInputs(_NAME, updates, params, extra_args)
        inputs.require_params("the master copy")
        copies = inputs.like_reference("state.master", state.master)
        _check_copies(copies, inputs)
        master = _optimized(state.master, params)
        wide = jax.tree.map(
            lambda g, p: jnp.asarray(g, jnp.float32) if g is not None and _is_half(p) else g,
            updates,
            params,
            is_leaf=trees.is_none,
        )
        steps, inner = inputs.hand_over(tx, wide, state.inner, master, stay_finite=True)
        new = trees.flatten(parameters.applied(master, steps))[0]
        pairs = zip(new, inputs.reference.leaves, strict=True)
        new = [x if _is_half(p) else None for x, p in pairs]
        new = inputs.kept(new, copies.leaves)

        def follow(new: Any, step: Any, p: Any) -> Any:
            if new is None:
                return step
            # From -60000 to 60000 is more than the largest float16: the next step does the rest.
            rounded = parameters.wide(new.astype(p.dtype))
            far, largest = rounded - parameters.wide(p), float(jnp.finfo(p.dtype).max)
            near = jnp.clip(far, -largest, largest)
            # Where the copy overflows float16 the update is infinite: `skip_nonfinite` sees it.
            return jnp.where(jnp.isinf(rounded), far, near)

        rows = zip(new, trees.flatten(steps)[0], inputs.reference.leaves, strict=True)
        return (
            inputs.directions([follow(*row) for row in rows]),
            MasterState(inputs.moments(new, copies.leaves), inner),
        )

    return pair(init, update, _NAME)


def _check_copies(copies: ArgLeaves, inputs: Inputs) -> None:
    """A copy of each half-precision parameter that is updated, and of no float32 one."""
    half = [p if _is_half(p) else None for p in inputs.reference.leaves]
    for i, (copy, p) in enumerate(zip(copies.leaves, half, strict=True)):
        is_there = not checks.is_nothing(copy, getattr(p, "shape", None))
        if p is None and is_there:
            expected = "None beside a parameter that needs no copy"
        elif not (p is None or is_there or inputs.g[i] is None):
            expected = f"a float32 copy of a parameter of {p.dtype}"
        else:
            continue
        remedy = "call `init` with parameters of the dtypes that `update` gets"
        copies.fail(i, ValueError, f"{checks.describe(copy)}, expected {expected}; {remedy}")
    checks.same_shapes(copies, inputs.reference._replace(leaves=half))


def _is_half(p: Any) -> bool:
    dtype = jnp.result_type(float if p is None else p)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _optimized(master: PyTree, params: PyTree) -> PyTree:
    """What the transformation inside sees: the copy where there is one, else the parameter."""
    return jax.tree.map(lambda m, p: m if _is_half(p) else p, master, params, is_leaf=trees.is_none)
