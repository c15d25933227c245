"""Computes the bytes that move to and from every rank with the chosen strategy, and the buffers that they take.

It uses the plans, messages and views that the routes themselves are built from, with meta tensors for memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reshard.cli.plan.rank_model import RankModel
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import converting
from sglang_reshard.plan import TensorIndex
from sglang_reshard.routes.broadcast.engine import targets_by_bucket
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, BroadcastStrategy, Bucket
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
    """The bytes and messages from one trainer rank to one engine rank in an update.

    payload_bytes      that the engine rank lacks
    received_bytes     that reach it: more if it reads gaps, too
    messages           that it receives; none of mapped memory
    bucket_bytes       the link's part of each of the engine rank's buckets
    sent_messages      that the trainer rank sends; none if the engine rank reads them
    sent_bucket_bytes  the link's part of each of the trainer rank's buckets
    """

    payload_bytes: int
    received_bytes: int
    messages: int = 0
    bucket_bytes: int = 0
    sent_messages: int = 0
    sent_bucket_bytes: int = 0


NOTHING = LinkLoad(0, 0)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine rank's part of an update.

    links     trainer rank -> the load of its link, for those whose memory this rank reads or is sent
    received  bytes received by this rank
    extra     bytes of this rank's buffers
    messages  number of messages that this rank receives, or of broadcasts that it participates in
    """

    links: Mapping[int, LinkLoad]
    received: int
    extra: int
    messages: int


def buckets_bytes(links: Iterable[tuple[int, int]]) -> int:
    """Returns the bytes of the buckets on a side with these links: (messages, bytes of its part of a bucket)."""
    found = list(links)
    rounds = max((messages for messages, _ in found), default=0)
    return min(BUCKETS, rounds) * sum(nbytes for _, nbytes in found)


def engine_load(
    index: TensorIndex, strategy: Strategy, engine_rank: int, rank: RankModel, bucket_bytes: int
) -> EngineLoad:
    """Returns the load of one engine rank."""
    scratch = rank.program.scratch_bytes + arrival_bytes(index, strategy, engine_rank, rank, bucket_bytes)
    if isinstance(strategy, BroadcastStrategy):
        return _broadcast_load(index, strategy.broadcasts, engine_rank, rank, scratch)
    sending = strategy.senders(engine_rank)
    link_load = _read_load if strategy.name == "nixl" else _sent_load
    links = {
        t: link_load(index, rank, t, sending[t]) if t in sending else LinkLoad(nbytes, nbytes)
        for t, (nbytes, _) in rank.read_plan.traffic().items()
    }
    loads = list(links.values())
    return EngineLoad(
        links,
        sum(load.received_bytes for load in loads),
        scratch + buckets_bytes((load.messages, load.bucket_bytes) for load in loads),
        sum(load.messages for load in loads),
    )


def arrival_bytes(index: TensorIndex, strategy: Strategy, engine_rank: int, rank: RankModel, bucket_bytes: int) -> int:
    """Returns the bytes of memory for weights quantized on arrival. For NIXL this assumes reads without gaps."""
    if not rank.program.arrivals:
        return 0
    landing, reads = converting(Landing(rank.program), _META, bucket_bytes), rank.read_plan
    if isinstance(strategy, BroadcastStrategy):
        plan = strategy.broadcasts
        direct = np.flatnonzero(plan.direct_reads[engine_rank][reads.shards(index)]).tolist()
        landing.place(
            targets_by_bucket(index, rank.program, plan, _buckets(plan, engine_rank)), read_targets(reads, direct)
        )
    else:
        sending = strategy.senders(engine_rank)
        links = engine_links(index.layout, reads, rank.program, sending)
        mapped = [read for t in reads.traffic() if t not in sending for read in reads.reads_from(t)]
        landing.place(targets_by_round(links, reads), read_targets(reads, mapped), ahead=BUCKETS - 1)
    return landing.nbytes


