"""Computes the byte ranges of a trainer rank's storages that an engine rank reads.

Only storages that are read are mapped, and only pages that are read are registered with CUDA: a trainer rank of a large
model has thousands of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_reshard.layout.regions import LocalRegion

if TYPE_CHECKING:
    from sglang_reshard.memory.mapping import ShardView

ByteRanges = dict[int, list[tuple[int, int]]]  # storage -> (first byte, one past the last), ascending and apart


class ShardRead(NamedTuple):
    """A region of a trainer rank's shard of the layout's tensor number `tensor`, whose elements have `item_bytes`."""

    tensor: int
    region: LocalRegion
    item_bytes: int


def byte_ranges(views: Sequence[ShardView], reads: Iterable[ShardRead], gap_bytes: int = 0) -> ByteRanges:
    """Returns the bytes from the first to the last element of each read. Empty shards have none.

    views      of a trainer rank's shards, in the layout's order
    gap_bytes  ranges that are at most so far apart become one
    """
    spans: dict[tuple[LocalRegion, tuple[int, ...]], tuple[int, int]] = {}  # in elements; few are distinct
    found: dict[int, set[tuple[int, int]]] = {}
    for tensor, region, item_bytes in reads:
        view = views[tensor]
        if view.storage < 0:
            continue
        key = region, view.strides
        if key not in spans:
            spans[key] = _span(region, view.strides)
        first, last = spans[key]
        begin, end = (view.offset + first) * item_bytes, (view.offset + last + 1) * item_bytes
        found.setdefault(view.storage, set()).add((begin, end))
    return {storage: merged(ranges, gap_bytes) for storage, ranges in found.items()}


def merged(ranges: Iterable[tuple[int, int]], gap_bytes: int = 0) -> list[tuple[int, int]]:
    """Returns ranges in ascending order; those that are at most `gap_bytes` apart become one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin - joined[-1][1] <= gap_bytes:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def covered(ranges: Mapping[int, Sequence[tuple[int, int]]], by: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    """Returns whether each range lies within one of `by`, in the same storage; these are ascending and apart."""
    for storage, of_storage in ranges.items():
        known = by.get(storage, ())
        begins = [begin for begin, _ in known]
        for first, last in of_storage:
            at = bisect_right(begins, first) - 1
            if at < 0 or last > known[at][1]:
                return False
    return True


def _span(region: LocalRegion, strides: tuple[int, ...]) -> tuple[int, int]:
    """Returns the first and the last element of a region in memory. Strides of a shard are not negative."""
    first, steps = region.memory(strides)
    return first, first + sum((n - 1) * s for n, s in zip(region.count, steps, strict=True))
