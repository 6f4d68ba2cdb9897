"""Trees of arrays as one buffer per dtype, so that an update of a thousand leaves is one loop.

`pack` and `unpack` are linear, so gradients with respect to a packed tree are packed. They only use
JAX operations that have forward and reverse mode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from jgrad._layers.array_spec import ArraySpec
from jgrad._packed import array_spec
from jgrad._packed.buffers import join_codes, join_leaves, recoded, split_codes, split_leaves
from jgrad._packed.layouts import Layout, Span, layout_of
from jgrad._quantized.blocks import Blocks
from jgrad._quantized.codec import codec_of
from jgrad._trees import checks, forms, trees
from jgrad._trees.annotations import ArrayAxes, Count, Prefix, Tree
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.explained import explained
from jgrad._trees.host_memory import where_it_lies
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._trees.shardings import replicated
from jgrad._trees.trees import is_packed, map_packed, shapes

Array = jax.Array | Blocks  # of numbers, or of codes of 8 bits


@jax.tree_util.register_pytree_with_keys_class
class Packed(Generic[Tree]):
    """A tree of arrays packed into buffers, one per dtype.

    It is a pytree whose leaves are the buffers, so everything that works leaf by leaf works on it.
    The layout is static. `flax.serialization` saves it as the unpacked tree, if flax was imported
    before `pack` was called; for other file formats, call `unpack` before you save.

    Attributes:
      buffers: a dict from names of dtypes to arrays of shape (rows, 256). With `max_size`, large
        leaves stay unpacked, as "leaf 3" for the leaf at index 3; with `small_apart`, small ones
        have their own buffer, such as "float32 small".
      layout: a `Layout`, which says where each leaf is in the buffers.

    Example:
      >>> packed = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> jax.tree.map(jnp.shape, packed.buffers)
      {'float32': (2, 256)}
      >>> print(packed)
      Packed: 2 leaves, 8 elements, 98.4% padding
        float32 (2, 256)
          [0:1] ['b'] (2,)
          [1:2] ['w'] (3, 2)
    """

    def __init__(self, buffers: Mapping[str, Leaf], layout: Layout) -> None:
        self.buffers = dict(buffers)
        self.layout = layout

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, PyTree]], Layout]:
        return ((GetAttrKey("buffers"), self.buffers),), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[PyTree]) -> Packed[Any]:
        # Buffers are not checked, because JAX puts objects of all kinds there.
        self = object.__new__(cls)
        (self.buffers,) = children
        self.layout = layout
        return self

    @property
    def num_leaves(self) -> int:
        """Those of the unpacked tree."""
        return len(self.layout.spans)

    def __jgrad_arrays__(self, first: int) -> list[ArraySpec]:
        """What each buffer stands for; the first leaf has this position among those of a tree."""
        return array_spec.specs_of_layout(self.layout, first)

    def __jgrad_shapes__(self, *, as_stored: bool) -> PyTree:
        """The unpacked tree, with shapes and dtypes: see `trees.shapes`."""
        buffers = self.buffers.items()
        if any(isinstance(b, Blocks) and hasattr(b.codes, "dtype") for _, b in buffers):
            leaves_of = functools.partial(_leaves, as_stored=as_stored)
            return jax.eval_shape(functools.partial(where_it_lies, leaves_of), self)
        dtypes = {
            k: getattr(b, "dtype", None) for k, b in buffers if b is None or hasattr(b, "dtype")
        }
        leaves, structure = trees.flatten(self.layout.tree(dtypes))
        for name, b in buffers:  # of a leaf as it is, maybe a part of it, or with fewer elements
            i = self.layout.unpacked_leaf(name)
            if i is not None and leaves[i] is not None and hasattr(b, "dtype"):
                leaves[i] = jax.ShapeDtypeStruct(b.shape, b.dtype)
        return structure.unflatten(leaves)

    def __contains__(self, name: object) -> bool:
        """Whether there is a buffer of this name; flax's `TrainState` asks trees for names."""
        return name in self.buffers

    def __repr__(self) -> str:
        return f"Packed: {self.layout!r}"


