"""Computes the bytes that move to and from every rank with the chosen strategy, and the buffers that they take.

It uses the plans, messages and views that the transports themselves are built from, with meta tensors for memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
import torch

from sglang_reshard.cli.plan.rank_model import RankModel
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import converting
from sglang_reshard.plan import TensorIndex
from sglang_reshard.routes.broadcast.engine import targets_by_bucket
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, BroadcastStrategy
from sglang_reshard.routes.ipc import read_targets
from sglang_reshard.routes.nixl.remote_shards import RemoteShard
from sglang_reshard.routes.p2p.links import (
    BUCKETS,
    P2pLink,
    destination_reads,
    destination_view,
    engine_links,
    packed_bytes,
    targets_by_round,
)
from sglang_reshard.routes.p2p.messages import send_request
from sglang_reshard.routes.read_link import ReadLink
from sglang_reshard.routes.strategy import Strategy

_META = torch.device("meta")


class LinkLoad(NamedTuple):
    """The load that one link adds to one side in an update. `bucket_bytes` is its part of each bucket."""

    messages: int
    payload_bytes: int
    bucket_bytes: int


def buckets_bytes(loads: Sequence[LinkLoad]) -> int:
    """Returns the bytes of the buckets on a side that has these links."""
    rounds = max((load.messages for load in loads), default=0)
    return min(BUCKETS, rounds) * sum(load.bucket_bytes for load in loads)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine rank's part of an update.

    sent      trainer rank -> the link's load on this rank and on the trainer rank, where the trainer rank sends
    read      trainer rank -> bytes that this rank reads from its memory
    received  bytes received by this rank
    extra     bytes of this rank's buffers
    messages  number of messages that this rank receives, or of broadcasts that it participates in
    """

    sent: dict[int, tuple[LinkLoad, LinkLoad]]
    read: dict[int, int]
    received: int
    extra: int
    messages: int


def engine_load(
    index: TensorIndex, strategy: Strategy, engine_rank: int, rank: RankModel, bucket_bytes: int
) -> EngineLoad:
    """Returns the load of one engine rank."""
    scratch = rank.program.scratch_bytes + arrival_bytes(index, strategy, engine_rank, rank, bucket_bytes)
    if isinstance(strategy, BroadcastStrategy):
        return _broadcast_load(index, strategy.broadcasts, engine_rank, rank, scratch)
    sending = strategy.senders(engine_rank)
    read = {t: nbytes for t, (nbytes, _) in rank.read_plan.traffic().items() if t not in sending}
    link_loads = _read_loads if strategy.name == "nixl" else _link_loads
    sent = {t: link_loads(index, rank, t, share) for t, share in sending.items()}
    mine = [load for load, _ in sent.values()]
    return EngineLoad(
        sent,
        read,
        sum(read.values()) + sum(load.payload_bytes for load in mine),
        scratch + buckets_bytes(mine),
        sum(load.messages for load in mine),
    )


def arrival_bytes(index: TensorIndex, strategy: Strategy, engine_rank: int, rank: RankModel, bucket_bytes: int) -> int:
    """Returns the bytes of memory for weights quantized on arrival. For NIXL this assumes reads without gaps."""
    if not rank.program.arrivals:
        return 0
    landing, reads = converting(Landing(rank.program), _META, bucket_bytes), rank.read_plan
    if isinstance(strategy, BroadcastStrategy):
        plan = strategy.broadcasts
        own = [bucket for bucket in plan.buckets if engine_rank in plan.groups[bucket.group].members]
        direct = np.flatnonzero(plan.direct_reads[engine_rank][reads.shards(index)]).tolist()
        landing.place(targets_by_bucket(index, rank.program, plan, own), read_targets(reads, direct))
    else:
        sending = strategy.senders(engine_rank)
        links = engine_links(index.layout, reads, rank.program, sending)
        mapped = [read for t in reads.traffic() if t not in sending for read in reads.reads_from(t)]
        landing.place(targets_by_round(links, reads), read_targets(reads, mapped), ahead=BUCKETS - 1)
    return landing.nbytes


