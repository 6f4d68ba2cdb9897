"""Converts one leaf of a state to the form of another: its dtype, or another one."""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from jgrad._arithmetic import numerics
from jgrad._trees import checks, forms, host_memory, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree


def converted(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the form and the memory of another; the same array where it has both already."""
    if (form := forms.find(x)) is not None:
        form.check_stored(arg, i, x)
        if form_of(x) == form_of(like):
            return in_memory_of(like, form.as_stored(x, like))
    elif checks.is_array(x) and not trees.is_leaf(like) and x.dtype == like.dtype:
        return in_memory_of(like, x)
    new = host_memory.where_it_lies(functools.partial(_on_device, arg, i, like), x)
    return in_memory_of(like, new)


def _on_device(arg: ArgLeaves, i: int, like: Leaf, x: Leaf) -> Leaf:
    """A leaf in the form of another."""
    form, wanted = forms.find(x), forms.find(like)
    if form is not None and form is not wanted:
        if form.loses and wanted is None:
            arg.fail(i, ValueError, form.loses)
        x = x if form.loses else form.array(x)
    if wanted is not None:
        return wanted.made_of(arg, i, like, x)
    if not _is_alike(x, like):
        arg.fail(i, TypeError, f"{checks.describe(x)}, expected {like.dtype}")
    return x.astype(like.dtype)


def zeros(arg: ArgLeaves, i: int, like: Leaf, beside: Leaf) -> Leaf:
    """Zeros in the form of a leaf, sharded as an array of its shape, if there is one."""
    if (form := forms.find(beside)) is not None:
        beside = form.array(beside)
    wanted = forms.find(like)
    dtype = like.dtype if wanted is None else wanted.array_dtype(like)
    zero = jnp.zeros(like.shape, dtype) if beside is None else numerics.zeros_like(beside, dtype)
    return zero if wanted is None else wanted.made_of(arg, i, like, zero)


def form_of(x: Leaf) -> tuple[Hashable, ...]:
    """What equal forms have in common, of which the first is as accounts call it."""
    form = forms.find(x)
    return (str(x.dtype),) if form is None else form.form_of(x)


def in_memory_of(like: PyTree, tree: PyTree) -> PyTree:
    """A tree, each array in the memory, host's or device's, of the one in another tree."""

    def moved(x: Leaf, like: Leaf) -> Leaf:
        is_there, is_wanted = map(host_memory.is_on_host, (x, like))
        if is_there == is_wanted or not (_is_concrete(x) and _is_concrete(like)):
            return x
        return host_memory.to_host(x) if is_wanted else host_memory.to_device(x)

    return jax.tree.map(moved, tree, like)


def _is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_alike(x: Leaf, like: Leaf) -> bool:
    """Both real, both complex, or both integers."""
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer)
    return checks.is_array(x) and any(
        jnp.issubdtype(x.dtype, kind) and jnp.issubdtype(like.dtype, kind) for kind in kinds
    )
