"""Ivy's `execute_with_gradients`: a value, and gradients of chosen outputs by chosen inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._gradients.grad import stop_gradient
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Value
from jgrad._trees.protocols import KeyPath, Leaf, PyTree

_NAME = "execute_with_gradients"
_DEFAULT = ((0,),)
_ABSENT: PyTree = object()

Path = Sequence[object]  # keys, names and positions


def execute_with_gradients(
    func: Callable[[PyTree], Value],
    xs: PyTree,
    /,
    *,
    retain_grads: bool = False,
    xs_grad_idxs: Sequence[Path] | None = _DEFAULT,
    ret_grad_idxs: Sequence[Path] | None = _DEFAULT,
) -> tuple[Value, PyTree]:
    """Computes the value of `func` at `xs` and the gradients of its outputs.

        execute_with_gradients(f, x) = (f(x), df/dx)

    Inputs and outputs are chosen by paths: sequences of keys, attribute names and positions, such
    as `(1, "a")`. Negative positions count from the end. A path that ends above the leaves chooses
    all arrays below it.

    Args:
      func: a function of `xs` that returns an array or a pytree. It is called once.
      xs: an array, or a pytree of arrays and of anything else, which is passed to `func` as it is.
      retain_grads: whether an enclosing differentiation can go through the returned value; it can
        always go through the returned gradients.
      xs_grad_idxs: paths of the inputs to differentiate with respect to; `None` for all. The
        default is the first entry of a list or tuple, and all of anything else. If a path leads to
        integer arrays only, they are differentiated in the default float dtype; beside floating
        arrays, integers are left alone, and so are bools in any case.
      ret_grad_idxs: paths of the outputs to differentiate, which are real floating arrays with one
        element, of any rank. `None` takes all of these and ignores other outputs. The default is
        the first entry of a list or tuple, and all of anything else.

    Returns:
      `(func_ret, grads)`. `func_ret` is everything that `func` returned. `grads` only has the
      chosen inputs: dicts keep their keys, lists and tuples become lists of the chosen entries, and
      other nodes keep their type, with `None` for what was not chosen; a top-level list of one
      entry becomes that entry. Leaves have the dtype of their input, and are zero if `func` does
      not depend on it. That is all if `func` returned one array, or `ret_grad_idxs=None` found one
      output. Otherwise `grads` is a dict of these, keyed by the outputs' paths joined with "_":
      `{"0": ..., "1_a": ...}`.

      K outputs cost K backward passes. If you only need the gradient of their sum, let `func`
      return the sum, which costs one.

    Raises:
      ValueError: a path does not exist, does not lead to an array, or leads to an output with
        several elements; or there is nothing to differentiate.

    Example:
      >>> xs = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> func = lambda xs: jnp.sum(xs["w"] ** 2) + jnp.sum(xs["b"])
      >>> value, grads = jgrad.execute_with_gradients(func, xs)
      >>> jax.tree.map(jnp.shape, grads)
      {'b': (2,), 'w': (3, 2)}
      >>> value, grads = jgrad.execute_with_gradients(func, xs, xs_grad_idxs=[["w"]])
      >>> jax.tree.map(jnp.shape, grads)
      {'w': (3, 2)}
    """
    checks.boolean("execute_with_gradients", "retain_grads", retain_grads)
    inputs = _Inputs(xs, xs_grad_idxs)
    keys: list[str] = []

    def outputs(leaves: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
        ret = func(inputs.with_leaves(leaves))
        chosen = _outputs(ret, ret_grad_idxs)
        keys[:] = [key for key, _ in chosen]
        return [y.reshape(()) for _, y in chosen], ret

    ys, pull, ret = jax.vjp(outputs, inputs.leaves, has_aux=True)
    per_output = []
    for i in range(len(ys)):
        cotangents = [jnp.ones_like(y) if i == j else jnp.zeros_like(y) for j, y in enumerate(ys)]
        per_output.append(inputs.gradients(pull(cotangents)[0]))
    bare = trees.children(ret) is None or (ret_grad_idxs is None and len(per_output) == 1)
    grads = per_output[0] if bare else dict(zip(keys, per_output, strict=True))
    return ret if retain_grads else stop_gradient(ret), grads


class _Inputs:
    """`xs`, and which of its leaves are differentiated.

    Attributes:
      leaves: those leaves, integers as the default float dtype.
    """

    def __init__(self, xs: PyTree, idxs: Sequence[Path] | None) -> None:
        xs = jnp.asarray(xs) if checks.is_number(xs) else xs
        self._tree = xs
        self._all, self._structure = trees.flatten(xs)
        self._chosen: set[int] = set()
        for target in _targets("xs_grad_idxs", xs, idxs):
            arrays = [i for i in target.leaves if checks.is_array(self._all[i])]
            floats = [i for i in arrays if jnp.issubdtype(self._all[i].dtype, jnp.inexact)]
            integers = [i for i in arrays if jnp.issubdtype(self._all[i].dtype, jnp.integer)]
            if not (floats or integers):
                expected = "floating or integer arrays, as `jgrad.variable` makes them"
                _fail("xs_grad_idxs", target, self._all, expected)
            self._chosen.update(floats or integers)
        self.leaves = [numerics.floating(self._all[i]) for i in sorted(self._chosen)]

    def with_leaves(self, leaves: Sequence[jax.Array]) -> PyTree:
        """`xs` with other values for the leaves that are differentiated."""
        return self._structure.unflatten(self._scattered(leaves, self._all))

    def gradients(self, leaves: Sequence[jax.Array]) -> PyTree:
        """The tree of what was chosen."""
        grads = _pruned(self._tree, iter(self._scattered(leaves, [_ABSENT] * len(self._all))))
        return grads[0] if isinstance(grads, list) and len(grads) == 1 else grads

    def _scattered(self, leaves: Sequence[Leaf], others: Sequence[Leaf]) -> list[Leaf]:
        new = iter(leaves)
        return [next(new) if i in self._chosen else other for i, other in enumerate(others)]


def _pruned(node: PyTree, leaves: Iterator[Leaf]) -> PyTree:
    """The tree of `leaves`, without absent ones in dicts and lists, and with `None` elsewhere."""
    children = trees.children(node)
    if children is None:
        return next(leaves)
    values = [(key, _pruned(child, leaves)) for key, child in children]
    present = [(key, value) for key, value in values if value is not _ABSENT]
    if not present:
        return _ABSENT
    if isinstance(node, dict):
        return {key.key: value for key, value in present}
    if type(node) in (list, tuple):
        return [value for _, value in present]
    structure = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    with_none = [None if value is _ABSENT else value for _, value in values]
    return jax.tree.unflatten(structure, with_none)


def _outputs(ret: PyTree, idxs: Sequence[Path] | None) -> list[tuple[str, jax.Array]]:
    """The outputs to differentiate, each with its path as a key."""
    leaves, _ = trees.flatten(ret)
    names = _names(ret)
    chosen: dict[int, None] = {}
    for target in _targets("ret_grad_idxs", ret, idxs):
        fitting = [i for i in target.leaves if _is_scalar(leaves[i])]
        if not fitting:
            _fail("ret_grad_idxs", target, leaves, "a real floating array of one element")
        chosen.update(dict.fromkeys(fitting))
    paths: dict[str, KeyPath] = {}
    for i in chosen:
        key = "_".join(map(str, names[i]))
        if key in paths:
            raise ValueError(
                f"{_NAME}: outputs {paths[key]} and {names[i]} would both have the key {key!r} "
                "among the gradients, expected one; rename one of them."
            )
        paths[key] = names[i]
    return list(zip(paths, (leaves[i] for i in chosen), strict=True))


def _is_scalar(y: Leaf) -> bool:
    return checks.is_array(y) and y.size == 1 and jnp.issubdtype(y.dtype, jnp.floating)


class _Target(NamedTuple):
    """A subtree that a path leads to."""

    named: str
    leaves: range


def _fail(argument: str, target: _Target, leaves: Sequence[Leaf], expected: str) -> NoReturn:
    only = [leaves[i] for i in target.leaves]
    what = checks.describe(only[0]) if len(only) == 1 else f"{len(only)} leaves"
    raise ValueError(f"{_NAME}: `{argument}`: {target.named}: {what}, expected {expected}.")


def _targets(argument: str, tree: PyTree, idxs: Sequence[Path] | None) -> list[_Target]:
    """The subtrees that are asked for."""
    everything = [_Target("all", range(len(trees.flatten(tree)[0])))]
    if idxs is None or (idxs is _DEFAULT and type(tree) not in (list, tuple)):
        return everything
    paths = _paths(argument, idxs)
    # In Ivy's documentation, an explicit [[0]] also means the default if there is nothing at 0.
    nothing = trees.children(tree) is None or (isinstance(tree, dict) and 0 not in tree)
    if paths == [(0,)] and nothing:
        return everything
    return [_locate(argument, tree, path) for path in paths]


def _paths(argument: str, idxs: object) -> list[KeyPath]:
    """The paths that were given, each as a tuple."""
    expected = "a sequence of paths, such as ((0,), (1, 'a')), or None for all"
    if not isinstance(idxs, (list, tuple)):
        raise TypeError(f"{_NAME}: `{argument}`: {checks.describe(idxs)}, expected {expected}.")
    if not idxs:
        raise ValueError(f"{_NAME}: `{argument}`: no paths, expected {expected}.")
    paths = [tuple(path) if isinstance(path, (list, tuple)) else (path,) for path in idxs]
    for key in itertools.chain(*paths):
        if checks.is_array(key) and np.ndim(key):  # which a comparison would compare by element
            came = f"{checks.describe(key)} in a path"
            raise TypeError(f"{_NAME}: `{argument}`: {came}, expected {expected}.")
    return paths


def _locate(argument: str, tree: PyTree, path: KeyPath) -> _Target:
    node, start = tree, 0
    for depth, key in enumerate(path):
        children = trees.children(node) or []
        names = [_name(entry) for entry, _ in children]
        if key in names:
            position = names.index(key)
        elif _is_position(key, node) and -len(names) <= key < len(names):
            position = int(key) % len(names)
        else:
            there = f"there is {checks.describe(node)}"
            if names:
                there = f"expected one of {', '.join(map(repr, names))}"
            came = f"path {path}: no {key!r} at {path[:depth]}"
            raise ValueError(f"{_NAME}: `{argument}`: {came}; {there}.")
        start += sum(len(trees.flatten(child)[0]) for _, child in children[:position])
        node = children[position][1]
    return _Target(f"path {path}", range(start, start + len(trees.flatten(node)[0])))


def _is_position(key: Leaf, node: PyTree) -> bool:
    return isinstance(key, (int, np.integer)) and not isinstance(node, dict)


def _name(entry: Leaf) -> object:
    """The key, position or attribute name of an entry of a JAX key path."""
    return next(getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind))


def _names(tree: PyTree) -> list[KeyPath]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=trees.is_none)
    return [tuple(map(_name, path)) for path, _ in leaves]
