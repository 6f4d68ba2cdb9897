"""One of two results, by a branch or element by element, in dtypes that stay."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._inputs.notes import Notes
from jgrad._trees import checks, shardings
from jgrad._trees.trees import PyTree


def branch(use: Any, then: Callable[[], PyTree], otherwise: Callable[[], PyTree]) -> PyTree:
    """A `jax.lax.cond`; Python's `if` in an eager call, where a `cond` is compiled at each call.

    `otherwise` may return what is there already: of donated arrays nothing is copied. Inside
    `shard_map`, results vary along the mesh axes along which the choice does.
    """
    if isinstance(use, jax.core.Tracer):
        names = shardings.varying_axes(use)
        otherwise, then = (functools.partial(_varying, f, names) for f in (otherwise, then))
        # XLA copies what a branch returns as it was, unless it is the first one. For a GPU it turns
        # the branches of a bool around, but not those of a number.
        results = jax.lax.switch(use.astype(jnp.int32), (otherwise, then))
        # For a TPU it moves part of what follows into the branches, and writes that, too.
        return shardings.barrier(results)
    return then() if use else otherwise()


def _varying(f: Callable[[], PyTree], names: tuple[str, ...]) -> PyTree:
    return shardings.varying_over(f(), names)


def noted_branch(
    notes: Notes | None,
    use: Any,
    then: Callable[[dict[str, Any]], PyTree],
    otherwise: Callable[[], PyTree],
) -> PyTree:
    """`branch`, out of which come the notes that `then` makes, or the old ones.

    `then` is given the extra arguments of an update in which to make them, if any.
    """
    if notes is None or not notes.is_here:
        return branch(use, lambda: then({}), otherwise)
    made: list[str] = []

    def noting() -> tuple[PyTree, dict[str, jax.Array]]:
        inside = Notes(notes.old, taken=notes.names)
        result = then({"notes": inside})
        made[:] = inside.new
        return result, old | {k: x for k, x in inside.new.items() if k in old or notes.is_dry}

    old = dict(notes.old or {})
    if notes.is_dry:
        form = jax.eval_shape(lambda: noting()[1])
        old = {key: _zeros(x) for key, x in form.items()}
    result, new = branch(use, noting, lambda: (otherwise(), old))
    notes.new |= {key: new[key] for key in made if key in new}
    return result


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    zeros: jax.Array = shardings.varying_over(
        jnp.zeros(x.shape, x.dtype), shardings.varying_axes(x)
    )
    return zeros


def choose(
    use_new: Any, new: PyTree, old: PyTree, is_settled: Callable[[Any, Any], bool] | None = None
) -> PyTree:
    """`new` or `old`, in the dtypes of `old`; `new` where this is settled, given both."""

    def choice(n: Any, o: Any) -> Any:
        if n is o or use_new is True or (is_settled is not None and is_settled(n, o)):
            return n
        return jnp.where(use_new, in_dtypes(n, o), o)

    return in_dtypes(jax.tree.map(choice, new, old), old)


def in_dtypes(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, which some transformations let drift."""
    return jax.tree.map(lambda n, o: n.astype(o.dtype) if checks.is_numeric(o) else n, new, old)
