"""Decisions of an update: whether arrays are finite on all devices, and which result to take.

Inside `shard_map`, the chosen arrays vary along the mesh axes along which the decision varies.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import Call, jit_static_kwargs
from jgrad._inputs.around import Commit
from jgrad._inputs.inputs import Inputs, Parameters
from jgrad._layers.layer_axes import all_names, in_shard_map
from jgrad._trees import checks, shardings, trees
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.told import EVERY, over_shares, telling, told
from jgrad._trees.trees import Structure

T = TypeVar("T")

# One bool: Python's, or an array, which may be traced.
Flag = bool | jax.Array

# Leaves per stack of flags. In eager mode, a program with this many arguments compiles once, in 0.4
# s; one with 5,000 takes 18 s.
_TOGETHER = 256

# ---- whether arrays are finite -----------------------------------------------------------------


def all_finite(tree: PyTree, mesh_axes: tuple[str, ...] = ()) -> jax.Array:
    """Whether each element of the inexact leaves is finite, on all devices of the mesh axes."""
    leaves = filter(checks.is_inexact, jax.tree.leaves(tree))
    return _all([(_is_finite, (x,)) for x in leaves], mesh_axes)


def stays_finite(pairs: Iterable[tuple[Leaf, Leaf]], mesh_axes: tuple[str, ...]) -> jax.Array:
    """Whether no new array became non-finite: some states hold an infinity from the start.

    Args:
      pairs: new and old arrays.
      mesh_axes: as for `all_finite`.
    """
    calls = [(_stays_finite, (n, jnp.asarray(o))) for n, o in pairs if checks.is_inexact(n)]
    return _all(calls, mesh_axes)


def _all(calls: Sequence[Call], mesh_axes: tuple[str, ...]) -> jax.Array:
    """Whether all calls, of which each is 0 or NaN, are 0."""
    faults = leafwise.run(calls)
    while len(faults) > _TOGETHER:
        faults = [_worst(faults[i : i + _TOGETHER]) for i in range(0, len(faults), _TOGETHER)]
    flag = agreed(_worst(faults) == 0 if faults else jnp.asarray(True), mesh_axes)
    everywhere: jax.Array = over_shares("skip_nonfinite", EVERY, flag)
    return everywhere


@jit_static_kwargs
def computed_once(flag: jax.Array) -> jax.Array:
    """Returns a flag unchanged. XLA doesn't fuse sorts, so kernels do not recompute the flag."""
    return jnp.sort(jnp.stack([flag, jnp.ones_like(flag)]))[0]


@jit_static_kwargs
def _worst(faults: list[jax.Array]) -> jax.Array:
    # By a sort, which puts NaN last. XLA would fuse a chain of `and`s over all leaves into each
    # kernel that reads the result, for every leaf: compile time would be quadratic in the leaves.
    # A sort is not fused, and unlike a loop or a branch it does not make an accelerator wait.
    return jnp.sort(jnp.stack(faults))[-1]


@jit_static_kwargs
def _is_finite(x: jax.Array) -> jax.Array:
    """0, or NaN."""
    # x - x is 0, or NaN. For `jnp.all(jnp.isfinite(x))` XLA's CPU backend writes an array of bools,
    # its maximum of many numbers does not see a NaN among them, and for 0 x it writes an array of
    # zeros that all leaves of a shape then read.
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    if jnp.finfo(x.dtype).bits < 32:
        # Otherwise, XLA writes x in float32 to memory, which both this sum and the update read.
        parts = jax.lax.optimization_barrier(parts)
    return jnp.sum(jnp.stack([jnp.sum(x - x).astype(jnp.float32) for x in parts]))


@jit_static_kwargs
def _stays_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    """0, or NaN."""
    fine = jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
    return jnp.where(fine, 0.0, jnp.nan).astype(jnp.float32)


# ---- what all devices agree upon ---------------------------------------------------------------


def mesh_axes_of(inputs: Inputs, mesh_axes: PyTree) -> tuple[str, ...]:
    """All mesh axes over which some leaf is sharded."""
    names, leaves = _axes_of_shards(inputs), trees.flatten(inputs.shapes)[0]
    for x in in_shard_map(inputs.placements(mesh_axes), leaves).leaves:
        names.update(x.names)
    return tuple(sorted(names))


