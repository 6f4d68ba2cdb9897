"""One loop over memory per leaf, where XLA's CPU backend may make loops with several results.

`XLA_FLAGS=--xla_backend_extra_options=xla_cpu_use_multi_output_fusion` lets it. XLA then joins
loops that read the same arrays, but not a loop with one that reads its result. So new moments are
computed twice, from arrays that XLA does not know to be the same: once to be written, and once for
the updates. Adam is then one loop of 28 bytes per parameter in place of two of 36. Without the flag
the same program would move 60, so nothing is computed twice there.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_FLAG = "xla_cpu_use_multi_output_fusion"


@functools.cache
def is_chosen() -> bool:
    """Whether the flag is set, and programs are for CPUs."""
    return _FLAG in os.environ.get("XLA_FLAGS", "") and jax.default_backend() == "cpu"


def written_and_read(compute: Callable[..., T], *arrays: Any) -> tuple[T, T]:
    """What `compute` makes of the arrays: to be written, and for what is computed from it."""
    written = compute(*arrays)
    if not is_chosen():
        return written, written
    return written, compute(*jax.lax.optimization_barrier(arrays))
