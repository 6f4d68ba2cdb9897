"""A leaf in two passes of XLA, as a GPU takes it: the scale of each block, and everything else.

Left to itself XLA reads a leaf once for the scales of each moment, and keeps what it has computed
for that. Here all scales of a leaf are known before its codes are read again.
"""

import itertools
from collections.abc import Sequence

import jax

from jgrad._kernels.leaf_step import LeafStep, needed
from jgrad._kernels.moment import CodesMoment, ScaleMoment
from jgrad._trees.shardings import barrier


def run(step: LeafStep, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of the step: its function, called with two kinds of moments."""

    def scales_of(*operands: jax.Array) -> list[jax.Array]:
        _, moments = step.call(step.arguments(operands), ScaleMoment)
        return [moment.new for moment in moments]

    read = needed(scales_of, operands)
    # Without the barrier XLA would find that both passes begin alike, and join them.
    first, scales = barrier((list(itertools.compress(operands, read)), scales_of(*operands)))
    again, known = iter(first), iter(scales)
    operands = [next(again) if is_read else x for x, is_read in zip(operands, read, strict=True)]
    args = step.arguments(operands)
    return step.results(*step.call(args, lambda moment: CodesMoment(moment, next(known))))