Like = TypeVar("Like", bound="Prefix | Packed[Any]")
Packed.__module__ = "jgrad"  # where users import it from, and what a pickle names


@overload
def pack(
    tree: Tree,
    *,
    layer_axes: ArrayAxes = None,
    multiple_of: Count = 1,
    max_size: Count | None = None,
    small_apart: bool = False,
) -> Packed[Tree]: ...
@overload
def pack(tree: PyTree, *, like: Like) -> Like: ...
@explained
def pack(
    tree: PyTree,
    *,
    layer_axes: ArrayAxes = None,
    multiple_of: Count = 1,
    max_size: Count | None = None,
    like: PyTree = None,
    small_apart: bool = False,
) -> PyTree:
    """Packs a tree of floating arrays into one buffer per dtype.

        buffers[dtype] = [w_1, 0, ..., w_2, 0, ...], each layer padded to rows of 256

    An update of a packed model is one loop over a long array, instead of one for each leaf. Packing
    is linear, and `unpack` reverses it bit for bit. Leaves of the same shape are next to each
    other.

    jgrad's transformations work on packed trees as on any other, with options given for the
    unpacked tree. Transformations of other libraries must be elementwise and map 0 to 0, because
    padding has to stay zero; this rules out noise. optax's masks and labels only work on the
    unpacked tree, so put them around `pack_small`.

    Args:
      tree: a tree of floating or complex arrays of any shapes, or None; with `like`, any tree that
        `unpack` returned.
      layer_axes: axes along which a leaf stacks layers, as for `lax.scan`: an int, a tuple of ints,
        None, or a prefix tree of these. Each layer then has its own rows, so LARS and LAMB don't
        need their own `layer_axes`; if they are given, they have to agree.
      multiple_of: makes the number of rows of each buffer a multiple of this, so that it can be
        sharded over that many devices.
      max_size: leaves with more elements stay unpacked, each as a buffer of its own shape; None
        packs all leaves. Large leaves gain nothing from packing, and `unpack` has to copy them, so
        if they make up most of the model, pass a few thousand. `muon` and `soap` don't accept
        packed matrices: for these, choose less than the size of the smallest matrix.
      like: a tree with `Packed` nodes, such as a state, or what `jax.eval_shape` returns for it.
        The subtrees of `tree` at the positions of these nodes are packed in their layouts;
        everything else is left unchanged.
      small_apart: gives leaves with fewer than 4096 elements a separate buffer, such as "float32
        small". Whether moments are stored in 8 bits is decided for a whole buffer, so a leaf of
        4096 elements or more puts everything in its buffer in 8 bits. With this option, small
        leaves stay in float32, as in an unpacked tree, at the cost of one more kernel per step.

    Returns:
      A `Packed`; with `like`, a tree with the structure of `like`.

    Raises:
      TypeError: a leaf is not a floating array, or is already packed.
      ValueError: structures or shapes do not match, or options are combined with `like`.

    Example:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
      >>> packed = jgrad.pack(params)
      >>> loss = lambda packed: jnp.sum(jgrad.unpack(packed)["w"] ** 2)
      >>> grads = jax.grad(loss)(packed)
      >>> grads.buffers["float32"].shape
      (2, 256)
    """
    tree = checks.values_of(tree)
    if like is None:
        check_unpacked("pack", "tree", tree)
        checks.count("pack", "multiple_of", multiple_of)
        if max_size is not None:
            checks.count("pack", "max_size", max_size, low=0)
        checks.boolean("pack", "small_apart", small_apart)
        layout, leaves = layout_of(
            "pack", tree, layer_axes, multiple_of, max_size, small_apart=small_apart
        )
        return where_it_lies(functools.partial(fill, layout), leaves)
    options = (layer_axes, max_size)
    if multiple_of != 1 or small_apart is not False or any(x is not None for x in options):
        raise ValueError("pack: `like`: it has a layout already, expected no other option with it.")
    checks.same_structure("pack", "tree", tree, "like", shapes(like))

    def as_in_like(path: KeyPath, node: PyTree, part: PyTree) -> PyTree:
        if node is None and part is not None:
            where = checks.at(jax.tree_util.keystr(path))
            came, expected = checks.describe(part), "None, as in `like`"
            raise ValueError(f"pack: `tree`{where}: {came}, expected {expected}.")
        return where_it_lies(functools.partial(_again, node), part) if is_packed(node) else part

    is_leaf = lambda x: x is None or is_packed(x)  # noqa: E731
    packed = jax.tree_util.tree_map_with_path(as_in_like, like, tree, is_leaf=is_leaf)
    return forms.as_stored(packed, like)


