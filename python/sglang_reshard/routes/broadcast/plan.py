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
from typing import NamedTuple

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.layout.shard_map import ShardBox
from sglang_reshard.memory.peer_memory import ShardRead
from sglang_reshard.plan.read_plan import RankDemand, ReadPlan, demanded_shards
from sglang_reshard.plan.tensor_index import TensorIndex
from sglang_reshard.plan.topology import ClusterTopology
from sglang_reshard.routes.p2p.messages import BufferSlice, SendItem, cut_messages
from sglang_reshard.routes.strategy import Strategy, shard_reads


@dataclass(frozen=True, slots=True, order=True)
class BroadcastGroup:
    """`leader` reads from `trainer_rank` and broadcasts to all `members` (engine ranks, itself included)."""

    trainer_rank: int
    leader: int
    members: tuple[int, ...]


class Segment(NamedTuple):
    """A box of a shard of the layout's tensor number `tensor`, at `offset` bytes of a bucket, row-major."""

    tensor: int
    shard: ShardBox
    box: Box
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """One broadcast of a group."""

    group: BroadcastGroup
    segments: list[Segment]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """All transfers of one update.

    shards        that each group broadcasts, ascending
    nbytes        of these together
    direct_reads  shards that a rank reads from memory itself, bool [engine ranks, shards]
    direct_bytes  bytes of these, [trainer ranks, engine ranks]
    """

    bucket_bytes: int
    groups: tuple[BroadcastGroup, ...]
    shards: tuple[np.ndarray, ...]
    nbytes: tuple[int, ...]
    direct_reads: np.ndarray
    direct_bytes: np.ndarray

    def digest(self) -> str:
        found = hashlib.sha256(repr((self.bucket_bytes, self.groups, self.nbytes)).encode())
        for shards in self.shards:
            found.update(np.ascontiguousarray(shards).data)
        found.update(np.packbits(self.direct_reads).data)
        return found.hexdigest()

    def buckets(self, index: TensorIndex, engine_rank: int) -> list[Bucket]:
        """Returns the broadcasts that an engine rank takes part in, in the order in which it goes through them.

        All members of a group cut its shards alike. Taking the first bucket of every group, then the second, keeps
        groups that share no rank busy at the same time; that all ranks do so rules out deadlock.
        """
        found = []
        for number, (group, shards) in enumerate(zip(self.groups, self.shards, strict=True)):
            if engine_rank in group.members:
                held = [(tensor, index.shard(n)) for tensor, n in zip(index.tensor_of(shards), shards, strict=True)]
                items = [SendItem(shard.box.shape, index.tensor_class(tensor).item_bytes) for tensor, shard in held]
                for turn, message in enumerate(cut_messages(items, self.bucket_bytes)):
                    segments = [_segment(*held[part.item], part) for part in message.slices]
                    found.append((turn, number, Bucket(group, segments, message.nbytes)))
        return [bucket for *_, bucket in sorted(found, key=lambda turn: turn[:2])]


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
        for group, shards in zip(broadcasts.groups, broadcasts.shards, strict=True):
            if group.leader == engine_rank:
                whole = (_whole_shard(index, shard) for shard in shards.tolist())
                found.setdefault(group.trainer_rank, []).extend(whole)
        return dict(sorted(found.items()))


def plan_broadcast(
    index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int
) -> BroadcastPlan:
    """Plans the broadcasts for engine ranks with these demands.

    Each engine rank gets a shard with replicas from the nearest trainer rank. A bucket has at most `bucket_bytes`, and
    at least one element.

    Raises Unsupported if no engine rank can read the memory of a trainer rank that has to be read.
    """
    needed = demanded_shards(index, demands)
    direct_reads, direct_bytes = np.zeros_like(needed), np.zeros((len(topology.trainer_hosts), len(demands)), np.int64)
    nbytes = index.per_shard([[s.box.numel * c.item_bytes for s in c.shard_map.shards] for c in index.classes])
    shards_of: dict[BroadcastGroup, list[np.ndarray]] = {}
    for holders, audience, shards in _alike(index, needed):
        audience_of: dict[int, list[int]] = {}
        for engine_rank in audience:
            nearest = _nearest_trainer(holders, engine_rank, topology)
            audience_of.setdefault(nearest, []).append(engine_rank)
        for trainer_rank, listeners in audience_of.items():
            leader = _leader(trainer_rank, listeners, topology)
            members = tuple(sorted({leader, *listeners}))
            if len(members) == 1:
                direct_reads[leader, shards] = True
                direct_bytes[trainer_rank, leader] += nbytes[shards].sum()
            else:
                shards_of.setdefault(BroadcastGroup(trainer_rank, leader, members), []).append(shards)
    groups = tuple(sorted(shards_of))
    of_groups = tuple(np.sort(np.concatenate(shards_of[group])) for group in groups)
    sizes = tuple(int(nbytes[of_group].sum()) for of_group in of_groups)
    return BroadcastPlan(bucket_bytes, groups, of_groups, sizes, direct_reads, direct_bytes)


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


def _segment(tensor: int, shard: ShardBox, part: BufferSlice) -> Segment:
    box = shard.box
    if part.box is not None:
        start, stop = (tuple(map(sum, zip(ends, box.start, strict=True))) for ends in (part.box.start, part.box.stop))
        box = Box(start, stop)
    return Segment(int(tensor), shard, box, part.offset, part.nbytes)


def _whole_shard(index: TensorIndex, shard: int) -> ShardRead:
    tensor = int(index.tensor_of(shard))
    of, box = index.tensor_class(tensor), index.shard(shard)
    return ShardRead(tensor, of.shard_map.to_local(box, Region.of(box.box)), of.item_bytes)


def _nearest_trainer(holders: Sequence[int], engine_rank: int, topology: ClusterTopology) -> int:
    """Returns the holder that is nearest to the engine rank's relative position, of those that can be read from here.

    If there are none, of those on hosts with engine ranks.
    """
    trainer_hosts, engine_hosts = topology.trainer_hosts, topology.engine_hosts
    position = engine_rank * len(trainer_hosts) // len(engine_hosts)
    local = [h for h in holders if topology.can_read(h, engine_rank)]
    near = local or [h for h in holders if trainer_hosts[h] in engine_hosts] or holders
    return min(near, key=lambda h: (abs(h - position), h))


def _leader(trainer_rank: int, audience: Sequence[int], topology: ClusterTopology) -> int:
    """Returns the engine rank that reads from a trainer rank: for TP=4 to TP=16, engine rank 4k reads from k."""
    engine_ranks = range(len(topology.engine_hosts))
    able = [e for e in engine_ranks if topology.can_read(trainer_rank, e)]
    near = [e for e in audience if e in able]
    if not near and not any(topology.same_host(trainer_rank, e) for e in audience):
        # A rank outside the audience relays. It has not tried this handle, so it must have failed with no other.
        failed = {e for _, e in topology.unreadable}
        near = [e for e in able if e not in failed]
    if not near:
        host = topology.trainer_hosts[trainer_rank]
        why = f"no engine rank runs on the host of trainer rank {trainer_rank} ({host})"
        for e in audience:
            if (trainer_rank, e) in topology.unreadable:
                why = topology.why_unreadable(trainer_rank, e)
        raise Unsupported(
            f"{why}, and transport='broadcast' reads shards on the same host only", cure="use transport='p2p'"
        )
    position = trainer_rank * len(engine_ranks) // len(topology.trainer_hosts)
    return min(near, key=lambda e: (abs(e - position), e))
