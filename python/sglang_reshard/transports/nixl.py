"""Reads exactly the elements that an engine rank lacks out of registered trainer memory, on any host, one-sided.

    source = NixlSource(trainer_rank, shards)                  # a trainer rank: registers, and takes no further part
    transport = NixlTransport(context)                         # an engine rank
    transport.move()

Engine ranks read in rounds, as they receive in `p2p`: two buckets alternate, and a message that is one contiguous box
of a parameter is read in place. Nobody but the reader has to agree to the messages, so each engine rank cuts its own.
A read's descriptors are chosen by `plan.runs`, prepared once, and started again in every update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.broadcast import ALIGN_BYTES
from sglang_reshard.plan.p2p import BufferSlice, SendRequest, send_request
from sglang_reshard.plan.runs import Runs, plan_runs
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.nixl_agent import NixlAgent, memory_kind
from sglang_reshard.transports.p2p import BUCKETS, P2pLink, destination_reads, destination_view
from sglang_reshard.transports.remote_shards import RemoteShard, RemoteShards

# What a descriptor costs, in bytes read: 5 to 15 microseconds at 0.3 GB/s (TCP) to 3 GB/s (shared memory) on 2 cores.
DESCRIPTOR_BYTES = 8 * 1024
_MAX_RATIO = 8.0  # how many times a region's bytes are read at most


class _Registrations:
    """This process's agent for memory that others read. Storages are registered once, for all engines together."""

    def __init__(self, owner: str) -> None:
        self.agent = NixlAgent(owner)
        self._used: dict[tuple[str, int, int, int], tuple[int, list[Any]]] = {}
        self._lock = threading.Lock()

    def add(self, memory: tuple[str, int, int, int]) -> None:
        with self._lock:
            users, registered = self._used.get(memory) or (0, self.agent.register([memory]))
            self._used[memory] = users + 1, registered

    def remove(self, memory: tuple[str, int, int, int]) -> None:
        with self._lock:
            users, registered = self._used.pop(memory)
            if users > 1:
                self._used[memory] = users - 1, registered
            else:
                self.agent.deregister(registered)


@cache
def _registrations(owner: str) -> _Registrations:
    return _Registrations(owner)


class NixlSource:
    """A trainer rank's shards, registered until `close`; it keeps their memory alive as long."""

    def __init__(self, trainer_rank: int, shards: Sequence[torch.Tensor]) -> None:
        """`shards` in the layout's order. Raises Unsupported without NIXL."""
        self._registrations = _registrations(f"trainer rank {trainer_rank}")
        self._storages = {shard.untyped_storage().data_ptr(): shard.untyped_storage() for shard in shards}
        self._memory: list[tuple[str, int, int, int]] = []
        try:
            for memory in (_range(storage) for storage in self._storages.values() if storage.nbytes()):
                self._registrations.add(memory)
                self._memory.append(memory)
        except BaseException:
            self.close()
            raise
        found = [RemoteShard(*memory_kind(s.device), s.data_ptr(), tuple(s.stride())) for s in shards]
        self.remote = RemoteShards(self._registrations.agent.metadata(), tuple(found))

    def close(self) -> None:
        while self._memory:
            self._registrations.remove(self._memory.pop())
        self._storages = {}


