"""What the user chose, in the form in which the methods take it.

Scalars (`scalar`, `adam`, `clamps`) are made once by each factory, so that what is wrong with them
is said there, and once more by each update, since they may be traced. Options that may differ from
leaf to leaf (`rates`, `decays`, `mask`) become a list with an entry per leaf.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgrad._arithmetic.numerics import Beta
from jgrad._arithmetic.rules import BIAS_CORRECTIONS, BiasCorrection
from jgrad._inputs import functional as arguments
from jgrad._inputs import methods
from jgrad._inputs.methods import Adam, Layers
from jgrad._inputs.update import Leaves
from jgrad._layers import layer_axes as places
from jgrad._packed import arrays as slots
from jgrad._trees import checks, trees, values
from jgrad._trees.checks import Row
from jgrad._trees.trees import PyTree

# One real number, or an array of one, traced or not.
Scalar = jax.Array | np.ndarray | float
# A number, an array, a prefix tree of them, or a function of the number of updates done.
LearningRate = PyTree | Callable[[jax.Array], Any]
# A prefix tree of bools, or a function of the parameters' shapes and dtypes that returns one; None
# is True for all.
Mask = PyTree | Callable[[PyTree], PyTree] | None


# ---- scalars -----------------------------------------------------------------------------------


def scalar(function: str, name: str, x: Scalar) -> Any:
    """One number in [0, inf)."""
    return _one_element(function, name, arguments.number(function, name, x))


def beta(function: str, name: str, x: Scalar) -> Beta:
    """The forms of one number in [0, 1)."""
    return Beta(*(_one_element(function, name, y) for y in arguments.betas(function, name, x)))


def adam(
    function: str, step: jax.Array | int, beta1: Scalar, beta2: Scalar, epsilon: Scalar
) -> Adam:
    """Adam's numbers for one step."""

    return Adam(
        jnp.asarray(step, dtype=float),
        beta(function, "beta1", beta1),
        beta(function, "beta2", beta2),
        scalar(function, "epsilon", epsilon),
    )


def clamps(function: str, smallest: Scalar, largest: Scalar | None) -> tuple[Any, Any]:
    """Both clamps of a trust ratio; None for no upper one."""
    both = (
        scalar(function, "min_trust_ratio", smallest),
        scalar(function, "max_trust_ratio", arguments.clamp(largest)),
    )
    values.clamps(function, smallest, largest)
    return both


def _one_element(function: str, name: str, x: Any) -> Any:
    if not checks.is_array(x) or x.size != 1:
        raise ValueError(f"{function}: `{name}`: {checks.describe(x)}, expected one number.")
    return x.reshape(())


# ---- what a factory can say already ------------------------------------------------------------


def check_rates(function: str, learning_rate: LearningRate, weight_decay: PyTree) -> None:
    """Learning rate and weight decay, as far as they are known before there are parameters."""
    if not trees.is_function(learning_rate):
        arguments.number(function, "learning_rate", learning_rate)
    arguments.number(function, "weight_decay", weight_decay)


def check_adam(
    function: str,
    beta1: Scalar,
    beta2: Scalar,
    epsilon: Scalar,
    bias_correction: BiasCorrection,
    moment_dtype: DTypeLike | None,
) -> None:
    """The options that are Adam's own."""
    values.one_of(function, "bias_correction", bias_correction, BIAS_CORRECTIONS)
    check_moment_dtype(function, moment_dtype)
    adam(function, 0, beta1, beta2, epsilon)


def check_momentum(function: str, momentum: Scalar | None, *, nesterov: bool) -> None:
    """The options of momentum."""
    if momentum is not None:
        scalar(function, "momentum", momentum)
    elif nesterov:
        raise ValueError(f"{function}: `nesterov`: True, expected False without `momentum`.")


