"""Models one engine rank: its real SGLang model without memory, its traced loader, its read plan and demand."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reshard.cli.plan.checkpoint import CONFIG, dtype_of, has_files
from sglang_reshard.cli.plan.figures import EngineRank
from sglang_reshard.cli.plan.request import PlanRequest, start_failure
from sglang_reshard.cli.plan.sglang_model import build_rank
from sglang_reshard.errors import ReshardError
from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.plan import RankDemand, RankLocation, ReadPlan, TensorIndex, plan_reads, rank_demand
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
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace

START = "SGLang's own start"  # the phase before those of an update
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class RankModel:
    """One engine rank's plan.

    program  the traced loader without its steps; its targets are meta tensors, which travel between processes
    """

    demand: RankDemand
    read_plan: ReadPlan
    program: Program


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an engine rank would refuse the update, and the phase that refuses it."""

    phase: str
    reason: str


def model_rank(request: PlanRequest, index: TensorIndex, engine_rank: int) -> RankModel | Refusal:
    """Builds and traces an engine rank in this process, which cannot build another one; returns why if it cannot."""
    try:
        model = _built(request, engine_rank)
    except (Exception, SystemExit) as error:
        config = json.loads((Path(request.folder) / CONFIG).read_text())
        return Refusal(START, start_failure(error, config, request.target, request.model))
    try:
        specs = [t.spec for t in index.layout.tensors]
        program = trace(model, specs, functools.partial(_start, request), weightless=True)
    except ReshardError as error:
        return Refusal("prepare", str(error))
    host, device = request.engine_hosts[engine_rank], request.engine_devices[engine_rank]
    ranks = request.target.ranks
    location = RankLocation(engine_rank, ranks, host, request.trainer_hosts, device, request.trainer_devices)
    reads = plan_reads(index, program.copies, location)
    targets = {name: torch.empty(t.numel(), dtype=t.dtype, device="meta") for name, t in program.targets.items()}
    demand = rank_demand(index, reads, host, device)
    return RankModel(demand, reads, Program(program.copies, targets, arrivals=program.arrivals))


def _built(request: PlanRequest, engine_rank: int) -> torch.nn.Module:
    # Otherwise torch would blame the fork for a model that needs a GPU, rather than the missing GPU.
    vars(torch.cuda)["_lazy_init"] = _no_gpu
    if request.device == "cpu":
        return _build(request, engine_rank)
    try:
        return _build(request, engine_rank, attention_backend="triton")
    except AssertionError as error:
        # Some models need another backend, on which no weight depends; SGLang checks it before it builds anything.
        if "attention backend" not in str(error):
            raise
        return _build(request, engine_rank, attention_backend="torch_native")


def _build(request: PlanRequest, engine_rank: int, **server_args: Any) -> torch.nn.Module:
    target = request.target
    if target.dp > 1:
        server_args |= {"dp_size": target.dp, "enable_dp_attention": True}
    return build_rank(
        request.folder,
        tp_size=target.tp,
        tp_rank=engine_rank,
        ep_size=target.ep,
        pp_size=target.pp,
        dtype=dtype_of(json.loads((Path(request.folder) / CONFIG).read_text())),
        weightless=True,
        **server_args,
    )


def _start(request: PlanRequest) -> EngineStart:
    """Returns how an engine starts on the folder that is planned for."""
    folder = Path(request.folder)
    if not has_files(folder):
        return EngineStart(None, f"{folder} has no safetensors")
    return EngineStart(folder_specs(folder))


def _no_gpu() -> None:
    raise RuntimeError("there is no GPU on this host")


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
    landing = Landing(rank.program).converting(_META, bucket_bytes)
    reads = Reads(engine_rank, _META, index, rank.read_plan, landing, {})
    senders = strategy.senders(engine_rank)
    like = _alike(index, rank, senders)
    cut = place(reads, strategy, {t: senders[t] for t in {*like.values()}})
    if isinstance(strategy, BroadcastStrategy):
        links, received, messages, largest = _broadcast_links(reads, strategy.broadcasts)
        buckets = buckets_bytes([(messages, largest)])
    else:
        links = {t: LinkLoad(nbytes, nbytes) for t, (nbytes, _) in rank.read_plan.traffic().items()}
        for t, link in cut.items():
            shards, request, share = _shards(index, t), send_request(rank.read_plan, t), senders[t]
            if strategy.name == "nixl":  # the engine rank reads, one-sided
                read = ReadLink.cut(
                    f"trainer rank {t}",
                    index.layout,
                    request,
                    functools.partial(_remote_shard, shards),
                    destination_views(reads.program, rank.read_plan, t),
                    share,
                    _META,
                )
                links[t] = LinkLoad(read.link.payload_bytes, read.read_bytes, len(read.messages), read.bucket_bytes)
            else:
                sent = sent_link(index.layout, shards, request, share)
                own, theirs = (packed_bytes(of.rounds(_META)) for of in (link, sent))
                count = len(link.messages)
                links[t] = LinkLoad(link.payload_bytes, link.payload_bytes, count, own, count, theirs)
        links |= {t: links[first] for t, first in like.items()}
        received = sum(link.received_bytes for link in links.values())
        messages = sum(link.messages for link in links.values())
        buckets = buckets_bytes((link.messages, link.bucket_bytes) for link in links.values())
    extra = reads.program.scratch_bytes + landing.nbytes + buckets
    demand = rank.demand
    return EngineLoad(EngineRank(engine_rank, demand.host, received, demand.least_bytes, extra, messages), links)


def _alike(index: TensorIndex, rank: RankModel, senders: Mapping[int, int]) -> dict[int, int]:
    """Returns, for each trainer rank that sends to an engine rank, the first one whose link is cut as its own is.

    Their requests, shapes of shards and copies are the same: of most ranks, as FSDP cuts evenly.
    """
    plan = rank.read_plan
    if rank.program.arrivals or plan.duplicates:
        return {t: t for t in senders}
    first: dict[Any, int] = {}
    found = {}
    for t, share in senders.items():
        shapes = tuple(of.shard_map.min_local_shape(t) for of in index.classes)
        own = plan.reads_from(t)
        copies = plan.copy_ids[own.start : own.stop].tobytes()
        found[t] = first.setdefault((send_request(plan, t), shapes, copies, share), t)
    return found


def place(reads: Reads, strategy: Strategy, sending: Mapping[int, int]) -> dict[int, P2pLink]:
    """Places weights that are converted on arrival as the route does, and returns the links of trainer ranks that send.

    sending  trainer rank -> its bytes of a round

    For NIXL this assumes reads without gaps.
    """
    index, program, plan = reads.tensor_index, reads.program, reads.read_plan
    if isinstance(strategy, BroadcastStrategy):
        if program.arrivals:
            written = targets_by_bucket(index, program, strategy.broadcasts.buckets(index, reads.engine_rank))
            direct = strategy.broadcasts.direct_reads[reads.engine_rank][plan.shards(index)]
            reads.landing.place(written, read_targets(plan, np.flatnonzero(direct).tolist()))
        return {}
    links = engine_links(reads, sending)
    if program.arrivals:
        mapped = read_targets(plan, mapped_reads(reads, sending))
        reads.landing.place(targets_by_round(links, plan), mapped, ahead=BUCKETS - 1)
    return links


def _remote_shard(shards: Sequence[torch.Tensor], tensor: int) -> RemoteShard:
    return RemoteShard("DRAM", 0, 0, shards[tensor].stride())


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
