"""Whole matrices dealt out to the shards of a buffer, so that no device has a part of one.

The rows of a buffer are divided evenly between devices. Here each device's share has the same
segments in the same places: some matrices of each shape, and then its part of all other leaves.
Spans count rows in another order, segment by segment, in which a leaf is in one piece. Behind the
last matrix of a shape are zero matrices, and behind the last of the others zero rows.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jgrad._packed.spans import Span


class Segment(NamedTuple):
    """Rows of each share for one kind of leaves.

    Attributes:
      rows: of each share.
      slots: for how many items of equal shape, leaves or layers of leaves; 0 for other leaves.
    """

    rows: int
    slots: int = 0


@dataclasses.dataclass(frozen=True)
class Deal:
    """The order of rows in a buffer, or in some shares of one.

    Attributes:
      shares: how many there are.
      segments: of each share, in order.
    """

    shares: int
    segments: tuple[Segment, ...]

    @property
    def rows_per_share(self) -> int:
        """Rows of a share."""
        return sum(segment.rows for segment in self.segments)

    @property
    def starts(self) -> list[int]:
        """The first row of each segment where segments follow each other."""
        sizes = (self.shares * segment.rows for segment in self.segments)
        return list(itertools.accumulate(sizes, initial=0))[:-1]

    def by_segment(self, x: Any) -> Any:
        """Rows share by share as rows segment by segment."""
        if self._is_plain:
            return x
        shared = x.reshape(self.shares, self.rows_per_share, *x.shape[1:])
        ends = np.cumsum([segment.rows for segment in self.segments])
        parts = [shared[:, e - s.rows : e] for e, s in zip(ends, self.segments, strict=True)]
        flat = [part.reshape(-1, *x.shape[1:]) for part in parts]
        return _concatenate(flat, 0)

    def by_share(self, x: Any) -> Any:
        """The rows as they were before `by_segment`."""
        if self._is_plain:
            return x
        parts = []
        for start, segment in zip(self.starts, self.segments, strict=True):
            part = x[start : start + self.shares * segment.rows]
            parts.append(part.reshape(self.shares, segment.rows, *x.shape[1:]))
        return _concatenate(parts, 1).reshape(x.shape)

    def of_some(self, devices: int) -> "Deal":
        """That of a device's shares, of several devices."""
        return dataclasses.replace(self, shares=self.shares // devices)

    @property
    def _is_plain(self) -> bool:
        return self.shares == 1 or len(self.segments) == 1


def _concatenate(parts: list[Any], axis: int) -> Any:
    is_numpy = isinstance(parts[0], np.ndarray)
    return np.concatenate(parts, axis) if is_numpy else jax.lax.concatenate(parts, axis)


def deal_out(spans: Sequence[Span], chosen: Sequence[bool], shares: int) -> tuple[list[int], Deal]:
    """The first row of each span, and the deal; items of chosen spans stay whole."""
    groups: dict[Any, list[int]] = {}
    for i, (span, is_matrix) in enumerate(zip(spans, chosen, strict=True)):
        key = (True, item_shape(span), span.blocks_per_layer) if is_matrix else (False,)
        groups.setdefault(key, []).append(i)
    starts, segments, start = [0] * len(spans), [], 0
    for key in sorted(groups, key=lambda key: not key[0]):  # matrices first
        row = start
        for i in groups[key]:
            starts[i] = row
            row += spans[i].num_blocks
        blocks = spans[groups[key][0]].blocks_per_layer if key[0] else 1
        slots = -(-(row - start) // (blocks * shares)) if blocks else 0
        segments.append(Segment(slots * blocks, slots if key[0] else 0))
        start += shares * slots * blocks
    return starts, Deal(shares, tuple(segments))


def item_shape(span: Span) -> tuple[int, ...]:
    """The shape of a layer of the leaf."""
    return tuple(span.layers.shape[axis] for axis in span.layers.within)


def owners(spans: Sequence[Span], rows: int, deal: Deal | None) -> np.ndarray:
    """For each row of a buffer the position of its span; rows of no span have that before them."""
    found = np.zeros(rows, np.int32)
    for i, span in enumerate(spans):
        found[span.start :] = i
    return found if deal is None else deal.by_share(found)
