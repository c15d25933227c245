"""One rank's part of a move: what it lists on both sides, what it reads, and its views and buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.extras.realloc.demand import Demand, listed_bits, plan_target_reads, target_program
from sglang_reshard.extras.realloc.memory import UsedMemory, check_not_overwritten, held_regions, same_memory
from sglang_reshard.extras.realloc.mover import Mover
from sglang_reshard.gpu.runtime import runtime, trainer_device
from sglang_reshard.layout.decoders import pack_blob
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import host_identity
from sglang_reshard.plan import ReadPlan, TensorIndex
from sglang_reshard.routes.p2p.links import P2pLink, build_rounds, destination_view, destination_views
from sglang_reshard.routes.p2p.messages import SendRequest, send_request
from sglang_reshard.sources import NamedTensors, TrainerState, as_list, describe, tied_names
from sglang_reshard.sources.versions import VersionCounters
from sglang_reshard.trace.program import Program

Given: TypeAlias = NamedTensors | torch.nn.Module | None


class Described(msgspec.Struct, frozen=True):
    """A rank's description of itself: the content hash of its list of the source, its host, its options.

    tied  name -> earlier name that is the same memory in its source, see `tied_names`
    """

    layout: str
    host: str
    gpu: bool
    options: dict[str, int | bool]
    tied: dict[str, str]


class PreparedMove(NamedTuple):
    """All that a run needs; bytes are those of `ReshardPlan`."""

    mover: Mover
    memory: UsedMemory
    versions: VersionCounters
    received_bytes: int
    sent_bytes: int
    copied_bytes: int
    extra_bytes: int


class RankPlan:
    """This rank's part: what it lists on both sides, and its reads, from their plan to views and buffers.

    packed  its layout of the source
    """

    def __init__(self, group: dist.ProcessGroup, source: Given, target: Given, options: dict[str, int | bool]) -> None:
        self._group, self._given, self._options = group, (source, target), options
        self._rank = dist.get_rank(group)
        self._source: TrainerState | None = None  # None if it lists nothing
        self._target: TrainerState | None = None
        self._versions = VersionCounters(())  # of the target's tensors
        self.packed = b""
        self.index: TensorIndex
        self.requests: dict[int, SendRequest] = {}
        self.packed_requests: dict[int, bytes] = {}
        self._ties: list[dict[str, str]] = []
        self._program: Program
        self._reads: ReadPlan

    def describe(self) -> Described:
        ranks, rank = tuple(dist.get_process_group_ranks(self._group)), self._rank
        found = []
        for given in self._given:
            listed = [] if given is None else as_list(given, rank)
            # Whether all elements of the source are held is checked once what all ranks list is known.
            found.append(describe(listed, trainer_rank=rank, global_ranks=ranks, partial=True) if listed else None)
        self._source, self._target = found
        self._versions = VersionCounters(listed)  # of the target
        self._given = None, None
        layout = self._source.layout if self._source else SourceLayout(len(ranks), (), (), ())
        digest, self.packed = pack_blob(layout)
        tied = tied_names(self._source.layout, self._source.shards) if self._source else {}
        return Described(digest, host_identity(), any(map(runtime().on_gpu, self._shards())), self._options, tied)

    @functools.cached_property
    def device(self) -> torch.device:
        """This rank's GPU."""
        return trainer_device(self._shards()) or runtime().current_device()

    def _shards(self) -> Sequence[torch.Tensor]:
        return [shard for state in (self._source, self._target) if state for shard in state.shards]

    def demand(self, layout: SourceLayout, told: Sequence[Described]) -> Demand:
        """Plans what this rank reads. Raises as `target_program` does."""
        self.index, self._ties = TensorIndex.of(layout), [other.tied for other in told]
        strict = bool(self._options["strict"])
        self._program = target_program(self.index, self._target, self._rank, strict=strict, tied=self._tied)
        self._reads = plan_target_reads(self.index, self._program, self._rank, [other.host for other in told])
        traffic = {peer: nbytes for peer, (nbytes, _) in self._reads.traffic().items() if peer != self._rank}
        self.requests = {peer: send_request(self._reads, peer) for peer in traffic}
        self.packed_requests = {peer: pack_blob(request)[1] for peer, request in self.requests.items()}
        sizes = {peer: len(packed) for peer, packed in self.packed_requests.items()}
        return Demand(listed_bits(self.index, self._program), traffic, sizes)

    def prepare(
        self,
        asked: Mapping[int, SendRequest],
        per_round: np.ndarray,
        device: torch.device,
    ) -> PreparedMove:
        """Makes all views and buffers.

        asked      what each peer asks of this rank
        per_round  bytes that each rank sends each rank per round, [source ranks, target ranks]
        device     of the buckets
        """
        shards = self._source_shards()
        sends = {}
        for peer, request in asked.items():
            views = [(region.view(shards[tensor]),) for tensor, region in request.entries()]
            sends[peer] = self._link(request, per_round[self._rank, peer], views)
        receives = {
            peer: self._link(request, per_round[peer, self._rank], destination_views(self._program, self._reads, peer))
            for peer, request in self.requests.items()
        }
        copied = list(self._copied(shards))
        written = [view for link in receives.values() for views in link.views for view in views]
        written += [destination for destination, _, _ in copied]
        check_not_overwritten(held_regions(self.index, shards, self._rank), written, self._rank)
        local = CopyList()
        for destination, source, _ in copied:
            local.add(destination, source)
        local.build()
        send_rounds, send_bytes = build_rounds(sends, device, pack=True)
        receive_rounds, receive_bytes = build_rounds(receives, device, pack=False)
        named = [(tensor.name, shard) for tensor, shard in zip(self.index.layout.tensors, shards, strict=True)]
        return PreparedMove(
            Mover(self._group, send_rounds, receive_rounds, local),
            UsedMemory(named, self._program.targets.items(), self._rank),
            self._versions,
            received_bytes=sum(link.payload_bytes for link in receives.values()),
            sent_bytes=sum(link.payload_bytes for link in sends.values()),
            copied_bytes=sum(nbytes for _, _, nbytes in copied),
            extra_bytes=send_bytes + receive_bytes + local.table_bytes,
        )

    def _tied(self, a: str, b: str) -> bool:
        """Returns whether two names are one tensor in the source: on every rank that holds elements of either."""
        holders: set[int] = set()
        for name in (a, b):
            shard_map = self.index.tensor_class(self.index.index_of[name]).shard_map
            holders.update(rank for shard in shard_map.shards for rank in shard.ranks)
        return all(self._ties[rank].get(a, a) == self._ties[rank].get(b, b) for rank in holders)

    def _link(self, request: SendRequest, round_bytes: int, views: Sequence[tuple[torch.Tensor, ...]]) -> P2pLink:
        return P2pLink.cut(self.index.layout, request, int(round_bytes), views)

    def _copied(self, shards: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yields (destination, source, bytes) within this rank, except memory that is the same on both sides."""
        for read in self._reads.reads_from(self._rank):
            _, item, tensor = self._reads.read(read)
            source = item.local_region.view(shards[tensor])
            destination = destination_view(self._program, self._reads, read)
            if not same_memory(source, destination):
                yield destination, source, item.nbytes

    def _source_shards(self) -> list[torch.Tensor]:
        """Returns this rank's local tensors in the layout's order; those that it does not list are empty."""
        state, layout = self._source, self.index.layout
        return list(state.within(layout).shards) if state else [torch.empty(0)] * len(layout.tensors)
