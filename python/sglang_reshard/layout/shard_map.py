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

from sglang_reshard.layout.regions import Box, Region


class ShardBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor that trainer ranks hold: what torch's placement `Shard(dim)` comes to on one rank.

    ranks        trainer ranks that hold the box, ascending; more than one hold replicas
    local_start  index of the box's first element in their local tensors
    """

    box: Box
    ranks: tuple[int, ...]
    local_start: tuple[int, ...]

    def to_local(self, region: Region) -> Region:
        """Returns a region inside the box with its indices counted in a holder's local tensor."""
        starts = zip(region.start, self.box.start, self.local_start, strict=True)
        return Region(tuple(a - b + local for a, b, local in starts), region.count, region.step)


class ShardMap(msgspec.Struct, frozen=True, array_like=True):
    """All shards of one tensor.

    Boxes are equal or disjoint. Equal boxes belong to several shards if they start at different indices of their
    ranks' local tensors. A local tensor may be larger than its shards: the rest is padding, or other tensors.
    """

    shards: tuple[ShardBox, ...]

    @classmethod
    def of(cls, held: Iterable[tuple[Box, tuple[int, ...], int]]) -> ShardMap:
        """Builds the map from (box, its start in the local tensor, trainer rank), in any order."""
        ranks: dict[tuple[Box, tuple[int, ...]], set[int]] = {}
        for box, local_start, rank in held:
            ranks.setdefault((box, local_start), set()).add(rank)
        shards = (ShardBox(box, tuple(sorted(r)), local_start) for (box, local_start), r in ranks.items())
        return cls(tuple(sorted(shards, key=lambda shard: (shard.box.start, shard.ranks, shard.local_start))))

    def shards_of(self, trainer_rank: int) -> tuple[ShardBox, ...]:
        return tuple(shard for shard in self.shards if trainer_rank in shard.ranks)

    def min_local_shape(self, trainer_rank: int) -> tuple[int, ...] | None:
        """Returns the smallest shape that the rank's local tensor can have; None if the rank holds nothing."""
        ends = [
            tuple(a + n for a, n in zip(shard.local_start, shard.box.shape, strict=True))
            for shard in self.shards_of(trainer_rank)
        ]
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
    return ShardMap.of((shard.box, shard.local_start, rank) for shard in shard_map.shards for rank in shard.ranks)


@functools.lru_cache(maxsize=4096)
def invalid_reason(sharding: ExplicitSharding, trainer_ranks: int) -> str | None:
    """Returns why the sharding is not one of its shape over `trainer_ranks` ranks; None if it is valid."""
    shape, shards = sharding.shape, sharding.shard_map.shards
    for shard in shards:
        if not shard.ranks or any(a >= b for a, b in itertools.pairwise(shard.ranks)):
            return f"the ranks of {shard} are not distinct and ascending, or there are none"
        if not 0 <= shard.ranks[0] <= shard.ranks[-1] < trainer_ranks:
            return f"{shard} has ranks that are not among the {trainer_ranks} trainer ranks"
        if not len(shard.box.start) == len(shard.box.stop) == len(shard.local_start) == len(shape):
            return f"{shard} does not have the {len(shape)} dimensions of shape {shape}"
        bounds = zip(shard.box.start, shard.box.stop, shape, strict=True)
        if any(not 0 <= a < b <= n for a, b, n in bounds) or any(a < 0 for a in shard.local_start):
            return f"{shard} is empty or exceeds shape {shape}"
    overlap = _overlap(sorted({shard.box for shard in shards}))
    return f"{overlap[0]} and {overlap[1]} overlap" if overlap else None


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
