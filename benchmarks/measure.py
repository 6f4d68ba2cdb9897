"""Times and bytes of two things that do the same, measured in turn in one process.

A machine that is shared drifts by tens of percent within minutes, so a time means little and a
ratio of neighbouring times means much: the two take turns, and the figure is the median of the
ratios.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.workloads import Tree


class Ratio(NamedTuple):
    """Ours over theirs.

    Attributes:
      ours: median time in seconds.
      theirs: median time in seconds.
      ratio: median of the ratios of neighbours.
      low: their first quartile.
      high: their third quartile.
    """

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """From times of runs that took turns."""
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return cls(statistics.median(ours), statistics.median(theirs), ratio, low, high)


def seconds(f: Callable[[], Any]) -> float:
    """Of one call, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> Ratio:
    """Each once per round, the first one changing."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(rounds):
        for mine in (True, False) if i % 2 else (False, True):
            times[mine].append(seconds(ours if mine else theirs))
    return Ratio.of(times[True], times[False])


class Step:
    """An update that is applied, compiled with donated parameters and state."""

    def __init__(self, tx: optax.GradientTransformation, params: Tree, grads: Tree) -> None:
        self._grads = grads
        self._carry = (params, tx.init(params))

        def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        jitted = jax.jit(step, donate_argnums=(0, 1))
        jax.clear_caches()  # what the peer has traced before is no help here
        start = time.perf_counter()
        traced = jitted.trace(*self._carry, grads)
        self.trace = time.perf_counter() - start
        lowered = traced.lower()
        start = time.perf_counter()
        self._compiled = lowered.compile()
        self.compile = time.perf_counter() - start
        self.temporary_bytes: int = self._compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> Tree:
        self._carry = self._compiled(*self._carry, self._grads)
        return self._carry[0]
