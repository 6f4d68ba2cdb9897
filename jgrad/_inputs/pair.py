"""`init` and `update` for trees as users have them: whole models, and variables in place of arrays.

Methods and wrappers never see a model, only a tree of arrays: behind `pair`, each leaf of the
parameters that is not `None` is an array, or a number with a gradient, or an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgrad._trees import checks, forms, trees
from jgrad._trees.annotations import State
from jgrad._trees.explained import Transformation, keywords_of, known_names
from jgrad._trees.protocols import PyTree
from jgrad._trees.told import told

_ON_DEVICE = "it moved by `jax.device_put(x, jax.memory.Space.Device)`"
_IN_STEP = "`step_in_backward`, which fetches a layer at a time"


def pair(
    init: Callable[[PyTree], State],
    update: Callable[..., tuple[PyTree, State]],
    name: str,
    kind: Any = None,
    *,
    handed_on: Sequence[str] = (),
    checks_options: bool = False,
    offloads: bool = False,
) -> Transformation[State]:
    """The transformation of that name, of functions that see arrays alone.

    Args:
      init: of the parameters.
      update: of one call.
      name: for messages; a `scale_by_*` makes directions, and no steps.
      kind: of the state, which has to be one that `init` made; None where it may be any.
      handed_on: which extra arguments `update` reads itself, too.
      checks_options: whether `update` itself knows which of the options a call may change.
      offloads: whether its state may lie in host memory, and parameters for `init`.
    """
    taken = keywords_of(update, handed_on)

    def init_of_model(params: PyTree) -> PyTree:
        if not offloads:
            checks.on_device(name, "params", params, f"`offload` around it, or {_ON_DEVICE}")
        state = init(arrays_of(params))
        boxes = forms.boxes_of(trees.flatten(state)[0])
        state = state if boxes is None else boxes.blocks_of_variables(state)
        directions = told().directions
        if directions is not None and name.startswith("scale_by_"):
            directions.append((name, state))
        return state

    def update_of_model(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        if extra_args:
            known_names().check_keywords(name, extra_args, taken, checks_options=checks_options)
        checks.on_device(name, "updates", updates, f"{_IN_STEP}, or {_ON_DEVICE}")
        checks.on_device(name, "params", params, f"{_IN_STEP}, or {_ON_DEVICE}")
        if not offloads:
            around = "`offload` around all of it"
            checks.on_device(name, "state", state, f"{around}, or {_ON_DEVICE}")
        updates, before = checks.values_of(updates), checks.values_of(state)
        params, boxes = arrays_of(params, updates), forms.boxes_of(trees.flatten(before)[0])
        state = before if boxes is None else boxes.variables_of_blocks(before)
        if kind is not None:
            check_state(name, state, kind)
        share = told().share
        if share is None:
            steps, new = update(updates, state, params, **extra_args)
        else:
            share.check(name)
            with share.within(is_own=True):
                steps, new = update(updates, state, params, **extra_args)
        if state is before:
            return steps, new
        structure: Any = jax.tree.structure(state)
        if structure == jax.tree.structure(new):
            return steps, jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(new))
        return steps, boxes.blocks_of_variables(new)  # as where a sum begins

    return Transformation(init_of_model, update_of_model)


def check_state(function: str, state: PyTree, kind: Any) -> None:
    """A state is one that `init` made; its counters are integers, where it says which are some."""
    if not isinstance(state, kind):
        came, expected = type(state).__name__, checks.made_by_init(function, kind)
        is_full = isinstance(state, tuple) and state != ()
        is_foreign = is_full and not hasattr(state, "__jgrad_fields__")
        remedy = " `carry_over` converts the states of optax." if is_foreign else ""
        raise TypeError(f"{function}: `state`: {came}, {expected}{remedy}")
    fields = getattr(state, "__jgrad_fields__", None)
    for name, role in fields.roles.items() if fields is not None else ():
        if role in ("step", "count"):
            checks.state_counter(function, f"state.{name}", getattr(state, name))


def arrays_of(params: PyTree, updates: PyTree = None) -> PyTree:
    """`None` for leaves of a model that are no arrays and have no gradient: functions, strings.

    A number of Python stays, since `jax.grad` differentiates it, unless its gradient is None.
    """
    params = checks.values_of(params)
    leaves, structure = trees.flatten(params)
    if structure.num_nodes == 1 or all(map(checks.is_inexact, leaves)):
        return params  # the same object, in most calls: `None`, one parameter, or arrays alone
    gradients, gradients_form = trees.flatten(updates)
    known = gradients_form == structure
    if not known:
        gradients = [None] * len(leaves)

    def is_left_out(p: Any, g: Any) -> bool:
        return g is None and (checks.is_no_parameter(p) or (known and checks.is_number(p)))

    left_out = list(map(is_left_out, leaves, gradients))
    if not any(left_out):
        return params
    return structure.unflatten([None if x else p for p, x in zip(leaves, left_out, strict=True)])


def counter(params: PyTree, value: int = 0) -> jax.Array:
    """A scalar that counts, replicated over the mesh of the parameters; on none if they have two.

    Of several meshes `jit` takes that of its first argument on one.
    """
    x, meshes = jnp.asarray(value, jnp.int32), list[Mesh]()
    for p in jax.tree.leaves(params):
        sharding = None if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if meshes and sharding.mesh != meshes[0]:
                return x
            meshes = [sharding.mesh]
    return jax.device_put(x, NamedSharding(meshes[0], PartitionSpec())) if meshes else x
