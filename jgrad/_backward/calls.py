"""The arguments of a step: parameters, keywords that `tx` reads, a function of gradients.

Inside `pmap`, or `shard_map` with `check_vma=False`, each device has the gradients of its part of a
batch, which JAX does not sum. In an ordinary step, you average them in the line after `jax.grad`.
Here, this line is a function of the gradients of one share. The ordinary step also calls it for one
layer at a time, so that both kinds of step agree whatever it computes.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jgrad._arithmetic import elementwise, numerics
from jgrad._arithmetic.programs import traced
from jgrad._backward.losses import TracedLoss
from jgrad._backward.portions import leaves_of_share, tree_of_share
from jgrad._trees import checks, host_memory, shardings, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import known_names
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.trees import Structure
from jgrad._trees.unpromised import Unpromised
from jgrad._wrappers import inside

_NAME = "step_in_backward"

partial_eval = Unpromised(_NAME)
# Primitives of which random numbers are made.
_DRAWS = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
_OF_OPTAX = ("value", "grad", "value_fn")
# What JAX raises if Python code needs the value of a traced array.
_ASKS_PYTHON = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_call(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[..., PyTree],
    params: PyTree,
    state: PyTree,
    args: Sequence[PyTree],
    keywords: Mapping[str, PyTree],
) -> None:
    """Checks for a tree of parameters, and for keywords that nothing reads."""
    structure: Structure = jax.tree.structure(params)
    if jax.tree_util.treedef_is_leaf(structure):
        came, remedy = checks.describe(params), "put it in one, as in `{'layers': params}`"
        raise ValueError(f"{_NAME}: `params`: {came}, expected a tree of arrays: {remedy}.")
    arg = ArgLeaves.from_tree(_NAME, "params", params)
    for i, x in enumerate(arg.leaves):
        if x is not None and not _is_traceable(x):
            remedy = "expected an array, as in `eqx.filter(model, eqx.is_inexact_array)`"
            arg.fail(i, TypeError, f"{checks.describe(x)}, {remedy}")
    keywords = {name: x for name, x in keywords.items() if name != "loss"}  # the step provides it
    for name in sorted(keywords.keys() & _argument_names(loss, 1 + len(args))):
        expected = "expected by position, since keywords are for `tx.update`"
        raise TypeError(f"{_NAME}: `{name}`: an argument of `loss`, {expected}.")
    for name, x in sorted(keywords.items()):
        if not _is_traceable(x) and name not in {*known_names().KEYWORDS, *_OF_OPTAX}:
            expected = "expected numbers or arrays, since a program shows whether `tx` reads it"
            raise TypeError(f"{_NAME}: `{name}`: {checks.describe(x)}, {expected}.")
    shown = sorted(name for name, x in keywords.items() if _is_traceable(x))
    for name in _unread(shown, tx, params, state, keywords):
        expected = "expected one that it reads; arguments of `loss` are given by position"
        raise TypeError(f"{_NAME}: `{name}`: a keyword that `tx` does not read, {expected}.")


def _argument_names(function: Callable[..., object], count: int) -> set[str]:
    """Names of a function's arguments behind those given already, as far as Python knows them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return set()
    by_position = [x for x in parameters if x.kind is not x.KEYWORD_ONLY]
    named = [x for x in parameters if x not in by_position[:count]]
    return {x.name for x in named if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}


@jax.disable_jit(False)
def _unread(
    names: Sequence[str],
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    keywords: Mapping[str, PyTree],
) -> list[str]:
    """Those that an update does not read: a transformation hands on what it does not know."""
    traced = {name: keywords[name] for name in names}

    def update(traced: dict[str, PyTree]) -> PyTree:
        w, state_here = host_memory.to_device((params, state))
        grads = jax.tree.map(lambda x: numerics.zeros_like(x) if checks.is_inexact(x) else None, w)
        extra = {**loss_keywords(jnp.zeros(()), state_here), **keywords, **traced}
        return tx.update(grads, state_here, w, **extra)

    if not traced:
        return []
    try:
        jaxpr = jax.make_jaxpr(update)(traced).jaxpr
    except _ASKS_PYTHON:  # as `if is_last:` of a bool, which is read; of several it may be any
        alone = [[name] for name in names] if len(names) > 1 else []
        return [x for name in alone for x in _unread(name, tx, params, state, keywords)]
    are_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    read: Structure = jax.tree.structure(traced)
    return [name for name, xs in read.unflatten(are_read).items() if not any(jax.tree.leaves(xs))]


