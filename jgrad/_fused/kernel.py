"""A kernel of Pallas for one leaf, as Mosaic compiles it for a TPU.

A step of its grid has 256 elements of up to 1024 rows: a block of codes for each row. Scales are
read and written with the rows along the lanes, as XLA lays them out on a TPU, so that nothing is
transposed in memory. A number for each row is, too.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl  # which may change, checked in JAX 0.7 to 0.12
from jax.experimental.pallas import tpu as pltpu

from jgrad._fused import tiles
from jgrad._fused.graph import Graph
from jgrad._fused.leaves import Kernel
from jgrad._fused.tiles import Keys, Tile
from jgrad._trees.blocks import SIZE
from jgrad._trees.shardings import varying_as

try:  # in neither place promised, checked in JAX 0.7 to 0.12
    from jax import enable_x64
except ImportError:  # JAX 0.7
    from jax.experimental import enable_x64  # type: ignore[attr-defined, no-redef]

_ROWS = 1024  # of a step of the grid at most
_MEMORY = 8 * 2**20  # bytes of the buffers of a step; a TPU gives a kernel 16 MiB unless told
_TOGETHER = 128  # rows of a tile: fewer would not fill the lanes of a scale
_SUBLANES = 8
_UINT32 = np.dtype(np.uint32)


class Operands(NamedTuple):
    """What a kernel reads.

    Attributes:
      arrays: of the shape of the leaf.
      scales: with an element for each block.
      columns: with an element for each row, in the last axis but one.
      scalars: of shape (1,), 32 bits.
    """

    arrays: list[Any]
    scales: list[Any]
    columns: list[Any]
    scalars: list[Any]


class LeafKernel:
    """The kernel of a leaf, or of a shard of it, as a function of arrays."""

    def __init__(self, kernel: Kernel, graph: Graph, aliases: dict[int, int]) -> None:
        """`aliases` say which value that is written may be where one that is read was."""
        self.kernel, self.graph, self.aliases = kernel, graph, aliases
        # Whether random bits are counted within rows, which then have keys of their own.
        self._within_rows = [len(graph.shape(first)) > 0 for _, _, first in kernel.keys]

    def operands(self, values: dict[int, Any]) -> Operands:
        """Those of the whole leaf."""
        kernel = self.kernel
        pairs = [x for key in kernel.keys for x in _pair(*(values[x] for x in key))]
        columns = [values[x] for x in kernel.columns] + [x for x in pairs if x.ndim]
        scalars = [values[x] for x in kernel.scalars] + [x for x in pairs if not x.ndim]
        rows = (*kernel.shape[:-1], 1)
        return Operands(
            arrays=[values[x] for x in kernel.arrays],
            scales=[values[x] for x in kernel.scales],
            columns=[_of_32_bits(x).reshape(rows) for x in columns],
            scalars=[_of_32_bits(x).reshape((1,)) for x in scalars],
        )

    def __call__(
        self, operands: Operands, starts: jax.Array, *, interpret: bool = False
    ) -> list[jax.Array]:
        """What the kernel writes; `starts` says which element of the leaf is the first one here."""
        kernel = self.kernel
        *lead, rows, width = operands.arrays[0].shape
        count, blocks = math.prod(lead), width // SIZE
        taken, group = min(rows, self._most_rows()), min(blocks, _SUBLANES)

        array = pl.BlockSpec((None, taken, SIZE), lambda i, j, k: (i, j, k))
        scale = pl.BlockSpec((None, group, taken), lambda i, j, k: (i, jax.lax.div(k, group), j))
        column = pl.BlockSpec((None, 1, taken), lambda i, j, k: (i, 0, j))
        scalar = pl.BlockSpec(memory_space=pltpu.SMEM)

        def in_lanes(x: Any) -> Any:
            return jnp.swapaxes(x.reshape((count, rows, -1)), 1, 2)

        inputs = Operands(
            [x.reshape((count, rows, width)) for x in operands.arrays],
            list(map(in_lanes, operands.scales)),
            list(map(in_lanes, operands.columns)),
            operands.scalars,
        )
        kinds = zip((array, scale, column, scalar), inputs, strict=True)
        specs = Operands(*([spec] * len(x) for spec, x in kinds))
        shapes = [((count, rows, width), self.graph.dtype(x)) for x in kernel.outputs]
        shapes += [((count, blocks, rows), np.dtype(np.float32)) for _ in kernel.new_scales]
        read, written = [*kernel.arrays, *kernel.scales], kernel.writes
        varying = varying_as(jax.tree.leaves(operands))
        with enable_x64(False):  # Mosaic has no 64 bits, and Python's numbers would have them
            results = pl.pallas_call(
                functools.partial(self._step, tuple(lead)),
                grid=(count, pl.cdiv(rows, taken), blocks),
                in_specs=[specs, scalar],
                out_specs=[array] * len(kernel.outputs) + [scale] * len(kernel.new_scales),
                out_shape=[jax.ShapeDtypeStruct(*x, **varying) for x in shapes],
                input_output_aliases={
                    read.index(y): written.index(x) for x, y in self.aliases.items()
                },
                interpret=interpret,
                name="jgrad_leaf",
            )(inputs, starts)
        arrays, scales = results[: len(kernel.outputs)], results[len(kernel.outputs) :]
        whole = [x.reshape((*lead, rows, width)) for x in arrays]
        return whole + [jnp.swapaxes(x, 1, 2).reshape((*lead, rows, blocks)) for x in scales]

    def _most_rows(self) -> int:
        """Rows of a step of the grid, whose buffers are there twice."""
        values = [*self.kernel.arrays, *self.kernel.outputs]
        per_row = 2 * SIZE * sum(self.graph.dtype(x).itemsize for x in values)
        return min(_ROWS, max(1, _MEMORY // per_row // _TOGETHER) * _TOGETHER)

    # ---- inside the kernel -----------------------------------------------------------------------

    def _step(self, lead: tuple[int, ...], inputs: Operands, starts: Any, *outputs: Any) -> None:
        """One step of the grid, tile by tile."""
        layer, block, column = (pl.program_id(axis) for axis in range(3))
        rows = inputs.arrays[0].shape[0]
        together = _TOGETHER if rows % _TOGETHER == 0 else rows
        begins: list[Any] = [block * rows, column * SIZE]
        for n in reversed(lead):
            begins.insert(0, jax.lax.rem(layer, n))
            layer = jax.lax.div(layer, n)
        origin = [starts[axis] + x for axis, x in enumerate(begins)]

        def part(i: jax.Array, _: None) -> None:
            first = pl.multiple_of(i * together, together)
            tile = Tile((together, SIZE), (*origin[:-2], origin[-2] + first, origin[-1]))
            self._tile(tile, pl.ds(first, together), column, inputs, outputs)

        jax.lax.fori_loop(0, rows // together, part, None)

    def _tile(
        self, tile: Tile, within: Any, column: Any, inputs: Operands, outputs: Sequence[Any]
    ) -> None:
        kernel, graph = self.kernel, self.graph

        def is_here(ref: Any) -> jax.Array:
            """Which of the columns of blocks in this piece of the scales is computed."""
            shape = (ref.shape[0], tile.shape[0])
            return jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.rem(column, shape[0])

        known: dict[int, Any] = {}
        known |= {x: ref[within, :] for x, ref in zip(kernel.arrays, inputs.arrays, strict=True)}
        for x, ref in zip(kernel.scales, inputs.scales, strict=True):
            one = jnp.where(is_here(ref), ref[:, within], jnp.float32(0))
            known[x] = jnp.transpose(jnp.sum(one, axis=0, keepdims=True))
        columns = [jnp.transpose(ref[:, within]) for ref in inputs.columns]
        scalars = [ref[0] for ref in inputs.scalars]
        own = zip(
            (*kernel.columns, *kernel.scalars),
            (*columns[: len(kernel.columns)], *scalars),
            strict=False,
        )
        known |= {x: tiles.of_dtype(value, graph.dtype(x)) for x, value in own}
        of_keys = iter(scalars[len(kernel.scalars) :]), iter(columns[len(kernel.columns) :])
        keys = {}
        for key, in_rows in zip(kernel.keys, self._within_rows, strict=True):
            first, second = (tiles.of_dtype(next(of_keys[in_rows]), _UINT32) for _ in range(2))
            keys[key] = Keys(first, second, in_rows)
        tiles.run(kernel.operations, known, keys, tile, graph, kernel.shape)
        for x, ref in zip(kernel.outputs, outputs, strict=False):
            ref[within, :] = jnp.broadcast_to(known[x], tile.shape)
        for x, ref in zip(kernel.new_scales, outputs[len(kernel.outputs) :], strict=True):
            ref[:, within] = jnp.where(is_here(ref), jnp.transpose(known[x]), ref[:, within])


def _pair(of_step: Any, leaf: Any, first: Any) -> tuple[jax.Array, jax.Array]:
    """The two keys of `random_bits.random_bits`, for all elements or for each row."""
    sums = jnp.broadcast_to(of_step, np.shape(leaf)) + jnp.asarray(leaf)
    return sums[..., 0] + jnp.asarray(first), sums[..., 1]


def _of_32_bits(x: Any) -> jax.Array:
    """A number as a kernel can be given it: float32 or int32."""
    if x.dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
