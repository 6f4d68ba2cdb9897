"""What a user does with gradients before a transformation sees them, one share at a time.

A device of `pmap`, or of `shard_map` without a check, has gradients of its part of a batch, which
JAX does not sum. In an ordinary step their mean is a line behind `jax.grad`. Here that line is a
function of the gradients of a share, and the ordinary step calls it in the same way: of one layer
at a time, so that both forms of a step agree whatever it computes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jgrad._backward.portions import leaves_of_share, tree_of_share
from jgrad._trees import checks, shardings, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree, Structure

_NAME = "step_in_backward"

# (gradients of one layer, or of all leaves in no stack) -> gradients
OfGradients = Callable[[PyTree], PyTree]


def check_function(function: Any) -> None:
    """What the factory can say already."""
    if not (function is None or callable(function)):
        came = checks.describe(function)
        raise TypeError(f"{_NAME}: `gradients`: {came}, expected a function of gradients.")


def check_is_given(function: OfGradients | None) -> None:
    """An error where nobody sums the gradients of several devices, and nobody says so."""
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


def of_share(
    function: OfGradients,
    structure: Structure,
    positions: Sequence[int],
    gradients: Sequence[Any],
) -> list[Any]:
    """What the function makes of the gradients of one share.

    Args:
      function: of a user.
      structure: of the parameters.
      positions: of the leaves of the share among those of the parameters.
      gradients: of these leaves; None for a leaf that has none.
    """
    old = tree_of_share(structure, positions, gradients)
    new = function(old)
    checks.same_structure(_NAME, "gradients(g)", new, "g", old)
    arg = ArgLeaves.from_tree(_NAME, "gradients(g)", new)
    for i, (x, y) in enumerate(zip(trees.flatten(old)[0], arg.leaves, strict=True)):
        expected, came = checks.describe(x), checks.describe(y)
        if came != expected:
            arg.fail(i, TypeError, f"{came}, expected {expected}, as it was given")
    return leaves_of_share(structure, positions, new)


def of_all_shares(function: OfGradients, grads: PyTree, stacks: Sequence[Sequence[int]]) -> PyTree:
    """The same of all gradients: for each layer of each stack, then for all other leaves.

    Args:
      function: of a user.
      grads: of all parameters.
      stacks: the positions of the leaves of each.
    """
    leaves: list[Any] = jax.tree.leaves(grads)
    structure: Structure = jax.tree.structure(grads)
    rest = sorted({*range(len(leaves))}.difference(*stacks))
    for share in (*stacks, rest):
        # Integers have None, as in the backward pass.
        positions = [i for i in share if checks.is_inexact(leaves[i])]
        arrays = [leaves[i] for i in positions]
        of_arrays = functools.partial(of_share, function, structure, positions)
        if share is rest or not arrays:
            new = of_arrays(arrays)
        else:
            new = [x[:, 0] for x in jax.vmap(of_arrays)([x[:, None] for x in arrays])]
        for i, x in zip(positions, new, strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)
