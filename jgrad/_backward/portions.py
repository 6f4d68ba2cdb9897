"""Which part of the parameters and of a state belongs to one layer of a stack.

A transformation gets a layer as a stack of one: its leaves keep a first axis, of length 1, and all
other leaves are None, so `layer_axes=0` means the same for a layer as for the stack. To find which
arrays of a state belong to a stack, and along which axis they are cut, `tx.init` is traced for the
leaves of the stack alone, and again for a stack of many times as many layers.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from jgrad._trees import checks, forms, host_memory, shares, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.protocols import KeyPath, Leaf, PyTree
from jgrad._trees.shares import Share
from jgrad._trees.told import telling
from jgrad._trees.trees import Structure

_NAME, _INIT = "step_in_backward", "tx.init(params)"

# A stack with this many times as many layers: if blocks of 256 elements cross layers, an array of
# scales does not become this many times as long.
_MANY = 256

_OF_NNX = "in flax nnx, `nnx.as_pure` of `nnx.state(model, nnx.Param)` and `optimizer.opt_state`"

_BLOCKS = (
    "expected the same for each layer, and no 8-bit block with elements of two layers: make {} a "
    "multiple of 256 elements, or use `layer_axes={}` where the method has it, or `full_precision` "
    "for this leaf"
)


class Cut(NamedTuple):
    """Where an array is cut into layers.

    Attributes:
      axis: along which the layers follow each other.
      length: of each along it.
    """

    axis: int
    length: int

    def out_of(self, x: jax.Array, i: jax.Array | int | None) -> jax.Array:
        """Layer `i`; for None all of it."""
        if self is SAME or i is None:
            return x
        return jax.lax.dynamic_slice_in_dim(x, i * self.length, self.length, self.axis)

    def grown(self, x: jax.ShapeDtypeStruct, layers: int) -> jax.ShapeDtypeStruct:
        """The array with so many layers."""
        if self is SAME:
            return x
        shape = *x.shape[: self.axis], layers * self.length, *x.shape[self.axis + 1 :]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def put(self, x: jax.Array, layer: jax.Array, i: jax.Array | int) -> jax.Array:
        """The array with layer `i`."""
        if self is SAME:
            return layer
        return jax.lax.dynamic_update_slice_in_dim(x, layer, i * self.length, self.axis)


SAME = Cut(-1, 0)  # of what has no layers, such as a leaf in no stack, or the rate of a stack


class Portion(NamedTuple):
    """What a share has.

    Attributes:
      positions: of its leaves among those of the parameters.
      weight_cuts: where each leaf is cut.
      layers: how many; None of leaves in no stack. Slices of rows are layers, too.
      structure: of its state, when it is alone.
      cuts: for each array of that the position in the whole state, and where it is cut; None for
        an array that is another share's.
    """

    positions: tuple[int, ...]
    weight_cuts: tuple[Cut, ...]
    layers: int | None
    structure: Structure
    cuts: list[tuple[int, Cut | None]]

    @property
    def owned(self) -> list[bool]:
        """Whether each array of its state is its own."""
        return [cut is not None for _, cut in self.cuts]

    @property
    def are_of_leaves(self) -> list[bool]:
        """Whether each array of its state is of its leaves alone, by layers if they have some."""
        whole = None if self.layers is None else SAME
        return [cut is not None and cut is not whole for _, cut in self.cuts]

    def without_those_of(self, rest: "Portion") -> "Portion":
        """The same, which owns of what has no layers only what is not that of the rest."""
        others = {i for i, _ in rest.cuts}
        cuts = [(i, None if cut is SAME and i in others else cut) for i, cut in self.cuts]
        return self._replace(cuts=cuts)

    @property
    def owned_cuts(self) -> list[tuple[int, Cut]]:
        """Where these are."""
        return [(i, cut) for i, cut in self.cuts if cut is not None]


def _shapes(tree: PyTree) -> PyTree:
    """The types of the arrays of a tree, with those of codes for words."""

    def shape_of(x: Leaf) -> Leaf:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if checks.is_array(x) else x

    return forms.to_codes(jax.tree.map(shape_of, tree))


def not_packed(name: str, tree: PyTree) -> None:
    """No packed trees: a buffer has rows of all layers."""
    if trees.any_packed(tree):
        remedy = "expected the tree itself, since a buffer mixes all layers: call `unpack`"
        raise ValueError(f"{_NAME}: `{name}`: a packed tree, {remedy}.")


def tree_of_share(
    structure: Structure, positions: Iterable[int], leaves: Iterable[object]
) -> PyTree:
    """A tree of that structure with these leaves, and None for all others."""
    entries: list[object] = [None] * structure.num_leaves
    for i, x in zip(positions, leaves, strict=True):
        entries[i] = x
    return structure.unflatten(entries)


def leaves_of_share(structure: Structure, positions: Iterable[int], tree: PyTree) -> list[Leaf]:
    """The leaves of such a tree, in the order of the positions, which need not be the tree's."""
    leaves = structure.flatten_up_to(tree)
    return [leaves[i] for i in positions]