def _sent_load(index: TensorIndex, rank: RankModel, trainer_rank: int, share: int) -> LinkLoad:
    """Returns the load of a link that the trainer rank sends over."""
    request = send_request(rank.read_plan, trainer_rank)
    items, shard_of = list(request.entries()), _shards(index, trainer_rank)

    def source(item: int) -> tuple[torch.Tensor, ...]:
        tensor, region = items[item]
        return (region.view(shard_of(tensor)),)

    received = P2pLink.cut(index.layout, request, share, _destinations(rank, trainer_rank))
    sent = replace(received, views=_made_on_access(source))
    own, theirs = (packed_bytes(link.rounds(_META)) for link in (received, sent))
    nbytes, count = received.payload_bytes, len(received.messages)
    return LinkLoad(nbytes, nbytes, count, own, count, theirs)


def _read_load(index: TensorIndex, rank: RankModel, trainer_rank: int, share: int) -> LinkLoad:
    """Returns the load of a link that the engine rank reads over, one-sided."""
    shard_of = _shards(index, trainer_rank)
    link = ReadLink.cut(
        f"trainer rank {trainer_rank}",
        index.layout,
        send_request(rank.read_plan, trainer_rank),
        lambda tensor: RemoteShard("DRAM", 0, 0, shard_of(tensor).stride()),
        _destinations(rank, trainer_rank),
        share,
        _META,
    )
    return LinkLoad(link.link.payload_bytes, link.read_bytes, len(link.messages), link.bucket_bytes)


def _shards(index: TensorIndex, trainer_rank: int) -> Callable[[int], torch.Tensor]:
    """Returns what makes a trainer rank's shard of a tensor, by its number; local tensors are contiguous."""

    @functools.cache
    def shard_of(number: int) -> torch.Tensor:
        of = index.classes[number]
        shape = of.shard_map.min_local_shape(trainer_rank) or (0,)
        return torch.empty(shape, dtype=getattr(torch, of.dtype), device=_META)

    return lambda tensor: shard_of(int(index.class_of[tensor]))


def _destinations(rank: RankModel, trainer_rank: int) -> Any:
    """Returns the views of live memory of each item that a trainer rank has for this rank."""
    reads_of_items = destination_reads(rank.read_plan, trainer_rank)
    return _made_on_access(
        lambda item: tuple(destination_view(rank.program, rank.read_plan, read) for read in reads_of_items[item])
    )


def _made_on_access(views: Callable[[int], tuple[torch.Tensor, ...]]) -> Any:
    """Returns what makes the views of an item when they are asked for by its number, as those of few items are."""

    class Views:
        def __getitem__(self, item: int) -> tuple[torch.Tensor, ...]:
            return views(item)

    return Views()


def _broadcast_load(
    index: TensorIndex, plan: BroadcastPlan, engine_rank: int, rank: RankModel, scratch: int
) -> EngineLoad:
    """Returns the load under broadcast: shards that only this rank needs are read, others arrive by its groups."""
    reads = rank.read_plan
    direct = plan.direct_reads[engine_rank][reads.shards(index)]
    read = np.zeros(index.layout.trainer_ranks, np.int64)
    np.add.at(read, reads.trainer_ranks[direct], reads.nbytes[direct])
    received = int(read.sum())
    for group, segments in zip(plan.groups, plan.segments, strict=True):
        payload = int(segments.nbytes.sum())
        received += payload * (engine_rank in group.members)
        read[group.trainer_rank] += payload * (engine_rank == group.leader)
    mine = [bucket.nbytes for bucket in _buckets(plan, engine_rank)]
    links = {int(t): LinkLoad(int(read[t]), int(read[t])) for t in np.flatnonzero(read)}
    return EngineLoad(links, received, scratch + min(BUCKETS, len(mine)) * max(mine, default=0), len(mine))


def _buckets(plan: BroadcastPlan, engine_rank: int) -> list[Bucket]:
    return [bucket for bucket in plan.buckets if engine_rank in plan.groups[bucket.group].members]
