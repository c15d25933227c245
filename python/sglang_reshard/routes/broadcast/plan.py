"""Plans broadcast and slice: the group of engine ranks and the bucket for each shard.

The engine ranks that need a shard decide how it is transferred:

- a shard that one rank needs is read directly from the trainer rank's memory;
- a shard that several ranks need is broadcast: the group's leader reads it into a bucket and broadcasts the bucket,
  and every member slices out what it needs.

Every engine rank computes the whole plan from all ranks' demands, and only its digest is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box, Region, aligned, split
from sglang_reshard.memory.peer_memory import ShardRead
from sglang_reshard.plan.read_plan import RankDemand, ReadPlan, demanded_shards
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.routes.strategy import Strategy, shard_reads


@dataclass(frozen=True, slots=True, order=True)
class BroadcastGroup:
    """`leader` reads from `trainer_rank` and broadcasts to all `members` (engine ranks, itself included)."""

    trainer_rank: int
    leader: int
    members: tuple[int, ...]


class Segment(NamedTuple):
    """A box of a shard at `offset` bytes of a bucket, row-major."""

    shard: int
    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast of group number `group`: its segments from `first` to `last`."""

    group: int
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """All segments of a group, by column. `chunk` numbers the boxes of a shard larger than a bucket; -1 for others."""

    shard: np.ndarray
    chunk: np.ndarray
    nbytes: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """All transfers of one update.

    segments      of each group
    buckets       in the order in which every rank goes through those of its groups
    direct_reads  shards that a rank reads from memory itself, bool [engine ranks, shards]
    direct_bytes  bytes of these, [trainer ranks, engine ranks]
    """

    bucket_bytes: int
    groups: tuple[BroadcastGroup, ...]
    segments: tuple[Segments, ...]
    buckets: tuple[Bucket, ...]
    direct_reads: np.ndarray
    direct_bytes: np.ndarray

    def digest(self) -> str:
        found = hashlib.sha256(repr((self.bucket_bytes, self.groups, self.buckets)).encode())
        for s in self.segments:
            for column in (s.shard, s.chunk, s.offset):
                found.update(np.ascontiguousarray(column).data)
        found.update(np.packbits(self.direct_reads).data)
        return found.hexdigest()

    def bucket_segments(self, index: TensorIndex, bucket: Bucket) -> list[Segment]:
        of, own = self.segments[bucket.group], slice(bucket.first, bucket.last)
        found = []
        for shard, chunk, offset in zip(
            of.shard[own].tolist(), of.chunk[own].tolist(), of.offset[own].tolist(), strict=True
        ):
            box = index.shard(shard).box
            if chunk >= 0:
                box = _chunks(box, index.item_bytes(shard), self.bucket_bytes)[chunk]
            found.append(Segment(shard, box, offset))
        return found


@dataclass(frozen=True, slots=True)
class BroadcastStrategy(Strategy):
    """Nothing is sent by trainer ranks; engine ranks broadcast as `plan` says."""

    broadcasts: BroadcastPlan = field(kw_only=True)

    def digest(self) -> str:
        return self.broadcasts.digest()

    def mapped_by(self, engine_rank: int, plan: ReadPlan, index: TensorIndex) -> dict[int, list[ShardRead]]:
        """Of shards that the engine rank reads alone, or leads."""
        broadcasts = self.broadcasts
        found: dict[int, list[ShardRead]] = {}
        alone = np.flatnonzero(broadcasts.direct_reads[engine_rank][plan.shards(index)])
        for trainer_rank in np.unique(plan.trainer_ranks[alone]).tolist():
            found[trainer_rank] = shard_reads(plan, index, alone[plan.trainer_ranks[alone] == trainer_rank])
        for group, segments in zip(broadcasts.groups, broadcasts.segments, strict=True):
            if group.leader == engine_rank:
                whole = (_whole_shard(index, shard) for shard in np.unique(segments.shard).tolist())
                found.setdefault(group.trainer_rank, []).extend(whole)
        return dict(sorted(found.items()))


