"""One loop over memory per leaf, where XLA's CPU backend may make loops with several results.

`XLA_FLAGS=--xla_backend_extra_options=xla_cpu_use_multi_output_fusion` lets it. XLA then joins
loops that read the same arrays, but not a loop with one that reads its result. So new moments are
computed twice, from arrays that XLA does not know to be the same: once to be written, and once for
the updates. Adam is then one loop of 28 bytes per parameter in place of two of 36. Without the flag
the same program would move 60, so nothing is computed twice there.
"""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jgrad._arithmetic.leafwise import Call
from jgrad._trees.blocks import is_blocks

_FLAG = re.compile("xla_cpu_use_multi_output_fusion(?!=(false|0))")


def is_chosen() -> bool:
    """Whether the flag is set, and programs are for CPUs."""
    return _flag_is_set() and jax.default_backend() == "cpu"


@functools.cache
def _flag_is_set() -> bool:
    return bool(_FLAG.search(os.environ.get("XLA_FLAGS", "")))


def from_other_arrays(calls: Sequence[Call | None]) -> list[Call | None]:
    """The same calls of arrays that XLA does not know to be the same."""
    arrays = [[x for x in call[1] if _is_array(x)] if call else [] for call in calls]
    others = map(iter, jax.lax.optimization_barrier(arrays))
    return [
        (call[0], tuple(next(own) if _is_array(x) else x for x in call[1])) if call else None
        for call, own in zip(calls, others, strict=True)
    ]


def _is_array(x: Any) -> bool:
    """No scalar: XLA computes it once."""
    return is_blocks(x) or np.ndim(x) > 0
