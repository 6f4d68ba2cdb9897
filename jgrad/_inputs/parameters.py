"""The parameters of one `init` or `update`, as a list of leaves beside which options are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jgrad._packed import arrays, packing
from jgrad._trees import checks, trees
from jgrad._trees.checks import ArgLeaves
from jgrad._trees.trees import PyTree


class Parameters:
    """Parameters, or gradients in their place, and what is known of each array.

    Attributes:
      function: the name of the transformation, for messages.
      tree: the tree itself.
      reference: its leaves; updates have their shapes and dtypes.
      specs: what each of these leaves stands for.
      shapes: the same tree unpacked, with shapes and dtypes for what is packed.
      is_updated: whether each leaf is: it is floating or complex, and has a gradient in an update.
    """

    def __init__(self, function: str, tree: PyTree, name: str = "params") -> None:
        self.function, self.tree = function, tree
        self.reference = ArgLeaves.from_tree(function, name, tree).with_arrays()
        self.specs = arrays.specs(tree)
        self.shapes = packing.shapes(tree)
        self.is_updated = list(map(checks.is_inexact, self.reference.leaves))

    def like_reference(self, name: str, tree: PyTree, shapes: PyTree = None) -> ArgLeaves:
        """The leaves of a tree with the structure of the parameters, or of `shapes`."""
        reference, remedy = self.tree, ""
        if shapes is not None and shapes is not self.tree:
            reference, remedy = shapes, OTHER_LEAVES
        elif name.startswith("state") and packing.any_packed(reference):
            remedy = "" if packing.any_packed(tree) else _NOT_PACKED
        checks.same_structure(
            self.function, name, tree, self.reference.name, reference, remedy=remedy
        )
        return self.reference._replace(name=name, leaves=trees.flatten(tree)[0])

    def option(self, name: str, tree: PyTree) -> ArgLeaves:
        """An option for each leaf of the unpacked tree, from a prefix of it.

        `None` only where nothing is updated.
        """
        arg = ArgLeaves.from_prefix(self.function, name, tree, self.reference.name, self.shapes)
        for i in self._updated_positions():
            if arg.leaves[i] is None:
                arg.fail(i, TypeError, "None, expected a value, as this leaf is updated")
        return arg

    def per_array(self, entries: Sequence[Any]) -> list[Any]:
        """An entry for each array, from one for each leaf of the unpacked tree."""
        per_array = [spec.per_array(entries) for spec in self.specs]
        pairs = zip(per_array, self.specs, strict=True)
        if any(spec.is_buffer and np.ndim(x) for x, spec in pairs):
            self.check_buffers()
        return per_array

    def check_buffers(self) -> None:
        """Buffers have the shapes of their layouts; needed where rows have numbers of their own."""
        for i, (x, spec) in enumerate(zip(self.reference.leaves, self.specs, strict=True)):
            if spec.is_buffer and not spec.is_unpacked and x.shape != spec.local_shape:
                remedy = (
                    "inside `vmap`, pack there, or map `update` too; inside `shard_map` or `pmap`, "
                    "`zero` knows which rows are whose"
                )
                problem = f"shape {x.shape}, expected {spec.local_shape} as in its layout; {remedy}"
                self.reference.fail(i, ValueError, problem)

    def updated_shapes(self) -> ArgLeaves:
        """The leaves of the unpacked tree, with `None` where nothing is updated."""
        arg = ArgLeaves.from_tree(self.function, self.reference.name, self.shapes).with_arrays()
        updated: list[Any] = [None] * len(arg.leaves)
        for i in self._updated_positions():
            updated[i] = arg.leaves[i]
        return arg._replace(leaves=updated)

    def _updated_positions(self) -> list[int]:
        """Which leaves of the unpacked tree are updated."""
        pairs = zip(self.specs, self.is_updated, strict=True)
        return [i for spec, is_updated in pairs if is_updated for i in spec.positions]


# `nnx.Optimizer` writes the new state back attribute by attribute, and loses nodes that are not its
# own, whatever the optimizer.
_NOT_PACKED = (
    "pack a restored state by `pack(state, like=jax.eval_shape(tx.init, params))`; flax's "
    "`nnx.Optimizer` takes packed states apart: give it `pack_small(tx)` and parameters as a tree, "
    "or call `tx.update` yourself"
)

OTHER_LEAVES = "a state fits the choice of leaves that it was made for, and no other"
