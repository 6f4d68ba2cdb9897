"""Checks of arguments, at trace time: they leave nothing in the compiled program.

Every message names the function, the argument, the leaf's path, what came and what was expected.
chex makes the assertions that it has, but would print both trees, so this file writes the messages.

A `ValueError` is about structure, shape or value; a `TypeError` is about the kind of an object.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jgrad._trees import forms, trees
from jgrad._trees.protocols import Leaf, PyTree

# The remedy if an array is passed where a Python number is needed.
INJECTED = "`optax.inject_hyperparams` makes arrays of numbers: name this one in `static_args`"

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
    remedy: str = "",
) -> None:
    """`tree` has the structure of `reference`, or may be a prefix of it."""
    same = trees.flatten(tree)[1] == trees.flatten(reference)[1]
    if same or (prefix and trees.is_prefix(tree, reference)):
        return
    names = f"`{name}`", f"`{reference_name}`"
    differing = list(trees.differences(tree, reference, *names, a_may_be_prefix=prefix))
    more = f" (and {len(differing) - _SHOWN} more)" if len(differing) > _SHOWN else ""
    what = "; ".join(differing[:_SHOWN]) + more if differing else "static data of nodes differ"
    end = f"; {remedy}" if remedy else ""
    raise ValueError(
        f"{function}: `{name}` does not have the structure of `{reference_name}`: {what}{end}."
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


class ArgLeaves(NamedTuple):
    """The leaves of one argument, with what a message needs to name one of them.

    Attributes:
      function: the function or transformation that the user called.
      name: the argument.
      leaves: one entry per leaf; `None` is a leaf.
      paths: returns the path of each leaf. Called for messages only.
    """

    function: str
    name: str
    leaves: Sequence[Leaf]
    paths: Callable[[], Sequence[str]]

    @classmethod
    def from_tree(cls, function: str, name: str, tree: PyTree) -> "ArgLeaves":
        """The leaves of a tree, under their own paths."""
        return cls(function, name, trees.flatten(tree)[0], lambda: trees.paths(tree))

    @classmethod
    def from_prefix(
        cls, function: str, name: str, tree: PyTree, reference_name: str, reference: PyTree
    ) -> "ArgLeaves":
        """A prefix of the reference, broadcast to it: an entry per leaf, under its path.

        So are the values of rules by path; where the reference has None any value will do.
        """
        tree = trees.opened(tree)
        leaves, structure = trees.flatten(tree)
        if hasattr(tree, "__jgrad_values__"):
            leaves = tree.__jgrad_values__(function, name, reference)
        elif trees.is_one_leaf(structure):  # one for all
            leaves *= trees.flatten(reference)[1].num_leaves
        else:
            if not trees.is_prefix(tree, reference):
                tree = trees.masked_as(reference, tree)
            same_structure(function, name, tree, reference_name, reference, prefix=True)
            leaves = trees.broadcast(tree, reference)
        return cls(function, name, leaves, lambda: trees.paths(reference))

    def with_arrays(self) -> "ArgLeaves":
        """The same, with JAX arrays for numbers and for NumPy arrays."""
        leaves = [
            jnp.asarray(x)
            if not isinstance(x, jax.Array) and (is_number(x) or is_numeric(x))
            else x
            for x in self.leaves
        ]
        return self._replace(leaves=leaves)

    def at(self, rows: Sequence[int]) -> "ArgLeaves":
        """Some of the leaves, under their paths."""
        leaves, paths = list(map(self.leaves.__getitem__, rows)), self.paths
        return self._replace(leaves=leaves, paths=lambda: [paths()[i] for i in rows])

    def fail(self, i: int, error: type[Exception], problem: str, relation: str = "") -> NoReturn:
        """Raises `function: argument relation at path: problem.`"""
        where = f"{relation}{at(self.paths()[i])}"
        raise error(f"{self.function}: `{self.name}`{where}: {problem}.") from None  # not chex's

    def beside(self, reference: "ArgLeaves") -> Iterator[tuple[int, Leaf, Leaf]]:
        """(position, leaf, that of the reference), but where one of both is None."""
        for i, (x, r) in enumerate(zip(self.leaves, reference.leaves, strict=True)):
            if x is not None and r is not None:
                yield i, x, r


def at(path: str) -> str:
    """A phrase for a path, which is empty for a bare leaf."""
    return f" at {path}" if path else ""


def describe(x: Leaf) -> str:
    """What came, in a few words."""
    if x is None:
        return "None"
    if (form := forms.find(x)) is not None:
        return form.describe(x)
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        kind = "an array" if is_array(x) else f"a {type(x).__name__}"
        return f"{kind} of {x.dtype} and shape {tuple(x.shape)}"
    text = repr(x)
    return f"{text if len(text) <= 40 else text[:37] + '...'} of type {type(x).__name__}"


def in_short(x: Leaf) -> str:
    """`float32[3, 2]` for an array; the repr of what is none."""
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    return f"{x.dtype}{list(x.shape)}" if is_array else repr(x)


def made_by_init(function: str, kind: type) -> str:
    """What a state should have been."""
    return f"expected the {kind.__name__} that this `{function}` made with `init`."


def is_number(x: Leaf) -> bool:
    """A concrete real number: not an array, not traced, not a bool."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def is_array(x: Leaf) -> bool:
    """An array of JAX or NumPy, traced or not, or a NumPy scalar; keys and strings too."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_numeric(x: Leaf) -> bool:
    """An array of numbers or bools."""
    return is_array(x) and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_)


def is_inexact(x: Leaf) -> bool:
    """An array of floating or complex numbers, as `jnp.inexact` is."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_no_parameter(x: Leaf) -> bool:
    """What a model may hold beside arrays: an activation, a string, a bool, a key; not `None`.

    What has a shape and a dtype and is no array was meant as a parameter.
    """
    if x is None or is_number(x) or is_numeric(x):
        return False
    return is_array(x) or not (hasattr(x, "shape") and hasattr(x, "dtype"))


