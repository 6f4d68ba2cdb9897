"""A state that begins in host memory: of what is large, one slice at a time is on the device."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jgrad._arithmetic.programs import Atom, ClosedProgram, traced
from jgrad._arithmetic.slices import Pruned, SlicedResult, Unknown
from jgrad._trees import forms, host_memory, shardings
from jgrad._trees.host_memory import is_array
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.told import told
from jgrad._trees.trees import Structure


def begun(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """`init(params)`, of which what is large lies in host memory, and 8-bit codes as words.

    Args:
      init: computes a state of parameters on the device.
      params: they may lie in host memory.
    """
    leaves = jax.tree.leaves(params)
    structure: Structure = jax.tree.structure(params)
    arrays = list(filter(is_array, leaves))
    if told().share is not None or sum(x.size for x in arrays) <= host_memory.SLICE:
        return _on_device(init, params)
    state: list[Leaf] = []
    form: Structure = structure
    moves: list[bool] = []

    def f(*arrays: jax.Array) -> list[jax.Array]:
        nonlocal state, form, moves
        tree = forms.to_words(init(structure.unflatten(_replaced(leaves, arrays))))
        state, form = jax.tree.flatten(tree)
        pairs = zip(state, forms.belong_on_host(tree, host_memory.is_large), strict=True)
        moves = [belongs for x, belongs in pairs if is_array(x)]
        return list(filter(is_array, state))

    closed, _ = traced(f, *map(host_memory.as_on_device, arrays))
    has_rows = list(map(_has_rows, arrays))
    run: Callable[..., list[jax.Array]] = functools.partial(_in_slices, closed, has_rows, moves)
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        if _forgets_shards(closed, arrays):
            return _on_device(init, params)
        # What NumPy has goes to the host, and not to the device, as all arguments of a program do.
        arrays = [host_memory.large_to_host(x) if isinstance(x, np.ndarray) else x for x in arrays]
        run = jax.jit(run, keep_unused=True)  # or constants would be on the first device
    return form.unflatten(_replaced(state, run(*arrays)))


def committed(tree: PyTree) -> PyTree:
    """The tree, all of it committed to the device that some of it is committed to.

    What a step returns is, so `jax.jit` would compile the second step again.
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return tree
    places = {frozenset(x.sharding.device_set) for x in arrays if x.committed}

    def commit(x: Leaf) -> Leaf:
        if (
            not isinstance(x, jax.Array)
            or x.committed
            or places != {frozenset(x.sharding.device_set)}
        ):
            return x
        return jax.device_put(x, x.sharding)

    return jax.tree.map(commit, tree)


def _on_device(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    state = forms.to_words(init(host_memory.to_device(params)))
    return host_memory.to_host(state, forms.belong_on_host(state, host_memory.is_large))


def _forgets_shards(closed: ClosedProgram, arrays: Sequence[jax.Array | np.ndarray]) -> bool:
    """Whether a program would make whole arrays where the function by itself makes shards.

    Those of another library's `jnp.zeros_like`, of leaves that are sharded.
    """
    if not any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in arrays):
        return False
    large = (x for x in closed.jaxpr.outvars if host_memory.is_large_shape(x.aval.shape))
    return any(not Pruned(closed, [x]).inputs for x in large)


def _replaced(leaves: Sequence[Leaf], arrays: Sequence[Leaf]) -> list[Leaf]:
    """The leaves of a tree with other arrays."""
    remaining = iter(arrays)
    return [next(remaining) if is_array(x) else x for x in leaves]


def _has_rows(x: jax.Array) -> bool:
    """Whether each device has its part of all rows, as far as it can be known."""
    if not isinstance(x, jax.core.Tracer):
        return isinstance(x, np.ndarray) or x.sharding.shard_shape(x.shape)[:1] == x.shape[:1]
    axes = shardings.axes_in_type(x)
    if axes is not None:
        return not any(axes[:1])
    mesh = jax.typeof(x).sharding.mesh
    is_alone = (mesh.axis_names and mesh.size == 1) or not shardings.may_be_sharded(x)
    return bool(is_alone) or x.ndim > 2  # layers are not sharded


def _in_slices(
    closed: ClosedProgram, has_rows: Sequence[bool], moves: Sequence[bool], *arrays: jax.Array
) -> list[jax.Array]:
    """The results of a program, some in host memory, and these in slices where they are known."""
    results = closed.jaxpr.outvars
    both = zip(results, moves, strict=True)
    plans = [_sliced(closed, x, has_rows) if belongs else None for x, belongs in both]
    whole = Pruned(closed, [x for x, sliced in zip(results, plans, strict=True) if sliced is None])
    others = iter(whole(*(host_memory.to_device(arrays[i]) for i in whole.inputs)))
    return [
        _stacked(sliced, arrays) if sliced else host_memory.to_host(next(others), [belongs])
        for sliced, belongs in zip(plans, moves, strict=True)
    ]


def _sliced(closed: ClosedProgram, result: Atom, has_rows: Sequence[bool]) -> SlicedResult | None:
    """How slices of a result of a program are computed; None where it is small, or not known."""
    count = host_memory.slices(result.aval.shape)
    if count is None:
        return None
    try:
        slices = SlicedResult(closed, result, count)
    except Unknown:
        return None
    return slices if all(has_rows[i] for i in slices.inputs) else None


def _stacked(sliced: SlicedResult, arrays: Sequence[jax.Array]) -> jax.Array:
    """A result in host memory, made slice by slice."""
    count = sliced.count
    whole = sliced.whole(*(host_memory.to_device(arrays[i]) for i in sliced.whole.inputs))

    def body(_: None, slices: list[jax.Array]) -> tuple[None, jax.Array]:
        return None, host_memory.to_host(sliced.one(host_memory.to_device(slices), whole))

    inputs = (arrays[i] for i in sliced.inputs)
    xs = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in inputs]
    _, stack = jax.lax.scan(body, None, xs, length=count)
    return stack.reshape(sliced.shape)
