"""Which leaves of a model are matrices between hidden layers, by their names and shapes."""

from __future__ import annotations

import re

import jax.numpy as jnp

from jgrad._inputs import matrix_options
from jgrad._inputs.by_path import check_parameters
from jgrad._layers.layer_axes import Axes, of_leaves, read_layer_axes
from jgrad._layers.matrix_axes import MatrixAxes
from jgrad._trees import checks, leaf_names, trees, variables
from jgrad._trees.annotations import ArrayAxes
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.protocols import KeyPath, Leaf, PyTree

_NAME = "hidden_matrices"

EXCLUDED = (
    *("embed", "emb", "unembed", "wte", "wpe"),  # `embed_tokens`, `tok_emb`, `unembedding`
    *("head", "logits", "classifier", "router"),
    *("norm", "ln", "bias", "scale", "gain"),
)

# Between parts of a flat key: "model.embed_tokens.weight".
_BETWEEN = re.compile(r"[.:\s]|__")

# Words inside of a part: `lm_head`, `LayerNorm_0`, `LMHead`, `q_proj`.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


# Words at the end that only mean an array: `lm_head_weight`, `embedding_table`.
_ARRAY = ("kernel", "matrix", "table", "w", "weight", "weights")

_OUTPUTS_FIRST = "weight"  # as PyTorch and equinox name a kernel of (out, in)

_VECTOR = re.compile(r"[bg]\d*")  # a bias or a gain, but also one of two factors

_MULTI_HEAD = re.compile("multi_?head", re.IGNORECASE)  # a kind of attention, not a head


class HiddenMatrices:
    """What `hidden_matrices` returns: a function of parameters, or of their shapes.

    Example:
      >>> matrices: jgrad.HiddenMatrices = jgrad.hidden_matrices()
      >>> matrices({"w": jnp.ones((3, 2)), "head": jnp.ones((2, 9))})
      {'head': False, 'w': True}
    """

    def __init__(self, exclude: tuple[str, ...], layer_axes: ArrayAxes) -> None:
        self._exclude = exclude
        self._layer_axes = read_layer_axes(_NAME, layer_axes)
        options = (("exclude", exclude, EXCLUDED), ("layer_axes", layer_axes, None))
        self._shown = [f"{name}={x!r}" for name, x, default in options if x != default]

    def __call__(self, params: PyTree) -> PyTree:
        """A tree of bools like the parameters; None for None."""
        leaves, structure = trees.flatten(trees.shapes(params))
        rows = self._rows(params)
        chosen = {i for i, (_, _, reason) in rows.items() if not reason}
        pairs = enumerate(leaves)
        return structure.unflatten([None if x is None else i in chosen for i, x in pairs])

    def describe(self, params: PyTree, *, output_axes: ArrayAxes = None) -> str:
        """A line for each array: Muon or Adam, its path and shape, and the reason for the choice.

        Matrices are chosen by their shapes alone, so check whether a name should have been
        excluded, and whether outputs are along the axes shown.

        Args:
          params: the parameters, or their shapes.
          output_axes: those that you pass to `muon`, if you do. By default the last axis is shown,
            with a remark if the name of a leaf suggests a matrix with outputs first.
        """
        rows = self._rows(params)
        tree = trees.shapes(checks.values_of(params))
        axes = read_layer_axes(_NAME, output_axes, "output_axes")
        named_axes = ArgLeaves.from_prefix(_NAME, "output_axes", axes, "params", tree)
        named = [
            i
            for i, (_, _, reason) in rows.items()
            if not reason and named_axes.leaves[i].values != ()
        ]
        shapes = ArgLeaves.from_tree(_NAME, "params", tree).with_arrays()
        layers = of_leaves(self._stacked(tree).at(named), shapes.at(named))
        pairs = zip(named, layers, strict=True)  # an error where `muon` would raise it
        matrices = {i: matrix_options.of_leaf(i, x, named_axes, shapes) for i, x in pairs}
        table = [
            ("Adam", path, str(shape), f"by {reason}")
            if reason
            else (
                "Muon",
                path,
                str(shape),
                f"by shape alone; {_outputs(path, shape, matrices.get(i))}",
            )
            for i, (path, shape, reason) in rows.items()
        ]
        return leaf_names.table(table)

    def _stacked(self, tree: PyTree) -> ArgLeaves:
        return ArgLeaves.from_prefix(_NAME, "layer_axes", self._layer_axes, "params", tree)

    def __repr__(self) -> str:
        return f"{_NAME}({', '.join(self._shown)})"

    def _rows(self, params: PyTree) -> dict[int, tuple[str, tuple[int, ...], str]]:
        """(path, shape, why it is no matrix or "") of each array, by its position in the tree."""
        tree = trees.shapes(checks.values_of(params))
        check_parameters(_NAME, tree)
        stacked = self._stacked(tree)
        return {
            i: (leaf_names.shown(path), jnp.shape(x), self._reason(path, x, stacked.leaves[i]))
            for i, (path, x) in enumerate(variables.leaves_with_paths(tree, trees.is_leaf))
            if not (x is None or checks.is_no_parameter(x))
        }

    def _reason(self, path: KeyPath, x: Leaf, axes: Axes) -> str:
        """Why an array is no hidden matrix; empty where it is one."""
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return f"dtype: {jnp.result_type(x)}"
        rank = jnp.ndim(x) - len(axes.values)
        if rank < 2:
            layers = " in each layer" if axes.values else ""
            return f"shape: {'one' if rank == 1 else 'no'} axis{layers}"
        for part in (part for key in leaf_names.keys_of(path) for part in _BETWEEN.split(key)):
            for name in self._exclude:
                if _is_named(part, name):
                    return f"name: {name!r} in {part!r}"
        return ""