def plan_broadcast(
    index: TensorIndex, demands: Sequence[RankDemand], trainer_hosts: Sequence[str], bucket_bytes: int
) -> BroadcastPlan:
    """Plans the broadcasts for engine ranks with these demands.

    Each engine rank gets a shard with replicas from the nearest trainer rank. A bucket has at most `bucket_bytes`, and
    at least one element.

    Raises Unsupported if no engine rank can read the memory of a trainer rank that has to be read.
    """
    needed = demanded_shards(index, demands)
    direct_reads, direct_bytes = np.zeros_like(needed), np.zeros((len(trainer_hosts), len(demands)), np.int64)
    nbytes = index.per_shard([[s.box.numel * c.item_bytes for s in c.shard_map.shards] for c in index.classes])
    shards_of: dict[BroadcastGroup, list[np.ndarray]] = {}
    for holders, audience, shards in _alike(index, needed):
        audience_of: dict[int, list[int]] = {}
        for engine_rank in audience:
            nearest = _nearest_trainer(holders, engine_rank, trainer_hosts, demands)
            audience_of.setdefault(nearest, []).append(engine_rank)
        for trainer_rank, listeners in audience_of.items():
            leader = _leader(trainer_rank, listeners, trainer_hosts, demands)
            members = tuple(sorted({leader, *listeners}))
            if len(members) == 1:
                direct_reads[leader, shards] = True
                direct_bytes[trainer_rank, leader] += nbytes[shards].sum()
            else:
                shards_of.setdefault(BroadcastGroup(trainer_rank, leader, members), []).append(shards)
    groups = tuple(sorted(shards_of))
    cut = [
        _buckets(index, np.sort(np.concatenate(shards_of[group])), nbytes, number, bucket_bytes)
        for number, group in enumerate(groups)
    ]
    # All ranks go through the buckets in this one order, which rules out deadlock. Taking the first bucket of every
    # group, then the second, keeps groups that share no rank busy at the same time.
    turns = sorted((turn, bucket.group, bucket) for _, buckets in cut for turn, bucket in enumerate(buckets))
    return BroadcastPlan(
        bucket_bytes,
        groups,
        tuple(segments for segments, _ in cut),
        tuple(turn[-1] for turn in turns),
        direct_reads,
        direct_bytes,
    )


def _alike(index: TensorIndex, needed: np.ndarray) -> list[tuple[tuple[int, ...], list[int], np.ndarray]]:
    """Groups the needed shards by (trainer ranks that hold them, engine ranks that need them)."""
    sets: dict[tuple[int, ...], int] = {}
    holders = index.per_shard(
        [[sets.setdefault(s.ranks, len(sets)) for s in c.shard_map.shards] for c in index.classes]
    )
    used = np.flatnonzero(needed.any(axis=0))
    if not len(used):
        return []
    audience = np.packbits(needed[:, used], axis=0)
    pattern = np.concatenate([holders[used].astype(">u4").view(np.uint8).reshape(-1, 4).T, audience])
    keys = np.ascontiguousarray(pattern.T).view(f"V{pattern.shape[0]}").ravel()
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(keys[order][1:] != keys[order][:-1]) + 1
    ranks = list(sets)
    return [
        (ranks[int(holders[used[group[0]]])], np.flatnonzero(needed[:, used[group[0]]]).tolist(), used[group])
        for group in np.split(order, ends)
    ]


