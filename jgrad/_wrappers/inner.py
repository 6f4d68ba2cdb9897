"""What the wrappers share: the transformation inside, its state, and what is finite."""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import leafwise, numerics
from jgrad._arithmetic.leafwise import compiled
from jgrad._inputs.update import Leaves
from jgrad._layers import layer_axes as places
from jgrad._packed import arrays as slots
from jgrad._trees import checks, trees
from jgrad._trees.trees import PyTree


def inner(function: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` as a transformation whose update takes extra arguments."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        expected = "a transformation with `init` and `update`"
        raise TypeError(f"{function}: `tx`: {checks.describe(tx)}, expected {expected}.")
    return optax.with_extra_args_support(tx)


def check_state(function: str, state: Any, kind: type) -> None:
    """The state is one that this wrapper made."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{function}: `state`: {type(state).__name__}, expected the {kind.__name__} that this "
            f"`{function}` made with `init`."
        )


def mesh_axes(leaves: Leaves, norm_axes: PyTree) -> tuple[str, ...]:
    """All mesh axes over which some leaf is cut."""
    named = leaves.options("norm_axes", places.names(leaves.function, norm_axes))
    shares = [slot.share.axes for slot in leaves.slots if slot.share is not None]
    return tuple(sorted({*places.mesh_axes(named), *itertools.chain(*shares)}))


def all_finite(tree: PyTree, cut: tuple[str, ...] = ()) -> jax.Array:
    """Whether each element of the floating leaves is finite, on all devices of the mesh axes."""
    return _everywhere(
        [(_is_finite, (x,)) for x in jax.tree.leaves(tree) if checks.is_floating(x)], cut
    )


def agreed(flag: Any, cut: tuple[str, ...]) -> Any:
    """A flag that is True where it is on all devices of the mesh axes: they go the same way."""
    if not (cut and checks.is_array(flag)):
        return flag
    return jax.lax.pmin(flag.astype(jnp.int32), cut) == 1


def holds_shares(state: PyTree, leaves: Leaves) -> bool:
    """Whether a state has shares of buffers of which the parameters are whole: that of `zero`."""
    whole = {
        x.shape for x, slot in zip(leaves.reference.leaves, leaves.slots, strict=True) if slot.runs
    }
    pairs = zip(trees.flatten(state)[0], slots.of(state), strict=True)
    return any(
        slot.shape in whole and getattr(x, "shape", None) not in (None, (0,), slot.shape)
        for x, slot in pairs
        if slot.runs and not slot.is_whole
    )


def stays_finite(new: PyTree, old: PyTree, cut: tuple[str, ...] = ()) -> jax.Array:
    """Whether nothing that is not finite is new: some states and masks hold an infinity."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    tasks = [(_kept_finite, (n, jnp.asarray(o))) for n, o in pairs if checks.is_floating(n)]
    return _everywhere(tasks, cut)


def _everywhere(tasks: Sequence[leafwise.Task], cut: tuple[str, ...]) -> jax.Array:
    return agreed(functools.reduce(operator.and_, leafwise.run(tasks), jnp.asarray(True)), cut)


@compiled
def _is_finite(x: jax.Array) -> jax.Array:
    # 0 x is 0, or NaN. For `jnp.all(jnp.isfinite(x))`, XLA's CPU backend writes an array of bools;
    # its maximum of many numbers does not see a NaN among them.
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    sums = [jnp.sum(part * jnp.zeros((), part.dtype)) for part in parts]
    return functools.reduce(operator.and_, [total == 0 for total in sums])


@compiled
def _kept_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))


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
    """A floating array in float32 or wider, any other as it is."""
    x = jnp.asarray(x)
    return numerics.widen(x, numerics.real_dtype(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def choose(use_new: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` or `old` as a whole, in the dtypes of `old`."""
    return jax.tree.map(lambda n, o: jnp.where(use_new, n, o), in_dtypes(new, old), old)


def in_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, which some transformations let drift."""
    return jax.tree.map(lambda n, o: n.astype(o.dtype) if checks.is_numeric(o) else n, new, old)