class Whole:
    """A transformation, all parameters and the whole state, of which shares have portions.

    Attributes:
      tx: the transformation.
      shapes: of the parameters, by path.
      structure: of the parameters.
      state_shapes: those of the arrays of the state, with codes for words.
    """

    def __init__(
        self, tx: optax.GradientTransformationExtraArgs, params: PyTree, state: PyTree
    ) -> None:
        self.tx, self.shapes, self._state = tx, shares.shapes_of(params), state
        self.structure: Structure = jax.tree.structure(params)
        self._stored = [np.shape(x) for x in jax.tree.leaves(state)]
        arrays = jax.tree_util.tree_leaves_with_path(_shapes(state))
        self._position_of = {path: i for i, (path, _) in enumerate(arrays)}
        shapes = [np.shape(x) for _, x in arrays]
        self.state_shapes = ArgLeaves(
            _NAME, "state", shapes, lambda: list(map(jax.tree_util.keystr, self._position_of))
        )

    def stack(
        self, positions: Sequence[int], cuts_of_leaves: Sequence[Cut], layers: int
    ) -> Portion:
        """That of a stack."""
        begun = functools.partial(self._begun, positions, 0, cuts_of_leaves)
        axes_of_leaves = [cut.axis for cut in cuts_of_leaves]
        some, structure = begun(layers)
        many, _ = begun(layers * _MANY)
        cuts: list[tuple[int, Cut | None]] = []
        for path, x in some.items():
            i = self._checked_position(path, x.shape, axes_of_leaves[0])
            others, count = many, layers * _MANY
            if path not in many:  # not yet large enough for 8 bits: as with one layer
                others, count = begun(1)[0], 1
            other = others[path].shape
            axes = [k for k, (a, b) in enumerate(zip(x.shape, other, strict=True)) if a != b]
            if not axes and count > 1:
                cuts.append((i, SAME))
                continue
            axis = axes[0] if axes else 0
            grows = other[axis] * layers == x.shape[axis] * count
            if getattr(path[-1], "name", "") == "scale" and len(other) == 1 and any(axes_of_leaves):
                grows = False  # blocks of a flattened leaf, whose layers are not contiguous
            if len(axes) > 1 or not grows or x.shape[axis] % layers:
                came = f"shape {x.shape} of {layers} layers"
                k = max(axes_of_leaves)
                expected = _BLOCKS.format("the last axis" if k else "each layer", k)
                self.state_shapes.fail(i, ValueError, f"{came}, {expected}")
            cuts.append((i, self._as_stored(i, Cut(axis, x.shape[axis] // layers))))
        return Portion(tuple(positions), tuple(cuts_of_leaves), layers, structure, cuts)

    def _as_stored(self, i: int, cut: Cut) -> Cut:
        """Where an array is cut, of which four rows may be one of words."""
        rows, rows_of_codes = (x[i][cut.axis] for x in (self._stored, self.state_shapes.leaves))
        length, rest = divmod(cut.length * rows, rows_of_codes)
        if rest:
            came = "codes of several layers in a word, as `offload` has them in host memory"
            expected = "expected layers along the first axis, or codes as `unpack` makes them"
            self.state_shapes.fail(i, ValueError, f"{came}, {expected}")
        return Cut(cut.axis, length)

    def rows(self, i: int) -> Portion | None:
        """That of leaf `i`, whose slices of rows are layers; None where it cannot be cut so."""
        shape = list(self.shapes.values())[i].shape
        count = host_memory.slices(shape)
        if count is None:
            return None
        try:
            return self.stack([i], [Cut(0, shape[0] // count)], count)
        except ValueError:  # an array of its state is not by rows
            return None

    def leaves(self, positions: Sequence[int]) -> Portion:
        """That of leaves in no stack, and all that is of no layer."""
        weight_cuts = (SAME,) * len(positions)
        some, structure = self._begun(positions, None, weight_cuts, 1)
        cuts: list[tuple[int, Cut | None]] = [
            (self._checked_position(path, x.shape), SAME) for path, x in some.items()
        ]
        return Portion(tuple(positions), weight_cuts, None, structure, cuts)

    def rest(self, portions: Sequence[Portion]) -> Portion:
        """That of all leaves in no other."""
        taken = {i for portion in portions for i in portion.positions}
        rest = self.leaves([i for i in range(self.structure.num_leaves) if i not in taken])
        here = {i for portion in (rest, *portions) for i, _ in portion.cuts}
        for i in range(len(self._stored)):
            if i not in here:
                came = "an array that `tx.init` makes of no layer, nor of all leaves in no stack"
                expected = "expected one of all leaves at once to be left out"
                self.state_shapes.fail(i, ValueError, f"{came}; {expected}")
        return rest

    def _begun(
        self, positions: Sequence[int], layer: int | None, cuts: Sequence[Cut], layers: int
    ) -> tuple[dict[KeyPath, jax.ShapeDtypeStruct], Structure]:
        """The arrays of a new state of some leaves, by path, and its structure.

        Args:
          positions: of the leaves.
          layer: which layer they are; None for what is in no stack.
          cuts: where each leaf has its layers.
          layers: how many they are to have.
        """
        shapes = list(self.shapes.values())
        columns = zip(map(shapes.__getitem__, positions), cuts, strict=True)
        leaves = [cut.grown(x, layers) for x, cut in columns]
        with telling(share=Share(layer, shapes=self.shapes, begins=True)):
            state = self._init(tree_of_share(self.structure, positions, leaves))
        arrays, structure = jax.tree_util.tree_flatten_with_path(state)
        return dict(arrays), structure

    def _init(self, shapes: PyTree) -> PyTree:
        # A new function, because JAX caches traces, and does not compare what is told.
        return forms.to_codes(jax.eval_shape(functools.partial(self.tx.init), shapes))

    def _checked_position(self, path: KeyPath, shape: tuple[int, ...], axis: int = 0) -> int:
        """Of the array of the state with that path and shape, which may be of layers there."""
        i = self._position_of.get(path, -1)
        shape_here = self.state_shapes.leaves[i] if path in self._position_of else None
        if shape_here != shape:
            not_packed("state", self._state)
            with telling(stacks={}):
                new = self._init(self.structure.unflatten(self.shapes.values()))
            remedy = f"pass `{_INIT}`, or what a step made of it; {_OF_NNX}"
            checks.same_structure(_NAME, "state", self._state, _INIT, new, remedy=remedy)
            came = "nothing" if shape_here is None else f"shape {shape_here}"
            where = checks.at(jax.tree_util.keystr(path))
            expected = f"shape {shape}, as `{_INIT}` has it"
            arrays = dict(jax.tree_util.tree_leaves_with_path(new))
            if path not in arrays or arrays[path].shape != shape:  # by layers
                needed = f"`layer_axes`, such as {axis}, for this stack"
                expected = f"shape {shape}: the method needs {needed}"
            raise ValueError(f"{_NAME}: `state`{where}: {came}, expected {expected}.")
        return i


class Owned(NamedTuple):
    """The arrays that a share replaces, or those of one of its layers.

    Attributes:
      weights: its leaves of the parameters.
      state: its own arrays of the state.
    """

    weights: list[jax.Array]
    state: list[jax.Array]


class Start(NamedTuple):
    """What the update of a share starts from.

    Attributes:
      layer: which one of its stack; None of what is in no stack.
      gradients: of the leaves of the share; None for a leaf that has none.
      weights: these leaves.
      state: the arrays of its state.
    """

    layer: jax.Array | int | None
    gradients: Sequence[jax.Array | None]
    weights: list[jax.Array]
    state: list[jax.Array]


class Model(NamedTuple):
    """The arrays of parameters and state, which shares replace one after the other.

    Attributes:
      leaves: of the parameters.
      state: the arrays of the state.
    """

    leaves: Sequence[jax.Array]
    state: Sequence[jax.Array]

    def weights_of(self, portion: Portion, layer: jax.Array | int | None) -> list[jax.Array]:
        """The leaves of a share, in one of its layers if it has some, on the device."""
        cuts = zip(portion.positions, portion.weight_cuts, strict=True)
        return host_memory.to_device([cut.out_of(self.leaves[i], layer) for i, cut in cuts])

    def state_of(self, portion: Portion, layer: jax.Array | int | None) -> list[jax.Array]:
        """The arrays of the state of a share, likewise."""
        return host_memory.to_device(
            [(SAME if cut is None else cut).out_of(self.state[i], layer) for i, cut in portion.cuts]
        )

    def start(
        self,
        portion: Portion,
        gradients: Sequence[jax.Array | None],
        layer: jax.Array | int | None = None,
    ) -> Start:
        """What the update of a share starts from, or that of one of its layers."""
        return Start(
            layer, gradients, self.weights_of(portion, layer), self.state_of(portion, layer)
        )

    def kept(self, portion: Portion, new: Owned) -> Owned:
        """What an update of a share has made, each array where the old one lies."""
        return host_memory.where_they_lay(new, self.owned(portion))

    def owned(self, portion: Portion) -> Owned:
        """What a share replaces."""
        weights = [self.leaves[i] for i in portion.positions]
        return Owned(weights, [self.state[i] for i, _ in portion.owned_cuts])

    def replaced(self, portion: Portion, new: Owned, *, in_loop: bool = False) -> "Model":
        """The same, with other arrays of a share; in a loop, numbers of the stack are still old."""
        leaves, state = list(self.leaves), list(self.state)
        for i, x in zip(portion.positions, new.weights, strict=True):
            leaves[i] = x
        for (i, cut), x in zip(portion.owned_cuts, new.state, strict=True):
            if not (in_loop and cut is SAME):
                state[i] = x
        return Model(leaves, state)


def with_layer(portion: Portion, owned: Owned, layer: Owned, i: jax.Array | int) -> Owned:
    """The arrays of a stack, with those of layer `i`."""
    weights = zip(portion.weight_cuts, owned.weights, layer.weights, strict=True)
    state = zip(portion.owned_cuts, owned.state, layer.state, strict=True)
    return Owned(
        [cut.put(x, new, i) for cut, x, new in weights],
        [cut.put(x, new, i) for (_, cut), x, new in state],
    )