def _buckets(
    index: TensorIndex, shards: np.ndarray, nbytes: np.ndarray, group: int, bucket_bytes: int
) -> tuple[Segments, list[Bucket]]:
    """Packs shards into buckets, in order; a shard larger than a bucket is cut into chunks."""
    large = np.flatnonzero(nbytes[shards] > bucket_bytes)
    items = {int(i): index.item_bytes(int(shards[i])) for i in large}
    chunks = {i: _chunks(index.shard(int(shards[i])).box, item, bucket_bytes) for i, item in items.items()}
    times = np.ones(len(shards), np.int64)
    times[large] = [len(chunks[int(i)]) for i in large]
    begin = np.cumsum(times) - times
    shard, size = np.repeat(shards, times), np.repeat(nbytes[shards], times)
    chunk = np.full(int(times.sum()), -1, np.int32)
    for i, boxes in chunks.items():
        own = slice(int(begin[i]), int(begin[i]) + len(boxes))
        chunk[own] = np.arange(len(boxes))
        size[own] = [box.numel * items[i] for box in boxes]
    padded = aligned(size)
    upto = np.cumsum(padded)
    offset = np.empty_like(size)
    buckets = []
    first = 0
    while first < len(size):
        before = int(upto[first] - padded[first])
        # The last segment of a bucket needs no padding: it may end where its padding would not fit.
        last = int(np.searchsorted(upto, before + bucket_bytes, side="right"))
        if last < len(size) and upto[last] - padded[last] + size[last] <= before + bucket_bytes:
            last += 1
        last = max(last, first + 1)
        offset[first:last] = upto[first:last] - padded[first:last] - before
        buckets.append(Bucket(group, first, last, int(upto[last - 1]) - before))
        first = last
    return Segments(shard, chunk, size, offset), buckets


def _whole_shard(index: TensorIndex, shard: int) -> ShardRead:
    tensor = int(index.tensor_of(shard))
    of, box = index.tensor_class(tensor), index.shard(shard)
    return ShardRead(tensor, of.shard_map.to_local(box, Region.of(box.box)), of.item_bytes)


@lru_cache(maxsize=256)  # called for each of its buckets
def _chunks(box: Box, item_bytes: int, bucket_bytes: int) -> tuple[Box, ...]:
    """Cuts a box into boxes of at most one bucket."""
    return tuple(split(box, max(1, bucket_bytes // item_bytes)))


def _nearest_trainer(
    holders: Sequence[int], engine_rank: int, trainer_hosts: Sequence[str], demands: Sequence[RankDemand]
) -> int:
    """Returns the holder that is nearest to the engine rank's relative position, of those that can be read from here.

    If there are none, of those on hosts with engine ranks.
    """
    position = engine_rank * len(trainer_hosts) // len(demands)
    local = [h for h in holders if _can_read(demands[engine_rank], h, trainer_hosts)]
    near = local or [h for h in holders if any(d.host == trainer_hosts[h] for d in demands)] or holders
    return min(near, key=lambda h: (abs(h - position), h))


def _leader(
    trainer_rank: int, audience: Sequence[int], trainer_hosts: Sequence[str], demands: Sequence[RankDemand]
) -> int:
    """Returns the engine rank that reads from a trainer rank: for TP=4 to TP=16, engine rank 4k reads from k."""
    host = trainer_hosts[trainer_rank]
    able = [e for e, demand in enumerate(demands) if _can_read(demand, trainer_rank, trainer_hosts)]
    near = [e for e in audience if e in able]
    if not near and all(demands[e].host != host for e in audience):
        # A rank outside the audience relays. It has not tried this handle, so it must have failed with no other.
        near = [e for e in able if not demands[e].unreadable]
    if not near:
        why = f"no engine rank runs on the host of trainer rank {trainer_rank} ({host})"
        for e in audience:
            if reason := demands[e].unreadable.get(trainer_rank):
                why = f"engine rank {e} cannot map the memory of trainer rank {trainer_rank}: {reason}"
        raise Unsupported(
            f"{why}, and transport='broadcast' reads shards on the same host only", cure="use transport='p2p'"
        )
    position = trainer_rank * len(demands) // len(trainer_hosts)
    return min(near, key=lambda e: (abs(e - position), e))


def _can_read(demand: RankDemand, trainer_rank: int, trainer_hosts: Sequence[str]) -> bool:
    return trainer_hosts[trainer_rank] == demand.host and trainer_rank not in demand.unreadable
