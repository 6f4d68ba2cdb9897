"""Adam against the number of leaves, and against their size.

Each point is a comparison like those of the table, of fewer forms and built once.
"""

import functools
from collections.abc import Callable

from benchmarks import updates
from benchmarks.results import Result
from benchmarks.workloads import equal_leaves

_FORMS = ("optax", "tree", "packed")


def _point(count: int, size: int) -> Callable[..., list[Result]]:
    work = f"{count} leaves of {size}"
    shapes = equal_leaves(count, size)
    return functools.partial(updates.compare, work, "Adam", shapes, _FORMS, builds=1)


# About a million elements in all.
LEAVES = {
    f"scaling: {count} leaves": _point(count, 2**20 // count)
    for count in (1, 4, 16, 64, 256, 1000, 4000)
}
# A hundred leaves.
ELEMENTS = {f"scaling: 1e{power} elements": _point(100, 10**power // 100) for power in range(3, 9)}