def _axes_of_shards(inputs: Parameters) -> set[str]:
    """The mesh axes over which `zero` has sharded the rows of buffers."""
    return {axis for spec in inputs.specs if spec.shard is not None for axis in spec.shard.axes}


def agreed(flag: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Whether the flag is True on all devices along the mesh axes, so that they act alike."""
    if not (mesh_axes and checks.is_array(flag)):
        return flag
    return jax.lax.pmin(flag.astype(jnp.int32), mesh_axes) == 1


def axes_of_models(function: str, params: PyTree, mesh_axes: PyTree = None) -> tuple[str, ...]:
    """The mesh axes along which each device has a model of its own, as far as types say it.

    All parameters vary along them, and none is said to be sharded over them.
    """
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    varying = [set(shardings.varying_axes(x)) for x in arrays if checks.is_inexact(x)]
    if not any(varying):
        return ()
    named = all_names(function, mesh_axes) | _axes_of_shards(Parameters(function, params))
    return tuple(sorted(set.intersection(*varying) - named))


def of_models(function: str, params: PyTree, value: float) -> jax.Array:
    """A scalar in place of a missing argument of `update`; it may differ between models."""
    x: jax.Array = shardings.varying_over(
        jnp.full((), value, jnp.float32), axes_of_models(function, params)
    )
    return x


def as_updated(
    function: str,
    state: T,
    update: Callable[..., tuple[PyTree, T]],
    params: PyTree,
    mesh_axes: PyTree = None,
) -> T:
    """The state before the first update, in the types that updates return, as `lax.scan` needs.

    Inside `shard_map`, where devices decide each for itself, all varies along the axes of the mesh
    along which the decision does: counters, too, of all that is inside. What decides may be inside,
    and what devices agree upon is the same on all of them. So updates are traced, where parameters
    vary, until one changes no type: one counter may decide about another. If that needs arguments
    of its own, all varies along the `axes_of_models`.
    """
    if not shardings.varying_axes(*filter(checks.is_inexact, jax.tree.leaves(params))):
        return state

    def dry(params: PyTree, state: T) -> T:
        with telling(is_dry=True):
            return update(params, state, params)[1]

    def vary(x: jax.Array, new: jax.ShapeDtypeStruct) -> PyTree:
        return shardings.varying_over(x, shardings.varying_axes(new))

    new = tried(function, lambda: jax.eval_shape(dry, params, state))
    structure: Structure = jax.tree.structure(state)
    if new is None or structure != jax.tree.structure(new):
        return shardings.varying_over(state, axes_of_models(function, params, mesh_axes))
    typed: T = jax.tree.map(vary, state, new)
    if all(map(operator.is_, *map(jax.tree.leaves, (typed, state)))):
        return typed
    return as_updated(function, typed, update, params, mesh_axes)


# What Python says of a missing argument, JAX of a mesh axis that is not here, and jgrad of both.
_LATER = re.compile(r"missing \d+ required .*|`\w+`: missing|unbound axis name.*|no axis '.*' here")


def tried(
    function: str, update: Callable[[], T], warn: Callable[[str], None] | None = None
) -> T | None:
    """What an update returns when `init` tries it; None if it needs what only a call has.

    That is an argument, such as `value=`, or a mesh axis. All else is an error, as in the call.

    Args:
      function: of the `init`, for messages.
      update: without arguments of its own.
      warn: told what is missing, where something is lost without it.
    """
    try:
        return update()
    except Exception as error:
        may_be = isinstance(error, (TypeError, NameError, ValueError))
        is_later = _LATER.search(str(error)) if may_be else None
        if not is_later:
            begin = f"{function}: `init` tried an update, of the parameters in place of gradients"
            remedy = f"put `{function}` inside of what needs other arguments"
            error.add_note(f"{begin}, and this was raised; {remedy}.")
            raise
        if warn is not None:
            came = f"an update inside needs what `init` does not have ({is_later[0]})"
            lost = "what is inside adds no numbers to the report"
            warn(f"{function}: {came}, so {lost}: put `{function}` inside of it, or name the axes.")
        return None


# ---- one of two results ------------------------------------------------------------------------


def branch(use: Flag, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """`jax.lax.cond`, or in eager mode Python's `if`, because a `cond` would compile in each call.

    `otherwise` may return what is there already: of donated arrays nothing is copied.
    """
    if isinstance(use, jax.core.Tracer):
        names = shardings.varying_axes(use)
        branches = [
            lambda: shardings.varying_over(otherwise(), names),
            lambda: shardings.varying_over(then(), names),
        ]
        # XLA copies what a branch returns unchanged, unless it is the first branch. On GPUs, it
        # swaps the branches of a bool, but not those of a number.
        results = jax.lax.switch(use.astype(jnp.int32), branches)
        # On TPUs, it moves part of what follows into the branches, and writes that to memory, too.
        return shardings.barrier(results)
    return then() if use else otherwise()


def noted_branch(use: Flag, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """`branch`, of a `then` that calls what is inside, without a decision.

    What it notes is noted, and else the old numbers.
    """
    here = told()
    old = here.notes or {}

    # A branch only returns arrays, and is traced once: here it leaves everything else that it
    # knows, but no arrays, which would belong to that trace.
    def run() -> tuple[T, dict[str, jax.Array]]:
        new = dict(old)
        notes = None if here.notes is None else new
        with telling(commit=None, windows=None, finite=None, notes=notes, is_dry=here.is_dry):
            arrays = then()
        return arrays, new if here.is_dry else {name: new[name] for name in old}

    if here.is_dry and here.notes is not None:  # which numbers there are is not known before
        arrays, new = shardings.varying_over(run(), shardings.varying_axes(use))
    else:
        arrays, new = branch(use, run, lambda: (otherwise(), old))
    if here.notes is not None:
        here.notes.update(new)
    return arrays


def decided(
    use: Flag,
    new: tuple[PyTree, PyTree],
    old: tuple[PyTree, PyTree],
    commit: Commit | None,
    *,
    clips: bool,
) -> tuple[PyTree, PyTree]:
    """Updates and a state: the new ones, or zeros and the old one.

    Args:
      use: the decision.
      new: what was computed.
      old: the others.
      commit: the same decision, as it was told inwards; what it has settled is taken as it is.
      clips: whether what overflows becomes the largest number.
    """
    (updates, state), (zeros, before) = new, old
    return (
        choose(use, updates, zeros, commit, clips=clips, are_updates=True),
        choose(use, state, before, commit, clips=clips),
    )


def choose(
    use_new: Flag,
    new: PyTree,
    old: PyTree,
    commit: Commit | None = None,
    *,
    clips: bool = False,
    are_updates: bool = False,
) -> PyTree:
    """`new` or `old`, in the dtypes of `old`, which some transformations change.

    `are_updates` says that `old` are zeros; the others are as in `decided`.
    """
    largest = numerics.largest_update if are_updates else numerics.largest_number

    def choice(n: Leaf, o: Leaf) -> Call:
        place = None if are_updates else o
        if n is o or (commit is not None and commit.has_settled(n, place)):
            return leafwise.identity, (n,)
        if not checks.is_numeric(o):  # as keys of random bits are not
            return leafwise.identity, (n if use_new is True else jnp.where(use_new, n, o),)
        bound = largest(o.dtype) if clips and checks.is_inexact(o) else math.inf
        use = () if use_new is True else (use_new,)
        return leafwise.fixed(_choice, largest=bound), (n, o, *use)

    leaves: list[Leaf] = jax.tree.leaves(new)
    structure: Structure = jax.tree.structure(new)
    return structure.unflatten(
        leafwise.run(list(map(choice, leaves, structure.flatten_up_to(old))))
    )


def _choice(new: jax.Array, old: jax.Array, *use: jax.Array, largest: float) -> jax.Array:
    new = new.astype(old.dtype)
    if largest < math.inf:
        new = jnp.where(jnp.isfinite(old), numerics.clipped(new, largest), new)
    return jnp.where(use[0], new, old) if use else new
