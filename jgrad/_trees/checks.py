"""What is wrong with the arguments, said once, at trace time, by name.

Every message names the function, the argument, the leaf's path, what came and what was expected.
chex asserts what it has assertions for, which leaves nothing in the program; where it finds
something, this file says what, since chex's own text about a tree is as long as the tree.

A `ValueError` is about structure, shape or value, a `TypeError` about what kind of thing was given.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jgrad._trees import trees
from jgrad._trees.trees import PyTree

_SHOWN = 3  # places named in a message about structure


# ---- structure ---------------------------------------------------------------------------------


def same_structure(
    function: str,
    name: str,
    tree: PyTree,
    reference_name: str,
    reference: PyTree,
    *,
    prefix: bool = False,
) -> None:
    """`tree` has the structure of `reference`, or may be a prefix of it."""
    same = trees.flatten(tree)[1] == trees.flatten(reference)[1]
    if same or (prefix and trees.is_prefix(tree, reference)):
        return
    places = list(
        trees.differences(
            tree, reference, f"`{name}`", f"`{reference_name}`", a_may_be_prefix=prefix
        )
    )
    more = f" (and {len(places) - _SHOWN} more)" if len(places) > _SHOWN else ""
    what = "; ".join(places[:_SHOWN]) + more if places else "static data of nodes differ"
    raise ValueError(
        f"{function}: `{name}` does not have the structure of `{reference_name}`: {what}."
    )


def common_structure(function: str, **named: PyTree) -> trees.Aligned:
    """The trees side by side, each a prefix of the finest."""
    aligned = trees.align(*named.values())
    if aligned is not None:
        return aligned
    finest = max(named, key=lambda name: trees.flatten(named[name])[1].num_nodes)
    for name, tree in named.items():
        same_structure(function, name, tree, finest, named[finest], prefix=True)
    raise AssertionError("unreachable: some tree is not a prefix of the finest")


# ---- leaves ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The leaves of one argument, with what a message needs to name one of them."""

    function: str
    name: str
    leaves: Sequence[Any]
    paths: Callable[[], Sequence[str]]

    @classmethod
    def of(cls, function: str, name: str, tree: PyTree) -> "Row":
        """The leaves of a tree under their own paths."""
        return cls(function, name, trees.flatten(tree)[0], lambda: trees.paths(tree))

    @classmethod
    def spread(
        cls, function: str, name: str, tree: PyTree, reference_name: str, reference: PyTree
    ) -> "Row":
        """A prefix of a tree with an entry for each of its leaves, under their paths."""
        same_structure(function, name, tree, reference_name, reference, prefix=True)
        leaves = trees.broadcast(tree, reference)
        return cls(function, name, leaves, lambda: trees.paths(reference))

    def with_arrays(self) -> "Row":
        """The same with arrays of JAX for numbers and for arrays of NumPy."""
        arrays = [jnp.asarray(x) if is_number(x) or is_numeric(x) else x for x in self.leaves]
        return self._replace(leaves=arrays)

    def fail(self, i: int, error: type[Exception], problem: str, relation: str = "") -> NoReturn:
        """Raises `function: argument relation at path: problem.`, looking the path up only now."""
        place = f"{relation}{at(self.paths()[i])}"
        raise error(f"{self.function}: `{self.name}`{place}: {problem}.") from None  # not chex's


def at(path: str) -> str:
    """A phrase for a path, which is empty for a bare leaf."""
    return f" at {path}" if path else ""


def describe(x: Any) -> str:
    """What came, in a few words."""
    if x is None:
        return "None"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        kind = "an array" if is_array(x) else f"a {type(x).__name__}"
        return f"{kind} of {x.dtype} and shape {tuple(x.shape)}"
    text = repr(x)
    return f"{text if len(text) <= 40 else text[:37] + '...'} of type {type(x).__name__}"


def is_number(x: Any) -> bool:
    """A real number that is known now: not an array, not traced, not a bool."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def is_array(x: Any) -> bool:
    """An array of JAX or NumPy, traced or not, or a NumPy scalar; keys and strings too."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_numeric(x: Any) -> bool:
    """An array of numbers or bools."""
    return is_array(x) and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_)


