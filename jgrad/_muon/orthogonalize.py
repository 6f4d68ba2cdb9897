"""Newton-Schulz on its own: the nearest orthogonal matrix of each matrix in a tree."""

from typing import Any

import jax
from jax.typing import DTypeLike

from jgrad._arithmetic.rules import cast_back
from jgrad._layers.layer_axes import read_layer_axes
from jgrad._muon import batches, matrix_axes
from jgrad._muon.matrix_axes import read_output_axes
from jgrad._muon.newton_schulz import check_compute_dtype, read_coefficients
from jgrad._packed import packing
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.other_names import explained
from jgrad._trees.trees import PyTree

_NAME = "orthogonalize"


@explained
def orthogonalize(
    x: PyTree,
    *,
    coefficients: Any = "jordan",
    output_axes: PyTree = (-1,),
    layer_axes: PyTree = None,
    compute_dtype: DTypeLike | None = None,
) -> PyTree:
    """Each matrix with its singular values moved close to 1, its singular vectors kept.

        X = x / |x|, then for each (a, b, c):  A = X X^H;  X = a X + (b A + c A A) X

    with |.| the 2-norm of a matrix, computed without overflow or underflow, and X = 0 where x = 0.
    Matrices of equal shape are worked on together, whatever leaf they are in.

    Args:
      x: an array of a floating or complex dtype, with two axes or more, or a tree of them.
      coefficients: "jordan", with which singular values end between 0.68 and 1.13 if none was below
        a hundredth of |x|; "you", between 0.97 and 1.04; "polar_express", between 0.85 and 1.15;
        "deepseek_v4", 1 to three digits; or a sequence of triples, one for each step.
      output_axes: axes that are the outputs of a matrix: an int or a tuple of ints, or a prefix
        tree of those. What is neither here nor in `layer_axes` is input.
      layer_axes: axes with a matrix for each index: likewise, or None.
      compute_dtype: dtype to which factors of matrix products are rounded, such as bfloat16; sums
        are in float32. None for float32 or wider, in JAX's default precision of products.

    Returns:
      Arrays of the shapes and dtypes of `x`.

    Raises:
      ValueError: an array that is no matrix, axes that it does not have, or an unknown name.
      TypeError: a leaf that is no floating array, or an option of the wrong kind.

    Example:
      >>> x = {"query": jnp.ones((3, 2)), "key": jnp.ones((3, 2))}
      >>> found = jgrad.orthogonalize(x, coefficients="polar_express")
      >>> jax.tree.map(jnp.shape, found)
      {'key': (3, 2), 'query': (3, 2)}

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Amsel
      et al., "The Polar Express" (2025), algorithm 1.
    """
    packing.check_unpacked(_NAME, "x", x)
    arg = ArgLeaves.from_tree(_NAME, "x", checks.values_of(x)).with_arrays()
    for i, leaf in enumerate(arg.leaves):
        if not (leaf is None or checks.is_inexact(leaf)):
            arg.fail(i, TypeError, f"{checks.describe(leaf)}, expected a floating array")
    stacked = ArgLeaves.from_prefix(_NAME, "layer_axes", read_layer_axes(_NAME, layer_axes), "x", x)
    outputs = ArgLeaves.from_prefix(
        _NAME, "output_axes", read_output_axes(_NAME, output_axes), "x", x
    )
    given = arg._replace(leaves=[x is not None for x in arg.leaves])
    layers = matrix_axes.layers_of(given, stacked, arg)
    for i, own in enumerate(layers):
        if given.leaves[i]:
            matrix_axes.check_is_matrix(arg, i, own)
    axes = [own for own in matrix_axes.of_leaves(layers, outputs, given) if own is not None]
    found = iter(
        batches.orthogonalized(
            _NAME,
            [leaf for leaf in arg.leaves if leaf is not None],
            axes,
            coefficients=read_coefficients(_NAME, coefficients),
            compute_dtype=check_compute_dtype(_NAME, compute_dtype),
        )
    )
    new: list[jax.Array | None] = [None if leaf is None else next(found) for leaf in arg.leaves]
    return trees.flatten(x)[1].unflatten(cast_back(new, arg.leaves))
