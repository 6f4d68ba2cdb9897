"""What the wrappers share: the transformation inside, its state, and parameters after updates."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import numerics
from jgrad._inputs.update import Update
from jgrad._layers.layer_axes import existing_mesh_axes, read_norm_axes
from jgrad._packed import arrays
from jgrad._trees import checks, host_memory, trees
from jgrad._trees.trees import PyTree


class Offloaded(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """What `offload` returns. Other wrappers refuse it: they compute with the state inside."""


def transformation(
    function: str, tx: Any, *, may_be_offloaded: bool = False
) -> optax.GradientTransformationExtraArgs:
    """`tx` as a transformation whose update takes extra arguments.

    No `offload`, nor one inside, as far as its state shows it: a wrapper computes with the state.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        expected = "a transformation with `init` and `update`"
        raise TypeError(f"{function}: `tx`: {checks.describe(tx)}, expected {expected}.")
    tx = optax.with_extra_args_support(tx)
    if may_be_offloaded:
        return tx
    remedy = f"expected it outside of everything: `offload({function}(...))`"
    if isinstance(tx, Offloaded):
        raise ValueError(f"{function}: `tx`: an `offload`, {remedy}.")

    def init(params: PyTree) -> Any:
        state = tx.init(params)
        place = host_memory.place_on_host(state)
        if place is not None and host_memory.place_on_host(params) is None:
            came = f"with a state in host memory{checks.at(place)}, of an `offload` inside"
            raise ValueError(f"{function}: `tx`: {came}, {remedy}.")
        return state

    return optax.GradientTransformationExtraArgs(init, tx.update)


def check_state(function: str, state: Any, kind: type) -> None:
    """The state is one that this wrapper made."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{function}: `state`: {type(state).__name__}, expected the {kind.__name__} that this "
            f"`{function}` made with `init`."
        )


def mesh_axes_of(inputs: Update, norm_axes: PyTree) -> tuple[str, ...]:
    """All mesh axes over which some leaf is sharded."""
    named = inputs.option("norm_axes", read_norm_axes(inputs.function, norm_axes))
    shards = [spec.shard.axes for spec in inputs.specs if spec.shard is not None]
    return tuple(sorted({*existing_mesh_axes(named), *itertools.chain(*shards)}))


def holds_shards(state: PyTree, inputs: Update) -> bool:
    """Whether a state has shards of buffers that the parameters have whole: that of `zero`."""
    pairs = zip(inputs.reference.leaves, inputs.specs, strict=True)
    whole = {x.shape for x, spec in pairs if spec.is_buffer}
    return any(
        spec.shape in whole and not checks.is_nothing(x) and x.shape != spec.shape
        for x, spec in zip(trees.flatten(state)[0], arrays.specs(state), strict=True)
        if spec.is_buffer and not spec.is_unpacked
    )


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


def choose(
    use_new: Any, new: PyTree, old: PyTree, chosen: Callable[[PyTree], bool] | None = None
) -> PyTree:
    """`new` or `old`, in the dtypes of `old`, for all leaves but inexact ones that are `chosen`."""

    def choice(n: Any, o: Any) -> Any:
        if n is o or use_new is True or (chosen and checks.is_inexact(n) and chosen(n)):
            return n
        return jnp.where(use_new, in_dtypes(n, o), o)

    return in_dtypes(jax.tree.map(choice, new, old), old)


def branch(use: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]) -> PyTree:
    """`jax.lax.cond`; Python's `if` in an eager call, where a `cond` is compiled at each call."""
    if isinstance(use, jax.core.Tracer):
        return jax.lax.cond(use, then, otherwise)
    return then() if use else otherwise()


def in_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, which some transformations let drift."""
    return jax.tree.map(lambda n, o: n.astype(o.dtype) if checks.is_numeric(o) else n, new, old)
