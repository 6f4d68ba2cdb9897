"""The leaves of the models that are timed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def one_leaf() -> Shapes:
    """One leaf of 32 M elements."""
    return {"w": (32 * 2**20,)}


def bert_base() -> Shapes:
    """The 197 leaves of BERT-base, 88 M elements; with a vocabulary of 4096."""
    width = 768
    shapes: Shapes = {"tokens": (4096, width), "positions": (512, width), "types": (2, width)}

    def dense(name: str, rows: int, columns: int) -> None:
        shapes.update({f"{name}/w": (rows, columns), f"{name}/b": (columns,)})

    def norm(name: str) -> None:
        shapes.update({f"{name}/scale": (width,), f"{name}/bias": (width,)})

    norm("embedding/norm")
    for i in range(12):
        for name in ("query", "key", "value", "output"):
            dense(f"{i}/{name}", width, width)
        dense(f"{i}/up", width, 4 * width)
        dense(f"{i}/down", 4 * width, width)
        norm(f"{i}/norm_1")
        norm(f"{i}/norm_2")
    return shapes


def resnet_50() -> Shapes:
    """The 161 leaves of ResNet-50, 25.6 M elements; kernels are HWIO."""
    shapes: Shapes = {}

    def convolution(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}/kernel"] = (size, size, inputs, outputs)
        shapes.update({f"{name}/norm/scale": (outputs,), f"{name}/norm/bias": (outputs,)})

    convolution("stem", 7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            name = f"{stage}/{block}"
            convolution(f"{name}/1", 1, inputs, width)
            convolution(f"{name}/2", 3, width, width)
            convolution(f"{name}/3", 1, width, 4 * width)
            if block == 0:
                convolution(f"{name}/shortcut", 1, inputs, 4 * width)
            inputs = 4 * width
    return {**shapes, "dense/w": (inputs, 1000), "dense/b": (1000,)}


def equal_leaves(count: int, *shape: int) -> Shapes:
    """Leaves of one shape."""
    return {f"{i}": shape for i in range(count)}


class Work(NamedTuple):
    """A model whose update is timed.

    Attributes:
      shapes: of its leaves.
      has_small_leaves: so many that packing them inside a step is worth a row.
      builds: at most, for each contender.
      packed_only: methods that are timed on packed buffers alone, since on this many leaves all
        others take minutes to compile.
    """

    shapes: Shapes
    has_small_leaves: bool = False
    builds: int = 99
    packed_only: tuple[str, ...] = ()

    def forms(self, method: str) -> list[str]:
        """In which to time a method; those that are not there are for the caller to leave out."""
        packed = ["packed", "small packed"] if self.has_small_leaves else ["packed"]
        if method in self.packed_only:
            return packed
        return ["optax", "tree", *packed, "torch foreach", "torch fused"]


WORKLOADS: dict[str, Work] = {
    "one leaf, 32 M": Work(one_leaf()),
    "BERT-base, vocabulary 4096: 197 leaves, 88 M": Work(bert_base(), has_small_leaves=True),
    "ResNet-50: 161 leaves, 26 M": Work(resnet_50()),
    "1000 leaves of 32 x 32": Work(equal_leaves(1000, 32, 32), has_small_leaves=True),
    "4000 leaves of 16 x 16": Work(
        equal_leaves(4000, 16, 16), builds=1, packed_only=("LARS", "LAMB")
    ),
}


def tree(shapes: Shapes, seed: int) -> Tree:
    """Normal numbers in float32."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()
    }