@overload
def unpack(tree: Packed[Tree]) -> Tree: ...
@overload
def unpack(tree: PyTree) -> PyTree: ...
def unpack(tree: PyTree) -> PyTree:
    """Returns the tree that was packed, with the dtypes of the buffers.

        unpack(pack(tree)) = tree

    If you call it inside a loss, the gradient with respect to `packed` is a `Packed`. Forward mode
    works as well.

    Args:
      tree: a `Packed`, or any tree that contains some, such as the state of an optimizer for packed
        parameters.

    Returns:
      The tree, where each `Packed` is replaced by its tree of arrays.

    Raises:
      ValueError: the shape of a buffer does not match the layout, for example outside of the
        `jax.vmap` that it was packed in.

    Example:
      >>> packed = jgrad.pack({"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> state = jgrad.adam(1e-3).init(packed)
      >>> params, state = jgrad.unpack((packed, state))
      >>> params["w"].shape, state.mw["w"].shape
      ((3, 2), (3, 2))
    """
    return forms.to_codes(map_packed(functools.partial(where_it_lies, _leaves), tree))


def with_layouts(tree: PyTree, relabeled: Callable[[Layout], Layout]) -> PyTree:
    """The same buffers under other layouts."""
    return map_packed(lambda x: Packed(x.buffers, relabeled(x.layout)), tree)