def _is_traceable(x: PyTree) -> bool:
    """Numbers and arrays, and not None, which stands for what a factory was given."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(
        checks.is_number(y) or checks.is_array(y) or isinstance(y, bool) for y in leaves
    )


def loss_keywords(value: jax.Array, state: PyTree) -> dict[str, jax.Array]:
    """What an update is told of the loss: without the loss scale that the state has for it."""
    reports = inside.reports(state)
    scales = [checks.value_of(x["loss_scale"]) for x in reports if "loss_scale" in x]
    if scales:
        scale = functools.reduce(jnp.maximum, host_memory.to_device(scales))
        x = numerics.wide(value)
        value = (x / scale.astype(x.dtype)).astype(value.dtype)
    return {"loss": value, "value": value}


# (gradients of one layer, or of leaves in no stack) -> gradients
OfGradients = Callable[[PyTree], PyTree]


def check_is_given(function: OfGradients | None) -> None:
    """An error if the gradients of several devices are neither summed nor known not to be."""
    axes = shardings.unknown_axes()
    if function is not None or not axes:
        return
    names = repr(axes[0] if len(axes) == 1 else axes)
    raise ValueError(
        f"{_NAME}: `gradients`: None inside `pmap`, or `shard_map` with `check_vma=False`, over "
        f"{names}, where JAX does not sum the gradients of all devices. Expected their mean, "
        f"`gradients=lambda g: jax.lax.pmean(g, {names})`; or `gradients=lambda g: g`, which says "
        "that each device has a model of its own, or a loss whose gradients are complete."
    )


def share_gradients(
    function: OfGradients,
    structure: Structure,
    positions: Sequence[int],
    gradients: Sequence[Leaf],
) -> list[Leaf]:
    """What the function makes of the gradients of one share.

    Args:
      function: of a user.
      structure: of the parameters.
      positions: of the leaves of the share among those of the parameters.
      gradients: of these leaves; None for a leaf that has none.
    """
    old = tree_of_share(structure, positions, gradients)
    for eqn in elementwise.inner_equations(traced(function, old)[0].jaxpr.eqns):
        if eqn.primitive.name in _DRAWS:
            came = f"`{eqn.primitive.name}`, which draws the same random bits for each layer"
            remedy = "expected none: add noise to all gradients at once, in the ordinary step"
            raise ValueError(f"{_NAME}: `gradients`: {came}; {remedy}.")
    new = function(old)
    checks.same_structure(_NAME, "gradients(g)", new, "g", old)
    arg = ArgLeaves.from_tree(_NAME, "gradients(g)", new)
    for i, (x, y) in enumerate(zip(trees.flatten(old)[0], arg.leaves, strict=True)):
        expected, came = checks.describe(x), checks.describe(y)
        if came != expected:
            arg.fail(i, TypeError, f"{came}, expected {expected}, as it was given")
    return leaves_of_share(structure, positions, new)


def all_gradients(function: OfGradients, grads: PyTree, loss: TracedLoss) -> PyTree:
    """The same of all gradients: for each layer of each stack, and for other leaves.

    Args:
      function: of a user.
      grads: of all parameters.
      loss: which says what the shares are.
    """
    leaves: list[Leaf] = jax.tree.leaves(grads)
    structure: Structure = jax.tree.structure(grads)
    cut_of = {i: x for call in loss.calls for i, x in zip(call.positions, call.cuts, strict=True)}
    stacks = [call.positions for call in loss.calls]
    rest = sorted({*range(len(leaves))}.difference(*stacks, *loss.early))
    behind = itertools.chain(*reversed([*zip(loss.early, stacks, strict=True)]))
    for share in filter(None, (*behind, rest)):
        # Integers have None, as in the backward pass.
        positions = [i for i in share if checks.is_inexact(leaves[i])]
        arrays = [leaves[i] for i in positions]
        new_gradients = functools.partial(share_gradients, function, structure, positions)
        if share not in stacks or not arrays:
            new = new_gradients(arrays)
        else:
            cuts = [cut_of[i] for i in positions]
            axes = [cut.axis for cut in cuts]
            layers = [
                x.reshape(*x.shape[:k], -1, n, *x.shape[k + 1 :])  # a layer keeps its axis
                for x, (k, n) in zip(arrays, cuts, strict=True)
            ]
            new = jax.vmap(new_gradients, (axes,), axes)(layers)
            new = [x.reshape(old.shape) for x, old in zip(new, arrays, strict=True)]
        for i, x in zip(positions, new, strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)
