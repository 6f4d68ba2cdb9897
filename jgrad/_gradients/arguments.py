"""What is differentiated with respect to what: one-element outputs, and floating leaves."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import Leaf, PyTree

Argnums = int | Sequence[int]


class Arguments:
    """Positional arguments of a function, with the leaves that are differentiated taken out.

    Attributes:
      leaves: those leaves, of all chosen arguments, in order.
    """

    def __init__(self, function: str, argnums: Argnums, args: tuple[PyTree, ...]) -> None:
        self._function, self._args = function, args
        self._bare = not isinstance(argnums, Sequence)
        numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
        self._chosen = [self._index(i) for i in numbers]
        if len(set(self._chosen)) < len(self._chosen):
            raise ValueError(f"{function}: `argnums`: {argnums}, expected each argument once.")
        flat = [trees.flatten(args[i]) for i in self._chosen]
        self._structures = [structure for _, structure in flat]
        self._all = [leaf for leaves, _ in flat for leaf in leaves]
        self._floating = [_is_floating(leaf) for leaf in self._all]
        self.leaves = [jnp.asarray(x) for x, floating in self._leaves() if floating]
        for i, (leaves, _) in zip(self._chosen, flat, strict=True):
            if leaves and not any(map(_is_floating, leaves)):
                path = checks.at(trees.paths(args[i])[0])
                expected = "a floating leaf to differentiate; cast it to a floating dtype"
                raise TypeError(
                    f"{function}: argument {i} of `func`{path}: {checks.describe(leaves[0])}, "
                    f"expected {expected}."
                )

    def with_leaves(self, leaves: Sequence[Leaf]) -> list[PyTree]:
        """All arguments, with other values for the leaves that are differentiated."""
        args = list(self._args)
        for i, tree in zip(self._chosen, self._unflatten(leaves, self._all), strict=True):
            args[i] = tree
        return args

    def result(self, values: Sequence[Leaf]) -> PyTree:
        """A tree like each chosen argument, `None` for leaves that are not differentiated."""
        results = self._unflatten(values, [None] * len(self._all))
        return results[0] if self._bare else tuple(results)

    def tangents(self, tangents: Sequence[PyTree]) -> list[jax.Array]:
        """The tangents of the leaves that are differentiated."""
        leaves: list[Leaf] = []
        for i, tree in zip(self._chosen, tangents, strict=True):
            names = f"tangents[{i}]", f"primals[{i}]"
            checks.same_structure(self._function, names[0], tree, names[1], self._args[i])
            leaves += trees.flatten(tree)[0]
        arg = ArgLeaves(self._function, "tangents", leaves, self._paths)
        for i, (tangent, (primal, floating)) in enumerate(zip(leaves, self._leaves(), strict=True)):
            if not floating and tangent is not None:
                expected = "None, as the argument is not differentiated there"
                arg.fail(i, ValueError, f"{checks.describe(tangent)}, expected {expected}")
            if floating and (tangent is None or _signature(tangent) != _signature(primal)):
                shape, dtype = _signature(primal)
                expected = f"an array of {dtype} and shape {shape}"
                arg.fail(i, ValueError, f"{checks.describe(tangent)}, expected {expected}")
        moved = [x for x, floating in zip(leaves, self._floating, strict=True) if floating]
        return [typed_as(primal, x) for primal, x in zip(self.leaves, moved, strict=True)]

    def _leaves(self) -> list[tuple[Leaf, bool]]:
        return list(zip(self._all, self._floating, strict=True))

    def _paths(self) -> list[str]:
        return [f"[{i}]{path}" for i in self._chosen for path in trees.paths(self._args[i])]

    def _unflatten(self, values: Sequence[Leaf], others: Sequence[Leaf]) -> list[PyTree]:
        new, both = iter(values), zip(others, self._floating, strict=True)
        leaves = iter([next(new) if floating else other for other, floating in both])
        return [s.unflatten([next(leaves) for _ in range(s.num_leaves)]) for s in self._structures]

    def _index(self, i: int) -> int:
        try:
            count, index = len(self._args), operator.index(i)
        except TypeError:
            expected = "an int or a sequence of ints"
            came = f"{self._function}: `argnums`: {checks.describe(i)}"
            raise TypeError(f"{came}, expected {expected}.") from None
        if not -count <= index < count:
            expected = f"the position of one of the {count} positional arguments"
            expected += "; arguments given by name are not differentiated" * (count == 0)
            raise ValueError(f"{self._function}: `argnums`: {i}, expected {expected}.")
        return index % count


def first_of_pair(function: str, output: PyTree) -> PyTree:
    """The value, of the output of `func` with `has_aux`."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        came, expected = checks.describe(output), "a pair `(value, aux)`, as `has_aux` says"
        raise TypeError(f"{function}: `func` returned {came}, expected {expected}.")
    return output[0]


def scalar(function: str, output: PyTree) -> jax.Array:
    """The output of `func` as a scalar, if it is one."""
    if trees.children(output) is not None:
        what = f"a {type(output).__name__} of {len(jax.tree.leaves(output))} leaves"
        remedy = "; return other outputs with `has_aux=True`, or take `jac`" * (function != "hvp")
        raise TypeError(f"{function}: `func` returned {what}, expected one scalar{remedy}.")
    begin = f"{function}: `func` returned {checks.describe(output)}"
    if not is_real_floating(output):
        raise TypeError(f"{begin}, expected a real floating scalar.")
    # In eager mode, every recorded operation costs time, even one that does nothing.
    output = output if isinstance(output, jax.Array) else jnp.asarray(output)
    if output.size != 1:
        remedy = "reduce it with `jnp.sum` or `jnp.mean`, or take `jac`"
        raise ValueError(f"{begin}, expected one element; {remedy}.")
    return output if output.shape == () else output.reshape(())


def typed_as(x: jax.Array, tangent: ArrayLike) -> jax.Array:
    """A tangent or cotangent of `x`, or a stack of them, with its dtype and place on a mesh.

    Inside `shard_map` and on meshes with explicit axes a type also says over which mesh axes an
    array varies or is sharded, and JAX compares types.
    """
    tangent = jnp.asarray(tangent, x.dtype)
    if not isinstance(x, jax.core.Tracer):
        return tangent
    return tangent + jnp.broadcast_to(jnp.zeros_like(x), tangent.shape)


def is_real_floating(x: Leaf) -> bool:
    """Whether an output can be differentiated."""
    return isinstance(x, float) or (checks.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating))


def _is_floating(x: Leaf) -> bool:
    """Whether a leaf of an argument is differentiated."""
    return isinstance(x, (float, complex)) or checks.is_inexact(x)


def _signature(x: Leaf) -> tuple[tuple[int, ...], np.dtype | None]:
    return jnp.shape(x), jnp.result_type(x)