def value_of(x: Leaf) -> Leaf:
    """The array of a variable, such as those of flax's nnx; anything else as it is."""
    if is_array(x) or not hasattr(x, "__jax_array__"):
        return x
    return jnp.asarray(x)


def values_of(tree: PyTree) -> PyTree:
    """The tree with arrays for variables that are leaves."""
    if all(map(is_array, jax.tree.leaves(tree))):
        return tree  # in most calls
    leaves, structure = jax.tree.flatten(tree, is_leaf=trees.is_none)
    values = list(map(value_of, leaves))
    is_same = all(map(operator.is_, values, leaves))
    return tree if is_same else jax.tree.unflatten(structure, values)


def arrays_or_numbers(function: str, name: str, tree: PyTree) -> None:
    """No other leaves but `None`."""
    arg = ArgLeaves.from_tree(function, name, tree)
    for i, x in enumerate(arg.leaves):
        if not (x is None or is_number(x) or is_numeric(x)):
            arg.fail(i, TypeError, f"{describe(x)}, expected an array or a number")


def parameters(arg: ArgLeaves) -> list[Leaf]:
    """Parameters are arrays of any numbers or bools; `None` may be."""
    if all(map(is_inexact, arg.leaves)):
        return list(arg.leaves)  # in most calls
    for i, x in enumerate(arg.leaves):
        if x is None:
            continue
        if not is_numeric(x):
            does = "as `eqx.filter(model, eqx.is_inexact_array)` does"
            remedy = f"put None in the place of other leaves, {does}"
            if isinstance(x, jax.ShapeDtypeStruct):
                remedy = "call it under `jax.eval_shape` if you only have shapes"
            arg.fail(i, TypeError, f"{describe(x)}, expected an array of numbers; {remedy}")
    return list(arg.leaves)


def same_shapes(arg: ArgLeaves, reference: ArgLeaves) -> None:
    """Leaf against leaf; `None` matches everything."""
    for i, x, r in arg.beside(reference):
        try:
            chex.assert_equal_shape([x, r])
        except AssertionError:
            problem = f"shape {x.shape}, expected {r.shape}"
            arg.fail(i, ValueError, problem, f" does not match `{reference.name}`")


