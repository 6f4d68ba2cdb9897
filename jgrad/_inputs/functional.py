"""From what a user may give to what the methods take: the door of the functional updates.

`enter` runs at every call, before anything is traced, and looks only at what Python knows. A number
becomes a scalar of the default float dtype, so that a new value is no new trace. `checked` runs
while tracing, once per signature, and looks at kinds, structures and shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgrad._arithmetic import numerics
from jgrad._arithmetic.leafwise import compiled
from jgrad._arithmetic.numerics import Beta
from jgrad._arithmetic.rules import BIAS_CORRECTIONS, BiasCorrection
from jgrad._inputs import methods
from jgrad._inputs.methods import Adam
from jgrad._packed import arrays as slots
from jgrad._trees import checks, trees, values
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree

# Arguments of the functional updates by what is asked of them; all others are numbers, one per
# leaf.
_WEIGHTS = ("w",)
_GRADIENTS = ("dcdw", "effective_grad")
_FIRST_MOMENTS = ("mw", "mw_tm1")
_BROADCAST = (*_FIRST_MOMENTS, "vw", "vw_tm1", "lr")
_ARRAYS = (*_WEIGHTS, *_GRADIENTS, *_BROADCAST)
_BETAS = ("beta1", "beta2")
_MAY_BE_COMPLEX = (*_WEIGHTS, *_GRADIENTS, *_FIRST_MOMENTS)
_OPTIONAL = ("decay_lambda",)

_beta_from_array = compiled(numerics.beta_from_array)


def enter(function: str, **named: PyTree) -> dict[str, Any]:
    """Strongly typed arrays for what the update works on, scalars for numbers, forms of betas."""
    values.in_range(function, "lr", named.get("lr"))  # of any sign, but finite
    entered: dict[str, Any] = {}
    for name, tree in lists_as_arrays(function, named).items():
        if name in _ARRAYS:
            entered[name] = _arrays(function, name, tree)
        elif name in _BETAS:
            entered[name] = betas(function, name, tree)
        else:
            absent = tree is None and name in _OPTIONAL
            entered[name] = None if absent else number(function, name, tree)
    return entered


def lists_as_arrays(function: str, named: dict[str, PyTree]) -> dict[str, PyTree]:
    """A list of numbers is an array, as in Ivy, unless another list holds arrays: it is a tree."""
    lists = {name: tree for name, tree in named.items() if _is_list(tree)}
    if not all(map(_is_numbers, lists.values())) or (lists and slots.any_packed(*named.values())):
        return named
    arrays = {}
    for name, tree in lists.items():
        try:
            arrays[name] = np.asarray(tree)
        except ValueError:
            raise ValueError(
                f"{function}: `{name}`: {checks.describe(tree)}, expected rows of one length."
            ) from None
    return named | arrays


def number(function: str, name: str, tree: PyTree) -> PyTree:
    """A hyper-parameter or a tree of them; Python numbers, in [0, inf), become scalars."""
    tree = trees.map_leaves(known, tree)
    checks.arrays_or_numbers(function, name, tree, real=True)
    values.in_range(function, name, tree, low=0.0)
    return trees.map_leaves(_scalar, tree)


def decay(decay_lambda: PyTree, rule: str) -> PyTree:
    """`None` for no decay: nothing of it is compiled then. Ivy reads a negative decay as none."""
    known = checks.is_number(decay_lambda)
    none = known and (decay_lambda == 0 or (rule == "ivy" and decay_lambda < 0))
    return None if none else decay_lambda


def betas(function: str, name: str, tree: PyTree) -> Beta:
    """The forms of a beta in [0, 1) or of a tree of them, in double precision for a number."""
    tree = trees.map_leaves(known, tree)
    checks.arrays_or_numbers(function, name, tree, real=True)
    values.in_range(function, name, tree, low=0.0, high=1.0)
    leaves, structure = trees.flatten(tree)
    forms = [_forms(x) for x in leaves]
    return Beta(*(structure.unflatten([_scalar(form[i]) for form in forms]) for i in range(3)))


def known(x: Any) -> Any:
    """An array of NumPy with one element as the number that it is."""
    return x.item() if isinstance(x, np.ndarray) and x.size == 1 else x


def _forms(beta: Any) -> Any:
    if beta is None:
        return (None, None, None)  # where there is no parameter either
    if checks.is_number(beta):
        return numerics.beta_from_number(float(beta))
    return _beta_from_array(beta)


def clamp(largest: PyTree) -> PyTree:
    """An upper clamp; none is one at infinity, which a number may not be."""
    return jnp.asarray(jnp.inf) if largest is None else largest


def adam(function: str, named: dict[str, Any], bias_correction: BiasCorrection) -> Adam:
    """Adam's numbers, out of the arguments, with a look at its option."""
    values.one_of(function, "bias_correction", bias_correction, BIAS_CORRECTIONS)
    return Adam(*(named.pop(name) for name in Adam._fields))