HiddenMatrices.__module__ = "jgrad"  # where users import it from


@explained
def hidden_matrices(
    *, exclude: list[str] | tuple[str, ...] = EXCLUDED, layer_axes: ArrayAxes = None
) -> HiddenMatrices:
    """Chooses the hidden matrices of a model by names and shapes, for `muon` and `soap`.

        a leaf is a matrix:  rank - len(layer_axes) >= 2, and no part of its path is excluded

    Embeddings, heads, routers, norms and biases are left to Adam. This relies on their names, so
    check what was chosen: `print(hidden_matrices().describe(params))`.

    Args:
      exclude: words that replace the default ones. A part of a path is excluded if its first or its
        last word begins or ends with one of these: "embed" excludes `token_embedding` and
        `unembed`, "norm" excludes `LayerNorm_0` and `input_layernorm`, and "head" excludes
        `lm_head` and `lm_head_weight`, but not `MultiHeadAttention_0`. Within a key, dots, slashes,
        colons and double underscores separate parts, and so do the entries of a tuple. Capitals,
        underscores and digits separate words, whose case is ignored.
      layer_axes: axes along which a leaf stacks layers, as in `muon`: an int, a tuple of ints,
        None, or a prefix tree of these. They don't count towards the rank of a matrix.

    Returns:
      A function of the parameters, or of their `jax.ShapeDtypeStruct`s, that returns a tree of
      bools. Its method `describe(params, *, output_axes=None)` returns a table of the choices.

    Raises:
      TypeError: an option has the wrong type; from the returned function: `params` is a number or
        an array of integers instead of a tree of parameters.

    Example:
      >>> params = {"embed": jnp.ones((9, 3)), "mlp": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}}
      >>> matrices = jgrad.hidden_matrices()
      >>> print(matrices.describe(params))
      Adam  embed  (9, 3)  by name: 'embed' in 'embed'
      Adam  mlp/b  (2,)    by shape: one axis
      Muon  mlp/w  (3, 2)  by shape alone; outputs: axis 1

    Source: leaves are chosen as the README of Keller Jordan's `Muon` (2024) advises.
    """
    is_words = isinstance(exclude, (list, tuple)) and all(isinstance(x, str) for x in exclude)
    if not is_words:
        expected = "a list or a tuple of words"
        raise TypeError(f"{_NAME}: `exclude`: {checks.describe(exclude)}, expected {expected}.")
    for name in exclude:
        if _WORDS.findall(name.lower()) != [name.lower()]:
            expected = "one word of letters, such as 'head'"
            raise ValueError(f"{_NAME}: `exclude`: {name!r}, expected {expected}.")
    return HiddenMatrices(tuple(exclude), layer_axes)


def _outputs(path: str, shape: tuple[int, ...], matrix: MatrixAxes | None) -> str:
    """Which axes of a matrix are outputs, and whether its name says something else."""
    axes = matrix.outputs if matrix else (len(shape) - 1,)
    text = f"outputs: {'axis' if len(axes) < 2 else 'axes'} {', '.join(map(str, axes))}"
    name = _BETWEEN.split(path)[-1].rpartition("/")[2]
    if _VECTOR.fullmatch(name) and len(shape) == 2:
        return f"{text}; if a vector of each layer: `hidden_matrices(layer_axes=...)`"
    if matrix or name != _OUTPUTS_FIRST:
        return text
    return f"{text}; if of PyTorch or equinox, (out, in): `output_axes=0`"


def _is_named(text: str, name: str) -> bool:
    """Whether the first or the last word begins or ends with the name."""
    words = [word.lower() for word in _WORDS.findall(_MULTI_HEAD.sub("", text))]
    while len(words) > 1 and words[-1] in _ARRAY:
        words.pop()
    return any(
        word.startswith(name.lower()) or word.endswith(name.lower())
        for word in words[:1] + words[-1:]
    )
