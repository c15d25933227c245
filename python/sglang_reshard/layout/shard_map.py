"""Defines `ShardMap`: the boxes of a tensor, the trainer ranks that hold each, and their place in the local tensors.

Every sharding reduces to a shard map. `source_layout` computes it from a mesh and placements; for local tensors that
no mesh describes (several checkpoint tensors fused into one, experts split by hand) the trainer states it explicitly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Box, LocalRegion, Region

MAX_STRIDE = 1 << 48


class ShardBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor that trainer ranks hold: what torch's placement `Shard(dim)` comes to on one rank.

    ranks        trainer ranks that hold the box, ascending; more than one hold replicas
    local_start  index of the box's first element in their local tensors; one number if these are flat
    """

    box: Box
    ranks: tuple[int, ...]
    local_start: tuple[int, ...]


class ShardMap(msgspec.Struct, frozen=True, array_like=True):
    """All shards of one tensor.

    Boxes are equal or disjoint. Equal boxes belong to several shards if they start at different indices of their
    ranks' local tensors. A local tensor may be larger than its shards: the rest is padding, or other tensors.

    strides  None for local tensors with the tensor's dimensions. Otherwise they are flat, pieces of a flat buffer, and
             elements of a box that are neighbours along a dimension are so many elements apart in them
    """

    shards: tuple[ShardBox, ...]
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, held: Iterable[tuple[Box, tuple[int, ...], int]], strides: tuple[int, ...] | None = None) -> ShardMap:
        """Builds the map from (box, its start in the local tensor, trainer rank), in any order."""
        ranks: dict[tuple[Box, tuple[int, ...]], set[int]] = {}
        for box, local_start, rank in held:
            ranks.setdefault((box, local_start), set()).add(rank)
        shards = (ShardBox(box, tuple(sorted(r)), local_start) for (box, local_start), r in ranks.items())
        return cls(tuple(sorted(shards, key=lambda shard: (shard.box.start, shard.ranks, shard.local_start))), strides)

    def to_local(self, shard: ShardBox, region: Region) -> LocalRegion:
        """Returns where a region inside the box of a shard is in a holder's local tensor."""
        skipped = tuple(a - b for a, b in zip(region.start, shard.box.start, strict=True))
        if self.strides is None:
            start = tuple(a + b for a, b in zip(skipped, shard.local_start, strict=True))
            return LocalRegion(start, region.count, region.step)
        start = (shard.local_start[0] + sum(n * s for n, s in zip(skipped, self.strides, strict=True)),)
        steps = zip(region.count, region.step, self.strides, strict=True)
        return LocalRegion(start, region.count, tuple(n * s if count > 1 else 1 for count, n, s in steps))

    def shards_of(self, trainer_rank: int) -> tuple[ShardBox, ...]:
        return tuple(shard for shard in self.shards if trainer_rank in shard.ranks)

    def held_by(self, trainer_rank: int) -> list[tuple[Box, LocalRegion]]:
        """Returns the boxes that a rank holds, and where each is in its local tensor."""
        return [(shard.box, self.to_local(shard, Region.of(shard.box))) for shard in self.shards_of(trainer_rank)]

    def min_local_shape(self, trainer_rank: int) -> tuple[int, ...] | None:
        """Returns the smallest shape that the rank's local tensor can have; None if the rank holds nothing."""
        ends = []
        for shard in self.shards_of(trainer_rank):
            extent = shard.box.shape
            if self.strides is not None:
                extent = (1 + sum((n - 1) * s for n, s in zip(extent, self.strides, strict=True)),)
            ends.append(tuple(a + n for a, n in zip(shard.local_start, extent, strict=True)))
        return tuple(map(max, *ends)) if len(ends) > 1 else ends[0] if ends else None

    def covered_elements(self) -> int:
        """Returns the number of elements that at least one rank holds."""
        return sum(box.numel for box in {shard.box for shard in self.shards})


@dataclass(frozen=True, slots=True)
class ExplicitSharding:
    """The sharding of a checkpoint tensor of global `shape` (elements), passed along with each rank's local tensor."""

    shape: tuple[int, ...]
    shard_map: ShardMap


@functools.lru_cache(maxsize=4096)
def canonical(shard_map: ShardMap) -> ShardMap:
    """Returns the same map in the order that `ShardMap.of` gives it, so that all trainer ranks agree on it."""
    held = ((shard.box, shard.local_start, rank) for shard in shard_map.shards for rank in shard.ranks)
    return ShardMap.of(held, shard_map.strides)


@functools.lru_cache(maxsize=4096)
def invalid_reason(shape: tuple[int, ...], shard_map: ShardMap, trainer_ranks: int) -> str:
    """Returns why the map is not one of `shape` (elements) over `trainer_ranks` ranks; empty if it is valid."""
    shards, strides = shard_map.shards, shard_map.strides
    if strides is not None and (len(strides) != len(shape) or any(not 0 < s < MAX_STRIDE for s in strides)):
        return f"flat local tensors need {len(shape)} positive strides, not {strides}"
    local_dims = len(shape) if strides is None else 1
    for shard in shards:
        if not shard.ranks or any(a >= b for a, b in itertools.pairwise(shard.ranks)):
            return f"the ranks of {shard} must be distinct and ascending, and at least one"
        if not 0 <= shard.ranks[0] <= shard.ranks[-1] < trainer_ranks:
            return f"{shard} has ranks outside the {trainer_ranks} trainer ranks"
        if not len(shard.box.start) == len(shard.box.stop) == len(shape) or len(shard.local_start) != local_dims:
            return f"{shard} does not have the {len(shape)} dimensions of shape {shape}"
        bounds = zip(shard.box.start, shard.box.stop, shape, strict=True)
        if any(not 0 <= a < b <= n for a, b, n in bounds) or any(a < 0 for a in shard.local_start):
            return f"{shard} is empty or exceeds shape {shape}"
    overlap = _overlap(sorted({shard.box for shard in shards}))
    return f"{overlap[0]} and {overlap[1]} overlap" if overlap else ""


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two of these distinct boxes that overlap."""
    if len(boxes) < 2:
        return None
    starts = np.array([box.start for box in boxes], np.int64)
    stops = np.array([box.stop for box in boxes], np.int64)
    # Sorted along the dimension with the most distinct starts, a box overlaps only those that start before it stops.
    dim = max(range(starts.shape[1]), key=lambda d: len(np.unique(starts[:, d])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim])
    for number in range(len(boxes)):
        later = slice(number + 1, int(ends[number]))
        common = ((starts[later] < stops[number]) & (stops[later] > starts[number])).all(axis=1)
        if common.any():
            return boxes[order[number]], boxes[order[number + 1 + int(common.argmax())]]
    return None