def _link_loads(index: TensorIndex, rank: RankModel, trainer_rank: int, share: int) -> tuple[LinkLoad, LinkLoad]:
    """Returns the load of a link on its engine rank and on its trainer rank; assumes contiguous local tensors."""
    request = send_request(rank.read_plan, trainer_rank)
    items = list(request.entries())

    @functools.cache
    def shard_of(kind: int) -> torch.Tensor:
        of = index.classes[kind]
        return torch.empty(
            of.shard_map.min_local_shape(trainer_rank) or (0,), dtype=getattr(torch, of.dtype), device=_META
        )

    def source(item: int) -> tuple[torch.Tensor, ...]:
        tensor, region = items[item]
        return (region.view(shard_of(int(index.class_of[tensor]))),)

    def load(views: Sequence[tuple[torch.Tensor, ...]]) -> LinkLoad:
        link = P2pLink.cut(index.layout, request, share, views)
        return LinkLoad(len(link.messages), link.payload_bytes, packed_bytes(link.rounds(_META)))

    return load(_destinations(rank, trainer_rank)), load(_Views(len(items), source))


def _read_loads(index: TensorIndex, rank: RankModel, trainer_rank: int, share: int) -> tuple[LinkLoad, LinkLoad]:
    """As `_link_loads`, for a trainer rank whose memory is read one-sided: it has no buckets and sends no message."""

    @functools.cache
    def shard_of(tensor: int) -> RemoteShard:
        shape = index.classes[int(index.class_of[tensor])].shard_map.min_local_shape(trainer_rank) or (0,)
        return RemoteShard("DRAM", 0, 0, tuple(torch.empty(shape, device=_META).stride()))

    request = send_request(rank.read_plan, trainer_rank)
    views = _destinations(rank, trainer_rank)
    link = ReadLink.cut(f"trainer rank {trainer_rank}", index.layout, request, shard_of, views, share, _META)
    own = LinkLoad(len(link.messages), link.read_bytes, link.bucket_bytes)
    return own, LinkLoad(0, link.link.payload_bytes, 0)


def _destinations(rank: RankModel, trainer_rank: int) -> _Views:
    """Returns the views of live memory of each item that a trainer rank has for this rank."""
    rows = destination_reads(rank.read_plan, trainer_rank)
    return _Views(
        len(rows), lambda item: tuple(destination_view(rank.program, rank.read_plan, row) for row in rows[item])
    )


class _Views(Sequence[tuple[torch.Tensor, ...]]):
    """A sequence of views that makes each on access; few of them are ever accessed."""

    def __init__(self, count: int, of_item: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
        self._count, self._of_item = count, of_item

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, item: int) -> tuple[torch.Tensor, ...]: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[tuple[torch.Tensor, ...]]: ...
    def __getitem__(self, item: int | slice) -> tuple[torch.Tensor, ...] | Sequence[tuple[torch.Tensor, ...]]:
        if isinstance(item, slice):
            return [self._of_item(i) for i in range(*item.indices(self._count))]
        return self._of_item(item)


def _broadcast_load(
    index: TensorIndex, plan: BroadcastPlan, engine_rank: int, rank: RankModel, scratch: int
) -> EngineLoad:
    """Returns the load under broadcast: shards that only this rank needs are read, others arrive by its groups."""
    reads = rank.read_plan
    direct = plan.direct_reads[engine_rank][reads.shards(index)]
    by_trainer = np.bincount(reads.trainer_ranks[direct], reads.nbytes[direct])
    read = {int(t): int(by_trainer[t]) for t in np.flatnonzero(by_trainer)}
    received = sum(read.values())
    for group, segments in zip(plan.groups, plan.segments, strict=True):
        payload = int(segments.nbytes.sum())
        if engine_rank in group.members:
            received += payload
        if engine_rank == group.leader:
            read[group.trainer_rank] = read.get(group.trainer_rank, 0) + payload
    mine = [r.nbytes for r in plan.buckets if engine_rank in plan.groups[r.group].members]
    buckets = min(2, len(mine)) * max(mine, default=0)
    return EngineLoad({}, read, received, scratch + buckets, len(mine))


def largest_tensor_bytes(index: TensorIndex) -> int:
    return max((math.prod(kind.shape) * kind.item_bytes for kind in index.classes), default=0)
