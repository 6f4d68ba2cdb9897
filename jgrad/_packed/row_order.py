"""The order of rows in a buffer whose shards have whole matrices.

The rows of a buffer are divided evenly between devices. So that no device has a part of a matrix,
each shard has the same segments in the same places: some matrices of each shape, and then its part
of all other leaves. Spans count rows in another order, segment by segment, in which a leaf is in
one piece. Behind the last matrix of a shape are zero matrices, and behind the last of the others
zero rows.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jgrad._packed.spans import Span


class Segment(NamedTuple):
    """Rows of each shard for one kind of leaves.

    Attributes:
      rows: of each shard.
      capacity: how many items of equal shape it has room for, leaves or layers of leaves; 0 for
        other leaves.
    """

    rows: int
    capacity: int = 0


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The order of rows in a buffer, or in some shards of one.

    Attributes:
      shards: how many there are.
      segments: of each shard, in order.
    """

    shards: int
    segments: tuple[Segment, ...]

    @property
    def rows_per_shard(self) -> int:
        """Rows of a shard."""
        return sum(segment.rows for segment in self.segments)

    @property
    def starts(self) -> list[int]:
        """The first row of each segment where segments follow each other."""
        sizes = (self.shards * segment.rows for segment in self.segments)
        return list(itertools.accumulate(sizes, initial=0))[:-1]

    def to_leaf_order(self, x: Any) -> Any:
        """Rows shard by shard as rows segment by segment."""
        if self._is_plain:
            return x
        per_shard = x.reshape(self.shards, self.rows_per_shard, *x.shape[1:])
        ends = np.cumsum([segment.rows for segment in self.segments])
        parts = [per_shard[:, e - s.rows : e] for e, s in zip(ends, self.segments, strict=True)]
        flat = [part.reshape(-1, *x.shape[1:]) for part in parts]
        return _concatenate(flat, 0)

    def to_shard_order(self, x: Any) -> Any:
        """The rows as they were before `to_leaf_order`."""
        if self._is_plain:
            return x
        parts = []
        for start, segment in zip(self.starts, self.segments, strict=True):
            part = x[start : start + self.shards * segment.rows]
            parts.append(part.reshape(self.shards, segment.rows, *x.shape[1:]))
        return _concatenate(parts, 1).reshape(x.shape)

    def on_one_of(self, devices: int) -> "RowOrder":
        """That of the shards of one device."""
        return dataclasses.replace(self, shards=self.shards // devices)

    @property
    def _is_plain(self) -> bool:
        return self.shards == 1 or len(self.segments) == 1


def _concatenate(parts: list[Any], axis: int) -> Any:
    is_numpy = isinstance(parts[0], np.ndarray)
    return np.concatenate(parts, axis) if is_numpy else jax.lax.concatenate(parts, axis)


def assign_rows(
    spans: Sequence[Span], chosen: Sequence[bool], shards: int
) -> tuple[list[int], RowOrder]:
    """The first row of each span, and the order of rows; items of chosen spans stay whole."""
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
        capacity = -(-(row - start) // (blocks * shards)) if blocks else 0
        segments.append(Segment(capacity * blocks, capacity if key[0] else 0))
        start += shards * capacity * blocks
    return starts, RowOrder(shards, tuple(segments))


def item_shape(span: Span) -> tuple[int, ...]:
    """The shape of a layer of the leaf."""
    return tuple(span.layers.shape[axis] for axis in span.layers.within)


def span_of_row(spans: Sequence[Span], rows: int, row_order: RowOrder | None) -> np.ndarray:
    """For each row of a buffer the position of its span; rows of no span have that before them."""
    positions = np.zeros(rows, np.int32)
    for i, span in enumerate(spans):
        positions[span.start :] = i
    return positions if row_order is None else row_order.to_shard_order(positions)
