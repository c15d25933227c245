"""One rank's part of a move: what it lists on both sides, what it reads, its views and buffers, and its messages.

A target rank plans from its own layout alone. So ranks may keep a tensor in different shardings: a generation layout of
TP=2 on some ranks and of TP=4 on others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import DeadlineExceeded, Mismatch, Unsupported
from sglang_reshard.extras.realloc.memory import UsedMemory, check_not_overwritten, held_regions, same_memory
from sglang_reshard.gpu.runtime import runtime, trainer_device
from sglang_reshard.layout.decoders import pack_blob
from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import host_identity
from sglang_reshard.memory.overlap import Written, written_once
from sglang_reshard.plan import RankLocation, ReadPlan, TensorIndex, plan_reads
from sglang_reshard.routes.p2p.links import (
    P2pLink,
    Round,
    build_rounds,
    destination_view,
    destination_views,
    sent_link,
)
from sglang_reshard.routes.p2p.messages import SendRequest, send_request
from sglang_reshard.routes.wire.rounds import Wait, run_rounds
from sglang_reshard.shown_names import some_names
from sglang_reshard.sources import NamedTensors, SourceTensor, TrainerState, as_list, describe, tied_names
from sglang_reshard.sources.versions import VersionCounters
from sglang_reshard.trace.program import Copy, Program, check_cast

Given: TypeAlias = NamedTensors | torch.nn.Module | None

_TAG = 0x2E5A  # gloo keeps these messages apart from others between the same ranks


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
        self.packed_requests: dict[int, bytes] = {}
        self._requests: dict[int, SendRequest] = {}
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
        self._requests = {peer: send_request(self._reads, peer) for peer in traffic}
        self.packed_requests = {peer: pack_blob(request)[1] for peer, request in self._requests.items()}
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
        tensors, source = self.index.layout.tensors, self._source
        # In the layout's order; those that this rank does not list are empty.
        shards = list(source.within(self.index.layout).shards) if source else [torch.empty(0)] * len(tensors)
        to_peers, from_peers = per_round[self._rank].tolist(), per_round[:, self._rank].tolist()
        layout = self.index.layout
        sends = {peer: sent_link(layout, shards, request, to_peers[peer]) for peer, request in asked.items()}
        views = functools.partial(destination_views, self._program, self._reads)
        receives = {p: P2pLink.cut(layout, asks, from_peers[p], views(p)) for p, asks in self._requests.items()}
        copied = list(self._copied(shards))
        written = [view for link in receives.values() for views in link.views for view in views]
        written += [destination for destination, _, _ in copied]
        check_not_overwritten(held_regions(self.index, shards, self._rank), written, self._rank)
        local = CopyList()
        for destination, origin, _ in copied:
            local.add(destination, origin)
        local.build()
        send_rounds, send_bytes = build_rounds(sends, device, pack=True)
        receive_rounds, receive_bytes = build_rounds(receives, device, pack=False)
        named = [(tensor.name, shard) for tensor, shard in zip(tensors, shards, strict=True)]
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

    def _copied(self, shards: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yields (destination, source, bytes) within this rank, except memory that is the same on both sides."""
        for read in self._reads.reads_from(self._rank):
            _, item, tensor = self._reads.read(read)
            source = item.local_region.view(shards[tensor])
            destination = destination_view(self._program, self._reads, read)
            if not same_memory(source, destination):
                yield destination, source, item.nbytes


class Demand(msgspec.Struct, frozen=True):
    """The needs of one rank, as all ranks are told.

    listed         bits: bit i is set if the rank's target has tensor i of the source's layout
    sent_bytes     rank -> bytes that it has to send to this one
    request_bytes  rank -> bytes of the packed `SendRequest` for it
    """

    listed: bytes
    sent_bytes: dict[int, int]
    request_bytes: dict[int, int]


def target_program(
    index: TensorIndex,
    target: TrainerState | None,
    rank: int,
    *,
    strict: bool,
    tied: Callable[[str, str], bool] = lambda a, b: False,
) -> Program:
    """Returns the copies of the source's boxes into this rank's shards of the target, which are the `targets`.

    index   of the source's layout
    target  None if this rank has nothing of it
    strict  raise Mismatch for tensors that the source lacks; otherwise they are left out
    tied    returns whether two names are one tensor in the source

    Raises Mismatch for shapes that differ and for targets that share memory, and Unsupported for casts that do not
    preserve what values mean.
    """
    if target is None:
        return Program((), {})
    copies: list[Copy] = []
    targets: dict[str, torch.Tensor] = {}
    lacking = []
    own = TensorIndex.of(target.layout)
    held = [tensor_class.shard_map.held_by(rank) for tensor_class in own.classes]
    for number, (tensor, local) in enumerate(zip(target.layout.tensors, target.shards, strict=True)):
        source = index.index_of.get(tensor.name)
        if source is None:
            lacking.append(tensor.name)
            continue
        _check_alike(index.layout.tensors[source], tensor, rank)
        targets[tensor.name] = local
        for box, place in held[own.class_of[number]]:
            offset, strides = place.memory(local.stride())
            copies.append(Copy(tensor.name, Region.of(box), tensor.name, offset, strides))
    if strict and lacking:
        raise Mismatch(
            f"trainer rank {rank}: the target has {len(lacking)} tensors that are in no trainer rank's source: "
            f"{some_names(lacking)}. Pass them in the source as well, or pass strict=False to leave them unchanged"
        )
    written = [Written.within(c.target, targets[c.target], c.offset, c.region.count, c.strides) for c in copies]
    kept = written_once(written, tied, f"trainer rank {rank}: ")
    return Program(tuple(copies[number] for number in kept), targets)


