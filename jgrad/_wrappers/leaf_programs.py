"""How a TPU updates each 8-bit leaf, and why."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax

from jgrad._arithmetic.elementwise import programs
from jgrad._kernels import leaf_step
from jgrad._quantized.blocks import SIZE, Blocks
from jgrad._quantized.geometry import in_rows
from jgrad._trees import forms, variables
from jgrad._trees.annotations import MeshAxes
from jgrad._trees.explained import AnyTransformation
from jgrad._trees.protocols import PyTree
from jgrad._trees.unpromised import Unpromised
from jgrad._wrappers import inside
from jgrad._wrappers.apply_gradients import apply_gradients

core = Unpromised("`leaf_programs`")

_NAME = "leaf_programs"
_KERNEL = "one kernel"
_SAME_VALUE = ("copy", "copy_p", "device_put", "optimization_barrier", "sharding_constraint")


def leaf_programs(
    tx: AnyTransformation, params: PyTree, *, mesh_axes: MeshAxes = None, **extra_args: Any
) -> dict[str, str]:
    """Tells whether a TPU updates each 8-bit array with one kernel, and if not, why.

        answer = "one kernel", or "XLA: " and the reason

    With one kernel per leaf, each array is read and written once; only transformations of other
    libraries run outside of it. Without it, XLA also writes the moments to memory in float32.

    Call it in the same context as your step: under the same `jax.set_mesh`, or inside `shard_map`.

    Args:
      tx: any transformation.
      params: arrays or `jax.ShapeDtypeStruct`s, with the shardings that they will have in training.
      mesh_axes: as for `apply_gradients`.
      extra_args: as for `apply_gradients`.

    Returns:
      A dict from paths in the state to answers; it is empty for a state without 8-bit arrays.

    Raises:
      TypeError: `tx` is not a transformation.

    Example:
      >>> params = {"w": jnp.ones((64, 256)), "v": jnp.ones((64, 100))}
      >>> tx = jgrad.adam(1e-3, moment_dtype="8bit")
      >>> for path, answer in jgrad.leaf_programs(tx, params).items():
      ...     print(path, answer)
      .mw['v'] XLA: its last axis, 100, is not a multiple of 256
      .mw['w'] one kernel
      .vw['v'] XLA: its last axis, 100, is not a multiple of 256
      .vw['w'] one kernel
    """
    tx = inside.transformation(_NAME, tx, may_be_offloaded=True)
    state = forms.to_codes(variables.variables_of_blocks(jax.eval_shape(tx.init, params)))
    step = functools.partial(apply_gradients, tx, mesh_axes=mesh_axes, **extra_args)
    traced = jax.make_jaxpr(step)(params, state, params)
    is_local = not any(map(_is_sharded, jax.tree.leaves(params)))
    flat = jax.tree.leaves((params, state, params))
    operands = {x: id(leaf) for x, leaf in zip(traced.jaxpr.invars, flat, strict=True)}
    answers = dict(_answers(traced.jaxpr, operands, is_local))
    answer_at = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_blocks):
        if not _is_blocks(x):
            continue
        if in_rows(x):
            answer = answers.get(id(x.codes), "XLA: it is not updated element by element")
        elif len(x.shape) < 2:
            answer = "XLA: it has no rows"
        elif x.shape[-1] % SIZE:
            answer = f"XLA: its last axis, {x.shape[-1]}, is not a multiple of {SIZE}"
        else:
            answer = "XLA: it is stored in other blocks than along its last axis"
        answer_at[jax.tree_util.keystr(path)] = answer
    return answer_at


def _answers(jaxpr: Any, known: dict[Any, int], is_local: bool) -> Iterator[tuple[int, str]]:
    """The answer for each known value whose codes the step of a leaf reads."""
    known = dict(known)
    for equation in jaxpr.eqns:
        operands = [None if isinstance(x, core.Literal) else known.get(x) for x in equation.invars]
        if (step := equation.params.get("step")) is not None:
            place = leaf_step.place_of(
                step, [x.aval for x in equation.invars], "kernel", is_local=is_local
            )
            answer = f"XLA: {place}" if isinstance(place, str) else _KERNEL
            yield from ((x, answer) for i in step.codes if (x := operands[i]) is not None)
        if equation.primitive.name in _SAME_VALUE:
            values = zip(equation.outvars, operands, strict=True)
            known |= {x: value for x, value in values if value is not None}
        for inner in programs(equation):
            behind = operands[len(operands) - len(inner.invars) :]  # behind the index of a branch
            values = zip(inner.invars, behind, strict=True)
            inside = {x: value for x, value in values if value is not None}
            yield from _answers(inner, inside, is_local)


def _is_blocks(x: Any) -> bool:
    return isinstance(x, Blocks)


def _is_sharded(x: Any) -> bool:
    """Whether several devices share an array; what `shard_map` shows is a part already."""
    if isinstance(x, jax.core.Tracer):
        return False
    sharding = getattr(x, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1
