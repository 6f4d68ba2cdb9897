"""A function of one leaf as a Pallas kernel, which Mosaic compiles for a TPU.

Each step of its grid has 256 elements of up to 1024 rows: a block of codes for each row. Scales,
and numbers per row, are read and written with the rows along the lanes, as XLA lays them out on a
TPU, so that nothing is transposed in memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl  # which may change, checked in JAX 0.8 to 0.12
from jax.experimental.pallas import tpu as pltpu

from jgrad._arithmetic.programs import ArrayType
from jgrad._kernels import leaf_step
from jgrad._kernels.leaf_step import LeafStep, needed
from jgrad._kernels.moment import InTile
from jgrad._kernels.tile import Tile, TileRounding
from jgrad._quantized.blocks import SIZE
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.random_bits import Part
from jgrad._trees.protocols import Leaf, PyTree
from jgrad._trees.shardings import Placement, varying_as
from jgrad._trees.unpromised import Unpromised

core = Unpromised("moments in 8 bits")

_ROWS = 1024  # of a step of the grid at most
_MEMORY = 8 * 2**20  # bytes of the buffers of a step; by default, a TPU kernel gets 16 MiB
_TOGETHER = 128  # rows of a tile: fewer would not fill the lanes of a scale
_SUBLANES = 8


class _Keys(NamedTuple):
    """What the random bits of a leaf are a hash of: numbers of the leaf, or of each of its rows."""

    first: jax.Array
    second: jax.Array
    part: Part | None


def run(
    step: LeafStep, operands: Sequence[jax.Array], place: Placement, *, interpret: bool
) -> list[jax.Array]:
    """The results of the step, computed by the kernel; `interpret` runs it on a CPU."""
    keys: dict[tuple[int, ...], _Keys] = {}  # moments of a leaf have the same random bits

    def prepare(x: Leaf) -> Leaf:
        if not isinstance(x, Rounding):
            return x
        ids = tuple(map(id, jax.tree.leaves(x)))
        return keys[ids] if ids in keys else keys.setdefault(ids, _keys(x, leaf))

    leaf, is_rounding = operands[step.codes[0]].shape, functools.partial(_is_a, Rounding)
    prepared = jax.tree.map(prepare, step.arguments(operands), is_leaf=is_rounding)
    kernel = LeafKernel(step, operands, prepared, interpret=interpret)
    arrays = list(map(kernel.as_operand, kernel.arrays, kernel.kinds))
    return leaf_step.on_shards(kernel, arrays, kernel.leaf, place)


def _keys(rounding: Rounding, shape: tuple[int, ...]) -> _Keys:
    leaf_keys, first, part = rounding.keys
    leaf = jnp.asarray(leaf_keys)
    sums = jnp.broadcast_to(rounding.keys_of_step, leaf.shape) + leaf
    if part is not None:
        first, part = part.first(shape), dataclasses.replace(part, index=())
    keys = sums[..., 0] + jnp.asarray(first), sums[..., 1]
    in_column, second = (x[..., None] if x.ndim else x for x in keys)
    return _Keys(in_column, second, part)


class LeafKernel:
    """The kernel of a leaf, or of a shard of it, as a function of arrays.

    Attributes:
      arrays: what the kernel reads.
      kinds: of each of these: "array", with all elements of the leaf; "scale", with one for each
        block; "column", with one for each row; or "scalar".
    """

    def __init__(
        self, step: LeafStep, operands: Sequence[jax.Array], prepared: PyTree, *, interpret: bool
    ) -> None:
        """`prepared` are the arguments of the step, with `_Keys` for what is hashed."""
        self.step, self.interpret = step, interpret
        self.leaf = operands[step.codes[0]].shape
        read = zip(operands, needed(step.plain, operands), strict=True)
        unread = {id(x) for x, is_read in read if not is_read}
        leaves, self.structure = jax.tree.flatten(prepared)
        self.arrays = list({id(x): x for x in leaves if id(x) not in unread}.values())
        scales = {id(operands[i + 1]) for i in step.codes}
        kinds = {id(x): "scale" if id(x) in scales else self._kind(x.shape) for x in leaves}
        self.kinds = [kinds[id(x)] for x in self.arrays]
        position = {id(x): i for i, x in enumerate(self.arrays)}
        self.leaves = [(position.get(id(x)), kinds[id(x)], x.dtype) for x in leaves]
        replaced = {result: id(operands[i]) for result, i in step.aliases.items()}
        self.aliases = {y: position[x] for y, x in replaced.items() if x in position}

    def _kind(self, shape: tuple[int, ...]) -> str:
        if math.prod(shape) == 1:
            return "scalar"
        return "column" if shape == (*self.leaf[:-1], 1) else "array"

    def as_operand(self, x: jax.Array, kind: str) -> jax.Array:
        """An argument of the function as the kernel is given it."""
        if kind in ("array", "scale"):
            return x if kind == "scale" else jnp.broadcast_to(x, self.leaf)
        return _in_32_bits(x).reshape((1,) if kind == "scalar" else (*self.leaf[:-1], 1))

    def __call__(self, operands: Sequence[jax.Array], starts: jax.Array) -> list[jax.Array]:
        """What the kernel writes; `starts` says which element of the leaf is the first one here."""
        step = self.step
        here = [x for x, kind in zip(operands, self.kinds, strict=True) if kind == "array"]
        *lead, rows, width = here[0].shape
        count, blocks = math.prod(lead), width // SIZE
        written = list(itertools.compress(enumerate(step.types), step.used))
        moved: list[jax.Array | ArrayType] = [*here, *(t for _, t in written)]
        per_row = 2 * SIZE * sum(x.dtype.itemsize for x in moved)
        most = min(_ROWS, max(1, _MEMORY // per_row // _TOGETHER) * _TOGETHER)
        taken, group = min(rows, most), min(blocks, _SUBLANES)
        specs = {
            "array": pl.BlockSpec((None, taken, SIZE), lambda i, j, k: (i, j, k)),
            "scale": pl.BlockSpec(
                (None, group, taken), lambda i, j, k: (i, jax.lax.div(k, group), j)
            ),
            "column": pl.BlockSpec((None, 1, taken), lambda i, j, k: (i, 0, j)),
            "scalar": pl.BlockSpec(memory_space=pltpu.SMEM),
        }
        shapes = {"array": (count, rows, width), "scale": (count, blocks, rows)}

        def laid_out(x: jax.Array, kind: str) -> jax.Array:
            if kind == "scalar":
                return x
            x = x.reshape((count, rows, -1))
            return x if kind == "array" else jnp.swapaxes(x, 1, 2)

        kinds = ["array" if t.shape == self.leaf else "scale" for _, t in written]
        results = {result: i for i, (result, _) in enumerate(written)}
        aliases = {x: results[y] for y, x in self.aliases.items() if y in results}
        varying = varying_as(operands)
        with core.enable_x64(False):  # Mosaic has no 64-bit types, as of Python's numbers
            new = pl.pallas_call(
                functools.partial(self._step, tuple(lead), kinds),
                grid=(count, pl.cdiv(rows, taken), blocks),
                in_specs=[*(specs[kind] for kind in self.kinds), specs["scalar"]],
                out_specs=[specs[kind] for kind in kinds],
                out_shape=[
                    jax.ShapeDtypeStruct(shapes[kind], t.dtype, **varying)
                    for kind, (_, t) in zip(kinds, written, strict=True)
                ],
                input_output_aliases=aliases,
                interpret=self.interpret,
                name="jgrad_leaf",
            )(*map(laid_out, operands, self.kinds), starts)
        return [
            (x if kind == "array" else jnp.swapaxes(x, 1, 2)).reshape((*lead, rows, -1))
            for x, kind in zip(new, kinds, strict=True)
        ]

    # ---- inside the kernel -----------------------------------------------------------------------

    def _step(self, lead: tuple[int, ...], kinds: list[str], *refs: Any) -> None:
        """One step of the grid, tile by tile."""
        layer, block, column = (pl.program_id(axis) for axis in range(3))
        last = len(self.kinds)
        inputs, starts, outputs = refs[:last], refs[last], refs[last + 1 :]
        rows = inputs[self.kinds.index("array")].shape[0]
        together = _TOGETHER if rows % _TOGETHER == 0 else rows
        begins: list[jax.Array] = [block * rows, column * SIZE]
        for n in reversed(lead):
            begins.insert(0, jax.lax.rem(layer, n))
            layer = jax.lax.div(layer, n)
        origin = [starts[axis] + x for axis, x in enumerate(begins)]

        def part(i: jax.Array, _: None) -> None:
            first = pl.multiple_of(i * together, together)
            corner = (*origin[:-2], origin[-2] + first, origin[-1])
            tile, within = Tile((together, SIZE), corner, self.leaf), pl.ds(first, together)
            pairs = zip(inputs, self.kinds, strict=True)
            read = [self._read(*pair, within, column) for pair in pairs]
            shapes = {"array": tile.shape, "scalar": ()}  # which nothing depends on
            values = [
                _in_dtype(
                    jnp.zeros(shapes.get(kind, (together, 1)), jnp.int32) if i is None else read[i],
                    dtype,
                )
                for i, kind, dtype in self.leaves
            ]
            for x, ref, kind in zip(self._results(values, tile), outputs, kinds, strict=True):
                if kind == "array":
                    ref[within, :] = jnp.broadcast_to(x, tile.shape)
                else:
                    here = _is_here(ref, together, column)
                    ref[:, within] = jnp.where(here, jnp.transpose(x), ref[:, within])

        jax.lax.fori_loop(0, rows // together, part, None)

    def _read(self, ref: Any, kind: str, within: Any, column: jax.Array) -> jax.Array:
        """The part of an operand that a tile needs; a scalar stays one until it meets a tile."""
        if kind == "array":
            return ref[within, :]
        if kind == "scalar":
            return ref[0]
        if kind == "column":
            return jnp.transpose(ref[:, within])
        here = _is_here(ref, within.size, column)
        one = jnp.where(here, ref[:, within], jnp.float32(0))
        return jnp.transpose(jnp.sum(one, axis=0, keepdims=True))

    def _results(self, values: Sequence[jax.Array], tile: Tile) -> list[jax.Array]:
        """The function of a leaf, of a tile."""
        args = jax.tree.map(
            lambda x: TileRounding(*x, x.first.ndim > 0, tile) if isinstance(x, _Keys) else x,
            jax.tree.unflatten(self.structure, values),
            is_leaf=functools.partial(_is_a, _Keys),
        )
        return self.step.results(*self.step.call(args, lambda moment: InTile(moment, tile)))


def _is_a(kind: type, x: object) -> bool:
    return isinstance(x, kind)


def _is_here(ref: Any, rows: int, column: jax.Array) -> jax.Array:
    """Which of the columns of blocks in this piece of the scales is computed."""
    shape = (ref.shape[0], rows)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.rem(column, shape[0])


def _in_32_bits(x: jax.Array) -> jax.Array:
    """A number as a kernel can be given it: float32 or int32."""
    if x.dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _in_dtype(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What was read in the dtype that it had, as far as a kernel has it."""
    if dtype == np.uint32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32) if x.ndim else x.astype(jnp.uint32)
    if dtype == np.bool_:
        return x != 0
    if jnp.issubdtype(dtype, jnp.floating):  # which was 64-bit, is 32-bit here
        return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return x if x.dtype == dtype else x.astype(dtype)