def broadcastable(arg: ArgLeaves, reference: ArgLeaves, *, rank_may_grow: bool = False) -> None:
    """Each leaf broadcasts to its reference without enlarging it; `None` matches everything."""

    def fits(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
        try:
            result = np.broadcast_shapes(shape, to)
        except ValueError:
            return False
        return result == to or (rank_may_grow and math.prod(result) == math.prod(to))

    for i, x, r in arg.beside(reference):
        if x.ndim > 0 and x.shape != r.shape and not fits(x.shape, r.shape):
            problem = f"shape {x.shape}, expected {r.shape} or one that broadcasts to it"
            arg.fail(i, ValueError, problem, f" does not broadcast to `{reference.name}`")


def bools(arg: ArgLeaves) -> list[bool]:
    """An entry for each leaf; False for None."""
    for i, x in enumerate(arg.leaves):
        if isinstance(x, jax.core.Tracer):
            remedy = "masks are read while tracing: compute them with Python or NumPy"
            arg.fail(i, TypeError, f"{describe(x)}, traced, expected a bool; {remedy}")
        is_bool = isinstance(x, bool) or (is_array(x) and x.dtype == bool and x.size == 1)
        if not (x is None or is_bool):
            arg.fail(i, TypeError, f"{describe(x)}, expected a bool")
    return [bool(np.asarray(x).all()) for x in arg.leaves]


def shape_and_dtype(x: Leaf) -> jax.ShapeDtypeStruct:
    """What a function of the parameters' shapes is given for a leaf."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def one_element(arg: ArgLeaves) -> None:
    """Each leaf has one element, whatever its rank; `None` passes."""
    try:
        chex.assert_size([x for x in arg.leaves if x is not None], 1)
    except AssertionError:
        i, x = next((i, x) for i, x in enumerate(arg.leaves) if x is not None and x.size != 1)
        arg.fail(i, ValueError, f"shape {x.shape}, expected one element")


# ---- single values -------------------------------------------------------------------------------


def no_out(function: str, out: object) -> None:
    """`out=` follows JAX's convention: accepted for parity, never written to."""
    if out is not None:
        raise NotImplementedError(
            f"{function}: `out` is not supported, since arrays in JAX are immutable. Use the "
            "returned value; to reuse memory, give the argument to "
            "`jax.jit(..., donate_argnums=...)`."
        )


def count(function: str, name: str, value: object, low: int = 1) -> None:
    """An int of at least `low`."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        remedy = f"; {INJECTED}" if isinstance(value, jax.Array) else ""
        raise TypeError(f"{function}: `{name}`: {describe(value)}, expected an int{remedy}.")
    if not low <= value < 2**31:
        raise ValueError(f"{function}: `{name}`: {value}, expected a number in [{low}, 2^31).")


def state_counter(function: str, name: str, x: Leaf) -> None:
    """A counter of a state: an integer without axes. An array may be negative: it may be traced."""
    is_int = isinstance(x, int) and not isinstance(x, bool)
    if not (is_int or (is_array(x) and jnp.issubdtype(x.dtype, jnp.integer))):
        raise TypeError(f"{function}: `{name}`: {describe(x)}, expected an int32 scalar.")
    if np.shape(x) != ():
        remedy = "map `update` over the models, as you did `init`"
        raise ValueError(f"{function}: `{name}`: shape {np.shape(x)}, expected (); {remedy}.")
    if not isinstance(x, jax.Array):
        count(function, name, int(x), low=0)


def one_of(function: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """An option that is spelled out."""
    allowed = tuple(allowed)
    # An array would be compared element by element.
    if not (value is None or isinstance(value, str)) or value not in allowed:
        options = ", ".join(map(repr, allowed))
        raise ValueError(f"{function}: `{name}`: {describe(value)}, expected one of {options}.")


def floating_dtype(
    function: str, name: str, x: object, expected: str, *, least_exponent: int = 0
) -> np.dtype:
    """A real floating dtype by its name or type; not an array, though it has one."""
    try:
        read = np.dtype(x) if isinstance(x, (str, type, np.dtype)) else None
    except TypeError:
        read = None
    is_floating = read is not None and jnp.issubdtype(read, jnp.floating)
    if read is None or not is_floating or jnp.finfo(read).maxexp < least_exponent:
        came = describe(x) if is_array(x) else repr(x)
        raise TypeError(f"{function}: `{name}`: {came}, expected {expected}.")
    return read


def boolean(function: str, name: str, value: object) -> None:
    """True or False, and nothing that is only true or false in a condition."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: `{name}`: {describe(value)}, expected True or False.")


def flag(function: str, name: str, x: object) -> None:
    """None, or one bool, which may be traced."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    if not (x is None or isinstance(x, bool) or (dtype == jnp.bool_ and shape == ())):
        raise TypeError(f"{function}: `{name}`: {describe(x)}, expected None or one bool.")


def axis_names(function: str, name: str, value: object) -> tuple[str, ...]:
    """The name of a mesh axis, or a tuple of different ones, as a tuple."""
    names = value if isinstance(value, tuple) else (value,)
    if not (names and all(isinstance(axis, str) for axis in names)):
        came = value if isinstance(value, tuple) else describe(value)
        expected = "an axis name or a tuple of names"
        raise TypeError(f"{function}: `{name}`: {came}, expected {expected}.")
    if len(set(names)) < len(names):
        raise ValueError(f"{function}: `{name}`: {value}, expected different names.")
    return names


# ---- where arrays lie --------------------------------------------------------------------------


def is_on_host(x: Leaf) -> bool:
    """Whether an array lies in host memory."""
    # As `jax.typeof(x)`, which takes ten times as long, checked in JAX 0.8 to 0.12.
    return isinstance(x, jax.Array) and bool(x.aval.memory_space == jax.memory.Space.Host)


def place_on_host(tree: PyTree) -> str | None:
    """The path of the first array that lies in host memory, for messages; None if there is none."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return next((jax.tree_util.keystr(path) for path, x in leaves if is_on_host(x)), None)


def on_device(function: str, name: str, tree: PyTree, expected: str) -> None:
    """No array of an argument lies in host memory."""
    if any(map(is_on_host, jax.tree.leaves(tree))):
        where = at(place_on_host(tree) or "")
        raise ValueError(f"{function}: `{name}`{where}: in host memory, expected {expected}.")
