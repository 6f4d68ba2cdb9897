"""Numbers that users pass, as the arithmetic needs them, for updates and transformations alike.

Python numbers are checked against their ranges before anything is traced, and become scalars of the
default float dtype, so that a new value doesn't cause a new trace. Arrays are accepted unchecked,
because they may be traced.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import jit_static_kwargs
from jgrad._arithmetic.numerics import BetaForms
from jgrad._trees import checks, trees
from jgrad._trees.annotations import Scalar
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import known_names
from jgrad._trees.protocols import Leaf, PyTree

_beta_from_array = jit_static_kwargs(numerics.beta_from_array)


# ---- numbers, or trees of them -----------------------------------------------------------------


def number(
    function: str, name: str, tree: PyTree, high: float = math.inf, *, positive: bool = False
) -> PyTree:
    """A hyper-parameter or a tree of them, in [0, high), or (0, high) if `positive`."""
    if checks.is_number(tree):
        in_range(ArgLeaves.from_tree(function, name, tree), 0.0, high, above_low=positive)
        return strong_scalar(tree)
    checked = _checked(function, name, tree, high, positive=positive)
    return trees.map_leaves(strong_scalar, checked)


def betas(function: str, name: str, tree: PyTree) -> BetaForms:
    """The forms of a beta in [0, 1), or of a tree of them, in double precision for a number."""
    if checks.is_number(tree):
        in_range(ArgLeaves.from_tree(function, name, tree), 0.0, 1.0)
        return forms(tree)
    leaves, structure = trees.flatten(_checked(function, name, tree, 1.0))
    forms_of_leaves = list(map(forms, leaves))
    columns = zip(*forms_of_leaves, strict=True) if forms_of_leaves else ((), (), ())
    return BetaForms(*map(structure.unflatten, columns))


def _checked(
    function: str, name: str, tree: PyTree, high: float, *, positive: bool = False
) -> PyTree:
    """Real numbers and arrays, with numbers of Python in [0, high) or (0, high)."""
    tree = trees.map_leaves(as_python_number, checks.value_of(tree))
    arg = ArgLeaves.from_tree(function, name, tree)
    for i, x in enumerate(arg.leaves):
        is_real = checks.is_numeric(x) and (
            jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
        )
        # A bare None is not a number; in a tree, it corresponds to a parameter that is None.
        if not (is_real or checks.is_number(x) or (x is None and tree is not None)):
            expected = "a real array or a number"
            arg.fail(i, TypeError, f"{checks.describe(x)}, expected {expected}")
    in_range(arg, low=0.0, high=high, above_low=positive)
    return tree


def in_range(
    arg: ArgLeaves, low: float = -math.inf, high: float = math.inf, *, above_low: bool = False
) -> None:
    """Each Python number is in [low, high) or (low, high). Arrays pass: they may be traced."""
    is_open = above_low or low == -math.inf
    dtype = jnp.result_type(float)
    for i, x in enumerate(arg.leaves):
        if checks.is_number(x) and (not low <= x < high or (above_low and x == low)):
            interval = f"{'(' if is_open else '['}{low:g}, {high:g})"
            arg.fail(i, ValueError, f"{x}, expected a number in {interval}")
        if checks.is_number(x) and abs(x) > float(jnp.finfo(dtype).max):
            expected = f"a number that {dtype} can hold"
            arg.fail(i, ValueError, f"{checks.describe(x)}, expected {expected}")


def forms(x: Leaf) -> BetaForms:
    """The forms of one beta: of a number of Python in double precision, or of an array."""
    if x is None:
        return BetaForms(None, None, None)  # where there is no parameter either
    if checks.is_number(x):
        log = math.log(x) if x > 0 else numerics.LOG_OF_ZERO
        return BetaForms(*map(strong_scalar, (x, 1.0 - float(x), log)))
    return _beta_from_array(x)


def as_python_number(x: Leaf) -> Leaf:
    """A NumPy array with one element as the number that it is, a variable as its array."""
    return x.item() if isinstance(x, np.ndarray) and x.size == 1 else checks.value_of(x)


def strong_scalar(x: Leaf) -> Leaf:
    """A number as a scalar of the default float dtype; anything else as it is."""
    return np.asarray(float(x), jnp.result_type(float)) if checks.is_number(x) else x


# ---- one number for the model, or for a leaf ---------------------------------------------------


def scalar(function: str, name: str, x: Scalar) -> Leaf:
    """One number in [0, inf)."""
    if checks.is_number(x):
        return number(function, name, x)
    return scalars(function, name, _no_tree(function, name, x))


def beta(function: str, name: str, x: Scalar) -> BetaForms:
    """The forms of one number in [0, 1)."""
    return scalar_betas(function, name, _no_tree(function, name, x))


def _no_tree(function: str, name: str, x: Leaf) -> Leaf:
    if not trees.is_one_leaf(trees.flatten(x)[1]):
        raise ValueError(f"{function}: `{name}`: {checks.describe(x)}, expected one number.")
    return x


def scalars(
    function: str, name: str, tree: PyTree, high: float = math.inf, *, positive: bool = False
) -> PyTree:
    """One number in [0, high), or (0, high) if `positive`, or a tree of them."""
    return _one_element(function, name, number(function, name, tree, high, positive=positive))


def scalar_betas(function: str, name: str, tree: PyTree) -> BetaForms:
    """The forms of one number in [0, 1), or of a tree of them."""
    one_element = functools.partial(_one_element, function, name)
    return BetaForms(*map(one_element, betas(function, name, tree)))


def _one_element(function: str, name: str, x: Leaf) -> Leaf:
    if not jax.tree_util.all_leaves([x]):
        checks.one_element(ArgLeaves.from_tree(function, name, x))
        return trees.map_leaves(_scalar, x)
    if not checks.is_array(x) or x.size != 1:
        raise ValueError(f"{function}: `{name}`: {checks.describe(x)}, expected one number.")
    return _scalar(x)


def _scalar(x: Leaf) -> Leaf:
    """Without axes; an integer in the default float dtype, as a number of Python is."""
    x = x.reshape(())
    return x if checks.is_inexact(x) else numerics.floating(x)


# ---- numbers of one call -----------------------------------------------------------------------


class OfCall(dict[str, PyTree]):
    """The keyword arguments of one call of `update`; it remembers which were asked for.

    Others are accepted, because they may be meant for another transformation of a chain. Exceptions
    are near misses of the method's own numbers, and options that cannot change per call.
    """

    def __init__(self, numbers: Mapping[str, PyTree]) -> None:
        super().__init__(numbers)
        self._asked: dict[str, None] = {}

    def get(self, name: str, default: PyTree = None) -> PyTree:
        """As of a dictionary."""
        self._asked[name] = None
        return super().get(name, default)

    def check_names(self, function: str) -> None:
        """After all that the method has was asked for."""
        for name in self.keys() - self._asked:
            known_names().check_unasked(function, name, (*self._asked,))


# ---- numbers that may be absent ----------------------------------------------------------------


def upper_clamp(largest: PyTree) -> PyTree:
    """`None` means no clamp, i.e. +inf, which callers may not pass as a number."""
    return jnp.asarray(jnp.inf) if largest is None else largest


def optional_decay(decay: PyTree, *, negative_is_none: bool) -> PyTree:
    """`None` for the Python number 0, so that no decay is compiled.

    Ivy reads a negative decay as none, too.
    """
    if not checks.is_number(decay):
        return decay
    return None if decay == 0 or (negative_is_none and decay < 0) else decay