def checked(function: str, named: dict[str, PyTree]) -> dict[str, Any]:
    """The arguments as floating arrays of fitting shapes, numbers as scalars.

    A number that is `None` is absent; it comes back as the Python number 0, which compiles to
    nothing.
    """
    absent = {name: 0.0 for name in _OPTIONAL if named.get(name, 0) is None}
    # The order in which messages look for someone to blame: `jax.jit` sorts the keys of a dict.
    ordered = [name for name in _ARRAYS if name in named]
    ordered += [name for name in named if name not in _ARRAYS and name not in absent]
    present = {name: _floating(function, name, named[name]) for name in ordered}
    packed = slots.any_packed(*present.values())
    if packed:
        present = _for_packed(function, present)
    aligned = checks.common_structure(function, **present)
    finest = present[list(present)[aligned.finest]]
    rows = {
        name: Row(function, name, leaves, lambda: trees.paths(finest))
        for name, leaves in zip(present, aligned.rows, strict=True)
    }
    gradient = next(row for name, row in rows.items() if name in _GRADIENTS)
    reference = rows.get("w", gradient)
    checks.none_together(reference, gradient, list(rows.values()))
    for name, row in rows.items():
        if name in _MAY_BE_COMPLEX:
            checks.same_kinds(row, reference)
        if name in _GRADIENTS:
            checks.same_shapes(row, reference)
        elif name in _BROADCAST:
            # Without weights nothing can be enlarged: a moment of shape (1,) beside a scalar is
            # fine.
            checks.broadcastable(row, reference, rank_may_grow=reference is gradient)
        elif name not in _WEIGHTS and not packed:
            checks.one_element(Row.of(function, name, present[name]))
            present[name] = _scalars(present[name])
    return present | absent


def checked_with_adam(
    function: str, named: dict[str, PyTree], adam: Adam
) -> tuple[dict[str, Any], Adam]:
    """The same with Adam's numbers among the arguments."""
    beta1, beta2 = adam.beta1, adam.beta2
    numbers = {"step": adam.step, "beta1": beta1.value, "beta2": beta2.value}
    named = checked(function, named | numbers | {"epsilon": adam.epsilon})
    name = next(name for name in (*_WEIGHTS, *_GRADIENTS) if name in named)

    def form(tree: PyTree) -> PyTree:
        return slots.gathered(function, "beta", _scalars(tree), name, named[name])

    beta1 = Beta(named["beta1"], form(beta1.complement), form(beta1.log))
    beta2 = Beta(named["beta2"], form(beta2.complement), form(beta2.log))
    return named, Adam(named["step"], beta1, beta2, named["epsilon"])


def _for_packed(function: str, present: dict[str, PyTree]) -> dict[str, PyTree]:
    """Options in the form of packed weights; one number as a moment would fill the padding, too."""
    (first, reference), *_ = present.items()
    found = dict(present)
    for name, tree in present.items():
        if name == "lr":
            if trees.flatten(tree)[1] != trees.flatten(reference)[1]:
                found[name] = slots.gathered(function, name, tree, first, reference)
        elif name in _ARRAYS:
            checks.same_structure(function, name, tree, first, reference)
        else:
            checks.one_element(Row.of(function, name, tree))
            found[name] = slots.gathered(function, name, _scalars(tree), first, reference)
    return found


def like(new: PyTree, old: PyTree) -> PyTree:
    """`new` in the dtypes of `old`, which stays where `new` is `None`."""
    aligned = trees.align(new, old)
    assert aligned is not None, "`new` is computed from `old`"
    pairs = zip(*aligned.rows, strict=True)
    return aligned.structure.unflatten([y if x is None else x.astype(y.dtype) for x, y in pairs])


def new_weights(w: PyTree, step: PyTree, stop_gradients: bool) -> PyTree:
    """w - step, in the dtypes of `w`."""
    new = like(methods.descend(w, step), w)
    return trees.map_leaves(jax.lax.stop_gradient, new) if stop_gradients else new


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)  # no NamedTuple: that is a tree


def _is_numbers(x: Any) -> bool:
    """A list, however deep, of numbers and nothing else."""
    leaves = jax.tree.leaves(x, is_leaf=lambda node: not _is_list(node))
    return bool(leaves) and all(map(checks.is_number, leaves))


def _arrays(function: str, name: str, tree: PyTree) -> PyTree:
    if all(
        isinstance(x, jax.Array) and not getattr(x, "weak_type", True)
        for x in jax.tree.leaves(tree)
    ):
        return tree  # the short way: most of what an eager call spends outside XLA is spent here
    checks.arrays_or_numbers(function, name, tree)
    if name in _WEIGHTS:  # an integer among weights is an error, and must still be seen to be one
        tree = trees.map_leaves(
            lambda x: np.asarray(x) if isinstance(x, (int, np.integer)) else x, tree
        )
    return trees.map_leaves(
        lambda x: _scalar(x) if checks.is_number(x) else numerics.strong(x), tree
    )


def _scalar(x: Any) -> Any:
    """A number as a scalar of the default float dtype; anything else as it is."""
    return np.asarray(float(x), jnp.result_type(float)) if checks.is_number(x) else x


def _scalars(tree: PyTree) -> PyTree:
    return trees.map_leaves(lambda x: numerics.floating(x).reshape(()), tree)


def _floating(function: str, name: str, tree: PyTree) -> PyTree:
    """Integers in the default float dtype, except as weights, where they are an error."""
    leaves, structure = trees.flatten(tree)
    leaves = [x if x is None else jnp.asarray(x) for x in leaves]
    row = Row(function, name, leaves, lambda: trees.paths(tree))
    for i, x in enumerate(leaves):
        if x is None or jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if jnp.issubdtype(x.dtype, jnp.integer) and name not in _WEIGHTS:
            leaves[i] = numerics.floating(x)
        elif not (jnp.issubdtype(x.dtype, jnp.complexfloating) and name in _MAY_BE_COMPLEX):
            remedy = "; cast it, or leave it out of the update" if name in _WEIGHTS else ""
            row.fail(i, TypeError, f"{checks.describe(x)}, expected a floating dtype{remedy}")
    return structure.unflatten(leaves)