def check_moment_dtype(function: str, moment_dtype: DTypeLike | None) -> None:
    """None, or a real floating dtype with at least the range of float32: float16 has not."""
    try:
        dtype = np.dtype(np.float32 if moment_dtype is None else moment_dtype)
        fits = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp >= 128
    except TypeError:
        fits = False
    if not fits:
        expected = "a real floating dtype with the range of float32"
        raise TypeError(f"{function}: `moment_dtype`: {moment_dtype!r}, expected {expected}.")


def check_axes(function: str, norm_axes: PyTree, layer_axes: PyTree) -> tuple[PyTree, PyTree]:
    """The trees of axes as far as they are known without parameters."""
    return places.names(function, norm_axes), places.indices(function, layer_axes)


# ---- an entry per leaf -------------------------------------------------------------------------


def rates(
    leaves: Leaves,
    learning_rate: LearningRate,
    override: PyTree,
    done: jax.Array,
) -> list[Any]:
    """The learning rate of each leaf after `done` updates; `override` is that of this call."""
    if override is None:
        scheduled = trees.is_function(learning_rate)
        override = learning_rate(done) if scheduled else learning_rate
    rate = arguments.number(leaves.function, "learning_rate", override)
    row = leaves.options("learning_rate", rate)
    checks.broadcastable(row, leaves.updated_shapes())
    return leaves.gather(row.leaves)


def decays(leaves: Leaves, weight_decay: PyTree, weight_decay_mask: Mask) -> list[Any]:
    """The weight decay of each leaf; the Python number 0, which compiles to nothing, for none."""
    masked = mask(leaves, "weight_decay_mask", weight_decay_mask)
    if checks.is_number(weight_decay) and weight_decay == 0:
        return [0.0] * len(leaves.g)
    leaves.require_params("`weight_decay`")
    decay = arguments.number(leaves.function, "weight_decay", weight_decay)
    checks.one_element(Row.of(leaves.function, "weight_decay", decay))
    # Before it is spread over leaves: leaves that share an object share a number in the program.
    row = leaves.options("weight_decay", trees.map_leaves(lambda x: x.reshape(()), decay))
    entries = zip(row.leaves, masked, strict=True)
    return leaves.gather([x if use and x is not None else 0.0 for x, use in entries])


def with_decay(
    leaves: Leaves,
    direction: list[Any],
    weight_decay: PyTree,
    weight_decay_mask: Mask,
) -> list[Any]:
    """direction + weight_decay w"""
    row = decays(leaves, weight_decay, weight_decay_mask)
    return direction if leaves.w is None else methods.add_decay(direction, leaves.w, row)


def layers(leaves: Leaves, trust_ratio_mask: Mask, norm_axes: PyTree, layer_axes: PyTree) -> Layers:
    """The layers of each leaf, and whether they have a trust ratio."""
    leaves.check_buffers()
    names, indices = check_axes(leaves.function, norm_axes, layer_axes)
    cut, stacked = leaves.options("norm_axes", names), leaves.options("layer_axes", indices)
    reference = Row.of(leaves.function, "params", leaves.shapes).with_arrays()
    masked = mask(leaves, "trust_ratio_mask", trust_ratio_mask)
    return Layers(
        slots.in_arrays(leaves.slots, cut, stacked, reference),
        [slot.per_layer(masked) for slot in leaves.slots],
    )


def mask(leaves: Leaves, name: str, tree: Mask) -> list[bool]:
    """The bool of each leaf; False where nothing is to be updated."""
    if tree is None:
        return [True] * len(trees.flatten(leaves.shapes)[0])
    if trees.is_function(tree):
        tree = tree(trees.map_leaves(_shape_and_dtype, leaves.shapes))
    row = leaves.options(name, tree)
    for i, x in enumerate(row.leaves):
        if not (x is None or isinstance(x, (bool, np.bool_))):
            row.fail(i, TypeError, f"{checks.describe(x)}, expected a bool")
    return [bool(x) for x in row.leaves]


def _shape_and_dtype(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
