"""A leaf in two passes of XLA, as a GPU takes it: the scale of each block, and everything else.

Left to itself XLA reads a leaf once for the scales of each moment, and keeps what it has computed
for that. Here all scales of a leaf are known before its codes are read again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jgrad._fused.graph import Graph, Operation
from jgrad._fused.leaves import CODINGS, FLAG, KEYS, Kernel
from jgrad._quantized import codes as coding, encoding
from jgrad._quantized.codec import BY_DTYPE
from jgrad._quantized.encoding import Rounding
from jgrad._quantized.geometry import Geometry
from jgrad._quantized.random_bits import ElementKeys
from jgrad._quantized.regions import ENCODE_IF
from jgrad._trees.shardings import barrier


def run(kernel: Kernel, graph: Graph, values: dict[int, Any]) -> list[jax.Array]:
    """What a kernel writes."""
    own = Geometry.of_leaf(kernel.shape)
    first = _Pass(kernel, graph, {x: values[x] for x in kernel.reads})
    scales = {}
    for op in kernel.operations:
        if op.name in CODINGS:
            scales[op.outputs] = _scale(first.known[op.inputs[2]], own)
        else:
            first.run(op)
    inputs, scales = barrier((first.inputs, scales))
    second = _Pass(kernel, graph, inputs)
    for op in kernel.operations:
        if op.name in CODINGS:
            second.encode(op, scales[op.outputs], own)
        else:
            second.run(op)
    return [second.known[x] for x in kernel.writes]


class _Pass:
    """The operations of a kernel on whole arrays."""

    def __init__(self, kernel: Kernel, graph: Graph, inputs: dict[int, Any]) -> None:
        self.inputs = inputs
        self.known = dict(graph.constants) | inputs
        self.graph = graph

    def run(self, op: Operation) -> None:
        results = op.run([self.known[x] for x in op.inputs])
        self.known |= dict(zip(op.outputs, results, strict=True))

    def encode(self, op: Operation, scale: jax.Array, own: Geometry) -> None:
        value = self.known[op.inputs[2]]
        of_step, *keys = (self.known[x] for x in op.inputs[KEYS])
        codec = BY_DTYPE[self.graph.dtype(op.outputs[0])]
        rounding = Rounding(of_step, ElementKeys(*keys))
        new: Sequence[Any] = encoding.with_scale(value, scale, own, codec, rounding)
        if op.name == ENCODE_IF:
            flag = self.known[op.inputs[FLAG]]
            old = (self.known[x] for x in op.inputs[:2])
            new = [jnp.where(flag, *pair) for pair in zip(new, old, strict=True)]
        self.known |= dict(zip(op.outputs, new, strict=True))


def _scale(value: jax.Array, own: Geometry) -> jax.Array:
    """As `scale_of` of the largest magnitude: the largest `scale_of`, which needs no kernel after.

    As integers, in whose order NaN is above infinity.
    """
    bits = coding.bits_of(coding.scale_of(coding.magnitude(value)))
    (blocks,) = own.pieces(bits)
    largest = jnp.max(blocks, axis=-1).reshape(own.scales)
    return jax.lax.bitcast_convert_type(largest, jnp.float32)