def _check_alike(source: SourceTensor, target: SourceTensor, rank: int) -> None:
    if source.shape != target.shape:
        raise Mismatch(
            f"trainer rank {rank}: {target.name} has shape {target.shape} in the target and {source.shape} in the "
            "source; both must be equal"
        )
    try:
        check_cast(source.name, getattr(torch, source.dtype), target.name, getattr(torch, target.dtype))
    except Unsupported as error:
        raise Unsupported(
            f"trainer rank {rank}: {target.name} is {target.dtype} in the target and {source.dtype} in the source, and "
            "a cast would not preserve its values. Convert it on one side"
        ) from error


def plan_target_reads(index: TensorIndex, program: Program, rank: int, hosts: Sequence[str]) -> ReadPlan:
    """Plans from which rank each element is taken: this rank itself, else its own host, evenly where there are several.

    hosts  identity of each rank's host
    """
    others = frozenset(range(len(hosts))) - {rank}
    return plan_reads(
        index, program.copies, RankLocation(rank, len(hosts), hosts[rank], tuple(hosts), unreadable=others)
    )


def listed_bits(index: TensorIndex, program: Program) -> bytes:
    """Returns `Demand.listed`."""
    listed = np.zeros(len(index.layout.tensors), bool)
    listed[[index.index_of[name] for name in program.targets]] = True
    return np.packbits(listed).tobytes()


def check_all_listed(index: TensorIndex, demands: Sequence[Demand]) -> None:
    """Raises Mismatch, naming them, for tensors of the source that no rank's target has."""
    rows = [np.frombuffer(demand.listed, np.uint8) for demand in demands]
    listed = np.unpackbits(np.bitwise_or.reduce(rows), count=len(index.layout.tensors)).astype(bool)
    if lacking := [index.layout.tensors[i].name for i in np.flatnonzero(~listed).tolist()]:
        raise Mismatch(
            f"the source has {len(lacking)} tensors that are in no trainer rank's target: {some_names(lacking)}. Pass "
            "them in the target as well, or pass strict=False to leave them out"
        )


def sent_matrix(demands: Sequence[Demand]) -> np.ndarray:
    """Returns the bytes that each rank sends each rank, [source ranks, target ranks]."""
    found = np.zeros((len(demands), len(demands)), np.int64)
    for rank, demand in enumerate(demands):
        for peer, nbytes in demand.sent_bytes.items():
            found[peer, rank] = nbytes
    return found


class Mover:
    """One rank's rounds of messages and copies within the rank, built once and run as often as wanted.

    Both ends of a link cut its stream into the same messages (`routes.p2p.messages`), one per round, and the messages
    of a rank's round, in both directions, are one batch: NCCL runs them as one group, within which no order can
    deadlock. All ranks go through the rounds in ascending order, so of all messages that have not arrived, those of
    the lowest round have been started by both ends, or will be without waiting for another.

    sends, receives  the rounds of either direction, by peers' ranks within the group
    local            copies from this rank's own source shards into its target shards
    """

    def __init__(self, group: dist.ProcessGroup, sends: list[Round], receives: list[Round], local: CopyList) -> None:
        self._group, self._sends, self._receives, self._local = group, sends, receives, local
        self._rank = dist.get_rank(group)
        # Of each round, with what an error calls them.
        self._operations = [self._batch(number) for number in range(max(len(sends), len(receives)))]

    def run(self) -> None:
        """Collective. On GPUs it returns when all is enqueued on the current stream, as torch's collectives do.

        Raises DeadlineExceeded, naming the ranks, if a message does not pass within the group's timeout or a connection
        breaks.
        """
        run_rounds(len(self._operations), self._start, self._unpack, self._local.run)

    def _batch(self, number: int) -> list[tuple[dist.P2POp, str]]:
        found = []
        for rounds, call, verb in ((self._receives, dist.irecv, "receive from"), (self._sends, dist.isend, "send to")):
            for peer, buffer in rounds[number][0] if number < len(rounds) else ():
                operation = dist.P2POp(call, buffer, group=self._group, tag=_TAG, group_peer=peer)
                found.append((operation, f"{verb} trainer rank {peer}"))
        return found

    def _start(self, number: int) -> Wait:
        if number < len(self._sends):
            self._sends[number][1].run()
        batch = self._operations[number]
        names = [name for _, name in batch]
        with _named_errors(self._rank, ", ".join(names)):
            works = dist.batch_isend_irecv([operation for operation, _ in batch]) if batch else []
        if len(works) != len(batch):  # NCCL has one operation for all messages of a round
            names = [", ".join(names)] * len(works)

        def wait() -> None:
            for work, peers in zip(works, names, strict=True):
                with _named_errors(self._rank, peers):
                    work.wait()

        return wait

    def _unpack(self, number: int) -> None:
        if number < len(self._receives):
            self._receives[number][1].run()


@contextlib.contextmanager
def _named_errors(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"trainer rank {rank} could not {what}: that rank failed, or did not arrive within the process group's "
            f"timeout. Look at its log. The target is only partly written. ({error})"
        ) from error
