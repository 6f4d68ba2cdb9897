"""A leaf in two passes of XLA, as a GPU takes it: the scale of each block, and everything else.

Left to itself XLA reads a leaf once for the scales of each moment, and keeps what it has computed
for that. Here all scales of a leaf are known before its codes are read again.
"""

from collections.abc import Sequence

import jax

from jgrad._kernels.leaf_step import LeafStep
from jgrad._kernels.moment import CodesPass, ScalePass
from jgrad._trees.shardings import barrier


def run(step: LeafStep, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of the step: its function, called with two kinds of moments."""
    _, scales = step.call(step.arguments(operands), ScalePass)
    # Without the barrier XLA would find that both passes begin alike, and join them.
    again, known = barrier((list(operands), [moment.new for moment in scales]))
    scale = iter(known)
    args = step.arguments(again)
    return step.results(*step.call(args, lambda moment: CodesPass(moment, next(scale))))
