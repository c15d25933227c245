"""Computes the bytes that move to and from every rank with the chosen strategy, and the buffers that they take.

It uses the plans, messages and views that the routes themselves are built from, with meta tensors for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.cli.plan.figures import EngineRank
from sglang_reshard.cli.plan.rank_model import RankModel
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import converting
from sglang_reshard.plan import TensorIndex
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.broadcast.engine import targets_by_bucket
from sglang_reshard.routes.broadcast.plan import BroadcastPlan, BroadcastStrategy
from sglang_reshard.routes.ipc import mapped_reads, read_targets
from sglang_reshard.routes.nixl.remote_shards import RemoteShard
from sglang_reshard.routes.p2p.links import (
    BUCKETS,
    P2pLink,
    destination_views,
    engine_links,
    packed_bytes,
    sent_link,
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


class EngineLoad(NamedTuple):
    """One engine rank's part of an update. `links`: by trainer rank, for those that this rank reads or is sent."""

    figures: EngineRank
    links: Mapping[int, LinkLoad]


def buckets_bytes(links: Iterable[tuple[int, int]]) -> int:
    """Returns the bytes of the buckets on a side with these links: (messages, bytes of its part of a bucket)."""
    found = list(links)
    rounds = max((messages for messages, _ in found), default=0)
    return min(BUCKETS, rounds) * sum(nbytes for _, nbytes in found)


def engine_load(
    index: TensorIndex, strategy: Strategy, engine_rank: int, rank: RankModel, bucket_bytes: int
) -> EngineLoad:
    """Returns the load of one engine rank."""
    landing = converting(Landing(rank.program), _META, bucket_bytes)
    reads = Reads(engine_rank, _META, index, rank.read_plan, landing, {})
    cut = place(reads, strategy)
    if isinstance(strategy, BroadcastStrategy):
        links, received, messages, largest = _broadcast_links(reads, strategy.broadcasts)
        buckets = buckets_bytes([(messages, largest)])
    else:
        links = {t: LinkLoad(nbytes, nbytes) for t, (nbytes, _) in rank.read_plan.traffic().items()}
        for t, link in cut.items():
            shards = _shards(index, t)
            if strategy.name == "nixl":
                links[t] = _read_load(reads, t, strategy.senders(engine_rank)[t], shards)
            else:
                links[t] = _sent_load(reads, t, strategy.senders(engine_rank)[t], shards, link)
        received = sum(link.received_bytes for link in links.values())
        messages = sum(link.messages for link in links.values())
        buckets = buckets_bytes((link.messages, link.bucket_bytes) for link in links.values())
    extra = reads.program.scratch_bytes + landing.nbytes + buckets
    demand = rank.demand
    return EngineLoad(EngineRank(engine_rank, demand.host, received, demand.least_bytes, extra, messages), links)


def place(reads: Reads, strategy: Strategy) -> dict[int, P2pLink]:
    """Places weights that are converted on arrival as the route does, and returns the links of trainer ranks that send.

    For NIXL this assumes reads without gaps.
    """
    index, program, plan = reads.tensor_index, reads.program, reads.read_plan
    if isinstance(strategy, BroadcastStrategy):
        if program.arrivals:
            written = targets_by_bucket(index, program, strategy.broadcasts.buckets(index, reads.engine_rank))
            direct = strategy.broadcasts.direct_reads[reads.engine_rank][plan.shards(index)]
            reads.landing.place(written, read_targets(plan, np.flatnonzero(direct).tolist()))
        return {}
    sending = strategy.senders(reads.engine_rank)
    links = engine_links(index.layout, plan, program, sending)
    if program.arrivals:
        mapped = read_targets(plan, mapped_reads(reads, sending))
        reads.landing.place(targets_by_round(links, plan), mapped, ahead=BUCKETS - 1)
    return links


def _sent_load(
    reads: Reads, trainer_rank: int, share: int, shards: Sequence[torch.Tensor], received: P2pLink
) -> LinkLoad:
    """Returns the load of a link that the trainer rank sends over."""
    sent = sent_link(reads.tensor_index.layout, shards, send_request(reads.read_plan, trainer_rank), share)
    own, theirs = (packed_bytes(link.rounds(_META)) for link in (received, sent))
    nbytes, count = received.payload_bytes, len(received.messages)
    return LinkLoad(nbytes, nbytes, count, own, count, theirs)


def _read_load(reads: Reads, trainer_rank: int, share: int, shards: Sequence[torch.Tensor]) -> LinkLoad:
    """Returns the load of a link that the engine rank reads over, one-sided."""
    link = ReadLink.cut(
        f"trainer rank {trainer_rank}",
        reads.tensor_index.layout,
        send_request(reads.read_plan, trainer_rank),
        lambda tensor: RemoteShard("DRAM", 0, 0, shards[tensor].stride()),
        destination_views(reads.program, reads.read_plan, trainer_rank),
        share,
        _META,
    )
    return LinkLoad(link.link.payload_bytes, link.read_bytes, len(link.messages), link.bucket_bytes)


def _broadcast_links(reads: Reads, plan: BroadcastPlan) -> tuple[dict[int, LinkLoad], int, int, int]:
    """Returns the links, the bytes that this rank receives, the number of its broadcasts, and bytes of the largest.

    Shards that only this rank needs are read, others arrive by its groups.
    """
    engine_rank, reading = reads.engine_rank, reads.read_plan
    direct = plan.direct_reads[engine_rank][reading.shards(reads.tensor_index)]
    trainer_ranks = reads.tensor_index.layout.trainer_ranks
    read = np.bincount(reading.trainer_ranks[direct], reading.nbytes[direct], trainer_ranks)
    received = int(read.sum())
    for group, payload in zip(plan.groups, plan.nbytes, strict=True):
        received += payload * (engine_rank in group.members)
        read[group.trainer_rank] += payload * (engine_rank == group.leader)
    links = {int(t): LinkLoad(int(read[t]), int(read[t])) for t in np.flatnonzero(read)}
    buckets = plan.buckets(reads.tensor_index, engine_rank)
    return links, received, len(buckets), max((bucket.nbytes for bucket in buckets), default=0)


def _shards(index: TensorIndex, trainer_rank: int) -> list[torch.Tensor]:
    """Returns a trainer rank's shards in the layout's order; local tensors are contiguous."""
    by_class = []
    for of in index.classes:
        shape = of.shard_map.min_local_shape(trainer_rank) or (0,)
        by_class.append(torch.empty(shape, dtype=getattr(torch, of.dtype), device=_META))
    return [by_class[number] for number in index.class_of.tolist()]
