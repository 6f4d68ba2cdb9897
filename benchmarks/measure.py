"""Times of things that do the same, measured in turn in one process.

A machine that is shared drifts by tens of percent within minutes, so a time means little and a
ratio of neighbouring times means much: all take turns, and the figure is the median of the ratios
of times of the same round.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

_QUICK = 0.02  # Calls shorter than this are repeated within a turn, until it is over.
_MOST = 100  # times
_LEAST = 3  # rounds, of which a median says something


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
        if len(ratios) == 1:
            ratios *= 2
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(statistics.median(ours), statistics.median(theirs), ratio, low, high)


def seconds(f: Callable[[], Any]) -> float:
    """Of one call, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def in_turn(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, *, until: float = math.inf
) -> dict[str, list[float]]:
    """The time of each in each round, in an order that changes by chance.

    Args:
      contenders: what is timed.
      rounds: at most.
      until: a time of `time.time()` after which no round begins, but for the first three.
    """
    for f in contenders.values():
        _turn(f)  # some have a first call that is unlike all others
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for done in range(rounds):
        if done >= _LEAST and time.time() > until:
            break
        shuffle(order)
        for name in order:
            times[name].append(_turn(contenders[name]))
    return times


def _turn(f: Callable[[], Any]) -> float:
    """Seconds of a call; of quick ones, the median of some.

    The first call is not timed. It finds the caches full of what another has left, and its threads
    still waiting for work: a step of 1 ms takes 2 right after one of PyTorch.
    """
    count = int(_QUICK / seconds(f))
    return statistics.median(seconds(f) for _ in range(max(1, min(_MOST, count))))