class NixlReader:
    """An engine rank's agent, which reads the memory of trainer ranks."""

    def __init__(self, engine_rank: int, timeout_s: float) -> None:
        """`timeout_s`: seconds that any one wait may last. Raises Unsupported without NIXL."""
        self._agent = NixlAgent(f"engine rank {engine_rank}")
        self._timeout_s, self._aborted = timeout_s, threading.Event()
        self._peers: dict[int, str] = {}
        self._remote: dict[int, RemoteShards] = {}
        self._reads: list[Any] = []

    def connect(self, remote: Mapping[int, RemoteShards]) -> None:
        """Learns the memory of trainer ranks; opens no connection yet."""
        for trainer_rank, shards in remote.items():
            self._peers[trainer_rank] = self._agent.add_peer(shards.metadata, f"trainer rank {trainer_rank}")
        self._remote.update(remote)

    def shard(self, trainer_rank: int, tensor: int) -> RemoteShard:
        """Returns where a trainer rank has its shard of the layout's tensor number `tensor`."""
        return self._remote[trainer_rank].shards[tensor]

    def register(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Makes local memory one that can be read into."""
        unique = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self._agent.register([_range(storage) for storage in unique.values()])

    def prepare(self, trainer_rank: int, remote: tuple[str, np.ndarray], local: tuple[str, np.ndarray]) -> Any:
        read = self._agent.prepare_read(self._peers[trainer_rank], remote, local, f"trainer rank {trainer_rank}")
        self._reads.append(read)
        return read

    def start(self, reads: Sequence[tuple[int, Any]]) -> None:
        """Starts reads, given with their trainer ranks."""
        for trainer_rank, read in reads:
            self._agent.start(read, f"trainer rank {trainer_rank}")

    def wait(self, reads: Sequence[tuple[int, Any]]) -> None:
        """Raises as `NixlAgent.wait` does."""
        named = [(read, f"trainer rank {trainer_rank}") for trainer_rank, read in reads]
        self._agent.wait(named, time.monotonic() + self._timeout_s, self._aborted)

    def abort(self) -> None:
        """Ends this rank's wait. May be called from any thread."""
        self._aborted.set()

    def close(self) -> None:
        """No read writes to this rank's memory any more."""
        reads, self._reads = self._reads, []
        self._agent.close(reads)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round: a read per trainer rank and kind of its memory, and the copies out of the bucket."""

    reads: list[tuple[int, Any]]
    copies: CopyList


class NixlTransport:
    """An engine rank's side: all that it lacks is read from the trainer ranks' memory."""

    def __init__(self, context: TransportContext) -> None:
        assert context.nixl is not None
        self._reader, self._device = context.nixl, context.device
        links = [self._link(context, trainer_rank, nbytes) for trainer_rank, nbytes in context.round_bytes.items()]
        self._rounds, buckets = self._build_rounds(context, links)
        self.extra_bytes = sum(b.numel() for b in buckets) + sum(r.copies.table_bytes for r in self._rounds)
        self.read_bytes = {link.trainer_rank: link.link.payload_bytes for link in links}
        self.received_bytes = sum(link.read_bytes for link in links)

    def move(self) -> None:
        """Raises as `NixlReader.wait` does; the reader is closed then."""
        try:
            for ready in self._rounds[:BUCKETS]:
                self._reader.start(ready.reads)
            for number, current in enumerate(self._rounds):
                self._reader.wait(current.reads)
                current.copies.run()
                for following in self._rounds[number + BUCKETS : number + BUCKETS + 1]:
                    runtime().synchronize([self._device])  # the bucket is overwritten in no stream's order
                    self._reader.start(following.reads)
        except BaseException:
            self._reader.close()
            raise

    def _link(self, context: TransportContext, trainer_rank: int, round_bytes: int) -> NixlLink:
        plan = context.read_plan
        return NixlLink.cut(
            trainer_rank,
            context.tensor_index.layout,
            send_request(plan, trainer_rank),
            lambda tensor: self._reader.shard(trainer_rank, tensor),
            [
                tuple(destination_view(context.program, plan, read) for read in reads)
                for reads in destination_reads(plan, trainer_rank)
            ],
            round_bytes,
            context.device,
        )

    def _build_rounds(
        self, context: TransportContext, links: Sequence[NixlLink]
    ) -> tuple[list[_Round], list[torch.Tensor]]:
        begin, end = {}, 0  # of each link's part of a bucket
        for link in links:
            begin[link.trainer_rank] = end
            end += link.bucket_bytes
        count = max((len(link.messages) for link in links), default=0)
        buckets = [torch.empty(end, dtype=torch.uint8, device=context.device) for _ in range(min(BUCKETS, count))]
        in_place = [m.in_place.untyped_storage() for link in links for m in link.messages if m.in_place is not None]
        self._reader.register([*(bucket.untyped_storage() for bucket in buckets), *in_place])
        kind, gpu = memory_kind(context.device)
        rounds = []
        for number in range(count):
            bucket, reads, copies = buckets[number % BUCKETS], [], CopyList()
            for link in links:
                if number >= len(link.messages):
                    continue
                message = link.messages[number]
                if message.in_place is None:
                    buffer = bucket[begin[link.trainer_rank] :]
                    for part in message.parts:
                        link.add_copies(copies, part, buffer)
                else:
                    buffer = message.in_place
                for (remote_kind, remote_gpu), (remote, local, nbytes) in message.descriptors().items():
                    rows = np.column_stack([remote, nbytes, np.full(len(remote), remote_gpu)])
                    own = np.column_stack([local + buffer.data_ptr(), nbytes, np.full(len(local), gpu)])
                    read = self._reader.prepare(link.trainer_rank, (remote_kind, rows), (kind, own))
                    reads.append((link.trainer_rank, read))
            copies.build()
            rounds.append(_Round(reads, copies))
        return rounds, buckets


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice of a message, of `count` elements.

    runs, shard, address  what is read, of which shard, from where
    offset                where it lies in the message's buffer, in bytes
    """

    slice: BufferSlice
    count: tuple[int, ...]
    runs: Runs
    shard: RemoteShard
    address: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Message:
    """What is read from one trainer rank in one round, into `in_place` if there is such memory, else into a bucket."""

    parts: list[_Part]
    nbytes: int
    in_place: torch.Tensor | None

    def descriptors(self) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns remote addresses, offsets in the buffer and bytes of all runs, by kind of memory and GPU."""
        found: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for part in self.parts:
            runs = len(part.runs.offsets)
            remote = part.address + part.runs.offsets
            local = part.offset + np.arange(runs) * part.runs.nbytes
            columns = remote, local, np.full(runs, part.runs.nbytes)
            found.setdefault((part.shard.kind, part.shard.gpu), []).append(columns)
        return {key: _columns(parts) for key, parts in found.items()}


@dataclass(frozen=True, slots=True)
class NixlLink:
    """All that an engine rank reads from one trainer rank."""

    trainer_rank: int
    link: P2pLink
    messages: list[_Message]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of this link's part of a bucket."""
        return max((message.nbytes for message in self.messages), default=0)

    @property
    def read_bytes(self) -> int:
        """Bytes that are read in one update, gaps included."""
        return sum(part.runs.total_bytes for message in self.messages for part in message.parts)

    @classmethod
    def cut(
        cls,
        trainer_rank: int,
        layout: SourceLayout,
        request: SendRequest,
        shard_of: Callable[[int], RemoteShard],
        views: Sequence[tuple[torch.Tensor, ...]],
        round_bytes: int,
        device: torch.device,
    ) -> NixlLink:
        """Cuts what an engine rank on `device` reads into messages of at most `round_bytes`, gaps included.

        shard_of  the trainer rank's shard of the layout's tensor number
        views     of live memory, for each item of the request
        """
        entries, items = list(request.entries()), request.items(layout)
        memory = [_memory(trainer_rank, shard_of(tensor), tensor, region) for tensor, region in entries]
        ratio = 1.0
        for (_, region), (_, strides), item in zip(entries, memory, items, strict=True):
            runs = plan_runs(region.count, strides, item.item_bytes, DESCRIPTOR_BYTES, _MAX_RATIO)
            ratio = max(ratio, runs.total_bytes / item.nbytes)
        # Gaps that are read take room in the bucket, too.
        message_bytes = max(ALIGN_BYTES, int(round_bytes / ratio) // ALIGN_BYTES * ALIGN_BYTES)
        link = P2pLink.cut(layout, request, message_bytes, views)
        messages = []
        for message in link.messages:
            parts, end = [], 0
            for piece in message.slices:
                (tensor, region), (offset, strides) = entries[piece.item], memory[piece.item]
                item_bytes = items[piece.item].item_bytes
                count = region.count if piece.box is None else piece.box.shape
                if piece.box is not None:
                    offset += sum(a * s for a, s in zip(piece.box.start, strides, strict=True))
                runs = plan_runs(count, strides, item_bytes, DESCRIPTOR_BYTES, ratio)
                shard = shard_of(tensor)
                parts.append(_Part(piece, count, runs, shard, shard.address + offset * item_bytes, end))
                end = -(-(end + runs.total_bytes) // ALIGN_BYTES) * ALIGN_BYTES
            in_place = link.in_place(message, device)
            if in_place is not None and not parts[0].runs.is_row_major(parts[0].count):
                in_place = None  # gaps would overwrite other parameters
            messages.append(_Message(parts, 0 if in_place is not None else end, in_place))
        return cls(trainer_rank, link, messages)

    def add_copies(self, copies: CopyList, part: _Part, buffer: torch.Tensor) -> None:
        """Adds the copies of a part from the buffer that it was read into to where it belongs."""
        dtype = self.link.dtypes[part.slice.item]
        data = buffer[part.offset : part.offset + part.runs.total_bytes].view(dtype)
        for view in self.link.own_views(part.slice):
            copies.add(view, data.as_strided(view.shape, part.runs.strides, data.storage_offset()))


def _memory(trainer_rank: int, shard: RemoteShard, tensor: int, region: LocalRegion) -> tuple[int, tuple[int, ...]]:
    """Returns first element and strides of a region in a trainer rank's shard, in elements."""
    if not region.is_flat and len(shard.strides) != len(region.start):
        raise Mismatch(
            f"trainer rank {trainer_rank} announced {len(shard.strides)} strides of the shard of tensor number {tensor}"
            f", which has {len(region.start)} dimensions; this is a bug, please report it"
        )
    return region.memory(shard.strides)


def _range(storage: torch.UntypedStorage) -> tuple[str, int, int, int]:
    """Returns a storage as the range of memory that NIXL registers."""
    kind, gpu = memory_kind(storage.device)
    return kind, storage.data_ptr(), storage.nbytes(), gpu


def _columns(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    remote, local, nbytes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return remote, local, nbytes