def check_unpacked(function: str, name: str, tree: PyTree) -> None:
    """There is no `Packed` in the tree: packed again, its buffers would be taken for leaves."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed):
        if isinstance(x, Packed):
            where = checks.at(jax.tree_util.keystr(path))
            remedy = "expected a tree of arrays; `unpack` it first"
            raise TypeError(f"{function}: `{name}`{where}: packed already, {remedy}.")


def layout_in(tree: PyTree) -> Layout | None:
    """The layout of the first `Packed` in a tree; None where there is none."""
    nodes = filter(is_packed, jax.tree.leaves(tree, is_leaf=is_packed))
    return next((x.layout for x in nodes), None)


def fill(layout: Layout, leaves: Sequence[Array | None]) -> Packed[Any]:
    """The leaves in buffers, each layer behind the one before."""
    _register_with_flax()
    buffers: dict[str, Array | None] = {}
    for name, shape in layout.shapes:
        positions, spans = zip(*layout.within(name), strict=True)
        first = leaves[positions[0]]
        if spans[0].is_unpacked or first is None:
            buffers[name] = first
            continue
        parts = jax.tree.map(replicated, [leaves[i] for i in positions])
        join = join_codes if isinstance(first, Blocks) else join_leaves
        buffers[name] = join(spans, parts, shape[0])
    return Packed(buffers, layout)


def _register_with_flax() -> None:
    """Lets `flax.serialization` save what is packed as the tree that was packed.

    So a file does not depend on the layout, and is that of a state that is not packed. Nothing is
    imported here: a program that saves in this way has imported flax before it makes a state.
    """
    flax: Any = sys.modules.get("flax.serialization")
    if flax is not None and not flax.is_serializable(Packed):
        flax.register_serialization_state(
            Packed,
            lambda packed: flax.to_state_dict(unpack(packed)),
            lambda packed, saved: pack(flax.from_state_dict(shapes(packed), saved), like=packed),
        )


def _leaves(packed: Packed[Any], *, as_stored: bool = False) -> PyTree:
    """The tree in the buffers, by one split of each."""
    layout = packed.layout
    leaves: list[Array | None] = [None] * len(layout.spans)
    for name, shape in layout.shapes:
        buffer = packed.buffers[name]
        positions, spans = zip(*layout.within(name), strict=True)
        if spans[0].is_unpacked:
            parts = [buffer]
        elif buffer is None:
            parts = [None] * len(spans)
        else:
            _check_buffer(name, buffer, shape)
            buffer = jax.tree.map(replicated, forms.to_codes(buffer))
            if isinstance(buffer, Blocks):
                parts = split_codes(spans, buffer, as_stored=as_stored)
            else:
                parts = split_leaves(spans, buffer)
        for i, part in zip(positions, parts, strict=True):
            leaves[i] = part
    return layout.structure.unflatten(leaves)


def _check_buffer(name: str, buffer: Array, shape: tuple[int, ...]) -> None:
    """A buffer of the shape in the layout."""
    if not ((checks.is_array(buffer) or isinstance(buffer, Blocks)) and buffer.shape == shape):
        raise ValueError(
            f"unpack: `tree`: {checks.describe(buffer)} as the buffer {name!r}, expected an array "
            f"of shape {shape}; map `unpack` over models as they were mapped over, and for shapes "
            "alone call `jax.eval_shape(unpack, tree)`."
        )
    if isinstance(buffer, Blocks) and buffer.scale.shape != (shape[0], 1):
        came = f"`scale` of shape {buffer.scale.shape} in the buffer {name!r}"
        expected = f"a number for each row, of shape {(shape[0], 1)}"
        raise ValueError(f"unpack: `tree`: {came}, expected {expected}.")


def _again(like: Packed[Any], tree: PyTree) -> Packed[Any]:
    """A tree of the structure and shapes of a layout, in buffers; each buffer of one dtype."""
    layout = like.layout
    arg = ArgLeaves.from_tree("pack", "tree", forms.to_codes(tree)).with_arrays()
    leaves = list(arg.leaves)
    expected: list[Leaf] = [None] * len(leaves)
    for name, buffer in like.buffers.items():
        members = layout.within(name)
        dtype = getattr(leaves[members[0][0]], "dtype", None)
        for i, span in members:
            if problem := _problem(buffer, span, leaves[i], dtype):
                arg.fail(i, TypeError, f"{checks.describe(leaves[i])}, expected {problem}")
            packed = jax.ShapeDtypeStruct(span.layers.shape, span.dtype)
            expected[i] = buffer if buffer is None or span.is_unpacked else packed
    for i, leaf in enumerate(layout.spans):
        if leaf is None and leaves[i] is not None:
            arg.fail(i, TypeError, f"{checks.describe(leaves[i])}, expected None")
    checks.same_shapes(arg, arg._replace(name="like", leaves=expected))
    for name, buffer in like.buffers.items():
        if isinstance(buffer, Blocks):
            for i, span in layout.within(name):
                leaves[i] = recoded(span, leaves[i], codec_of(buffer))
    return fill(layout, leaves)


def _problem(buffer: Array | None, span: Span, x: PyTree, dtype: np.dtype | None) -> str:
    """What was expected of a leaf for a buffer, whose first leaf has this dtype; "" if it fits."""
    if buffer is None:
        return "" if x is None else "None, as in `like`"
    if forms.is_of_method(buffer) or forms.is_of_method(x):
        return "" if isinstance(x, type(buffer)) else checks.describe(buffer)
    if isinstance(buffer, Blocks):
        codec = codec_of(buffer)
        is_float32 = getattr(x, "dtype", None) == jnp.float32
        fits = codec_of(x) == codec if isinstance(x, Blocks) else is_float32
        return "" if fits else f"an array of float32, or Blocks with codes of {codec.dtype.name}"
    if span.is_unpacked:
        is_floating = jnp.issubdtype(getattr(buffer, "dtype", np.int32), jnp.inexact)
        fits = checks.is_numeric(x) and checks.is_inexact(x) == is_floating
        return "" if fits else checks.describe(buffer)
    if isinstance(x, Blocks):
        return "an array; make it one by `carry_over(tree, like=like)`"
    if not checks.is_inexact(x):
        return "a floating array"
    return "" if x.dtype == dtype else f"{dtype} as beside it"