def is_floating(x: Any) -> bool:
    """An array of floating or complex numbers."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def arrays_or_numbers(function: str, name: str, tree: PyTree, *, real: bool = False) -> None:
    """No other leaves but `None`; with `real`, nothing complex or bool, and no bare `None`."""
    row = Row.of(function, name, tree)
    for i, x in enumerate(row.leaves):
        fits = is_number(x) or is_numeric(x) or (x is None and not (real and tree is None))
        if fits and real and is_array(x):
            fits = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
        if not fits:
            expected = "a real array or a number" if real else "an array or a number"
            row.fail(i, TypeError, f"{describe(x)}, expected {expected}")


def parameters(row: Row) -> list[Any]:
    """Parameters are arrays of any numbers or bools; `None` may be."""
    for i, x in enumerate(row.leaves):
        if x is None:
            continue
        if not is_numeric(x):
            remedy = "leave other leaves out with `optax.masked` or `equinox.partition`"
            row.fail(i, TypeError, f"{describe(x)}, expected an array of numbers; {remedy}")
    return list(row.leaves)


def none_together(weights: Row, gradient: Row, rows: Sequence[Row]) -> None:
    """`None` is a missing gradient, or stands in all rows at once; it is no number."""
    for i, (w, g) in enumerate(zip(weights.leaves, gradient.leaves, strict=True)):
        if w is None and g is not None:
            gradient.fail(i, TypeError, f"{describe(g)}, expected None, as `{weights.name}` is")
        for row in rows if g is not None else ():
            if row.leaves[i] is None:
                row.fail(i, TypeError, "None, expected an array or a number")


def same_shapes(row: Row, reference: Row) -> None:
    """Leaf against leaf; `None` matches everything."""
    both = [
        (i, x, r)
        for i, (x, r) in enumerate(zip(row.leaves, reference.leaves, strict=True))
        if x is not None and r is not None
    ]
    try:
        chex.assert_trees_all_equal_shapes([x for _, x, _ in both], [r for _, _, r in both])
    except AssertionError:
        i, x, r = next((i, x, r) for i, x, r in both if x.shape != r.shape)
        problem = f"shape {x.shape}, expected {r.shape}"
        row.fail(i, ValueError, problem, f" does not match `{reference.name}`")


def broadcastable(row: Row, reference: Row, *, rank_may_grow: bool = False) -> None:
    """Each leaf broadcasts to its reference without enlarging it; `None` matches everything."""

    def fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
        try:
            result = np.broadcast_shapes(shape, to)
        except ValueError:
            return False
        return result == to or (rank_may_grow and math.prod(result) == math.prod(to))

    for i, (x, r) in enumerate(zip(row.leaves, reference.leaves, strict=True)):
        if x is not None and r is not None and not fits(x.shape, r.shape):
            problem = f"shape {x.shape}, expected {r.shape} or one that broadcasts to it"
            row.fail(i, ValueError, problem, f" does not broadcast to `{reference.name}`")


def same_kinds(row: Row, reference: Row) -> None:
    """Complex exactly where the reference is; `None` matches everything."""
    for i, (x, r) in enumerate(zip(row.leaves, reference.leaves, strict=True)):
        if x is not None and r is not None and jnp.iscomplexobj(x) != jnp.iscomplexobj(r):
            expected = "a complex dtype" if jnp.iscomplexobj(r) else "a real dtype"
            problem = f"{describe(x)}, expected {expected} beside {r.dtype}"
            row.fail(i, TypeError, problem, f" does not match `{reference.name}`")


def one_element(row: Row) -> None:
    """Each leaf has one element, whatever its rank; `None` passes."""
    try:
        chex.assert_size([x for x in row.leaves if x is not None], 1)
    except AssertionError:
        i, x = next((i, x) for i, x in enumerate(row.leaves) if x is not None and x.size != 1)
        row.fail(i, ValueError, f"shape {x.shape}, expected one element")
