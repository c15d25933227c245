"""Reads exactly the elements that an engine rank lacks out of registered memory, on any host, one-sided.

    source = NixlSource("trainer rank 0", shards)              # a trainer rank: registers, and takes no further part
    transport = NixlTransport(context)                         # an engine rank
    transport.move()

Each rank that is read is a stream of messages, with two buckets of its own in turn; a message that is one contiguous
box of a parameter is read in place. A read's descriptors are prepared once, and started again in every update.

Engines that are updated together may read from each other what one of them has read already, see `relay`. If one of
them does not pass on what it owns, the rest is read from the trainer, in the same update.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan import ReadPlan
from sglang_reshard.plan.p2p import round_bytes, send_request
from sglang_reshard.transports.abortable_group import PeerDisconnected
from sglang_reshard.transports.arrivals import ArrivalMemory
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.nixl_agent import memory_kind
from sglang_reshard.transports.nixl_link import NixlLink, ReadMessage
from sglang_reshard.transports.nixl_reader import NixlReader
from sglang_reshard.transports.p2p import BUCKETS, destination_reads, destination_view, targets_by_round
from sglang_reshard.transports.relay import RelayGate, RelayLost, RelayRoute, Relays

logger = get_logger(__name__)
_SPINS = 100  # polls without a pause: most reads of a small model have ended by then
_POLL_S = 1e-4
# If engines pass on weights, others wait for each message, and one that does not arrive in `relay.STALLED_S` is lost.
_RELAY_ROUNDS, _MAX_RELAY_BYTES = 32, 8 * 1024 * 1024


class Stream:
    """Reads what an engine rank needs from one rank, message by message.

    peer           its name in the reader
    is_done        whether all has arrived in this update; from an engine rank, and was found to be there still then
    count          number of messages
    finished       number of those that have arrived
    tensors        the layout's tensor numbers in each message
    payload_bytes  of each message
    read_bytes     that are read in one update, gaps included
    """

    def __init__(
        self,
        reader: NixlReader,
        peer: str,
        link: NixlLink,
        device: torch.device,
        arrivals: ArrivalMemory | None = None,
        gate: RelayGate | None = None,
        needed: Sequence[int] = (),
    ) -> None:
        """The next message also waits for the other ranks, if it fills memory of `arrivals`.

        gate  opens for each message once the peer has that many tensors, `needed`; None if it has all of them
        """
        self.peer, self.gate, self.finished, self._arrivals = peer, gate, 0, arrivals
        self.tensors, self.payload_bytes, self.read_bytes = link.tensors, link.payload_bytes, link.read_bytes
        self.is_done, self._advanced_at = False, 0.0
        self._reader, self._device, self._needed, self._started = reader, device, needed, 0
        count = min(BUCKETS, len(link.messages))
        buckets = [torch.empty(link.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        in_place = [m.in_place.untyped_storage() for m in link.messages if m.in_place is not None]
        reader.register([*(bucket.untyped_storage() for bucket in buckets), *in_place])
        self.count = len(link.messages)
        self._messages = [self._prepare(link, m, buckets[n % BUCKETS]) for n, m in enumerate(link.messages)]
        self.extra_bytes = sum(b.numel() for b in buckets) + sum(c.table_bytes for _, c in self._messages if c)

    def begin(self, update: int) -> None:
        self.finished, self._started, self.is_done = 0, 0, False
        self._advanced_at = time.monotonic()
        if self.gate is not None:
            self.gate.begin(update)

    def advance(self) -> bool:
        """Ends reads that have arrived, and starts those that there is room for; returns whether there were any.

        Raises PeerDisconnected if a read fails, and RelayLost as `RelayGate` does.
        """
        finished, started = self.finished, self._started
        if self.gate is not None and started > finished:
            self.gate.check_stalled(self._advanced_at)
        while self.finished < self._started:
            reads, copies = self._messages[self.finished]
            if not self._reader.are_done(self.peer, reads):
                break
            if copies is not None:
                copies.run()
                runtime().synchronize([self._device])  # the bucket is overwritten in no stream's order
            self.finished += 1
        turns = self.finished if self._arrivals is None else min(self.finished, self._arrivals.finished)
        while self._started < min(len(self._messages), turns + BUCKETS):
            if self.gate is not None and not self.gate.is_open(self._needed[self._started]):
                break
            self._reader.start(self.peer, self._messages[self._started][0])
            self._started += 1
        self.is_done = self.finished == len(self._messages) and (self.gate is None or self.gate.confirm())
        if (finished, started) == (self.finished, self._started):
            return self.is_done
        self._advanced_at = time.monotonic()
        return True

    def _prepare(self, link: NixlLink, message: ReadMessage, bucket: torch.Tensor) -> tuple[list[Any], CopyList | None]:
        """Returns a message's reads, one for each kind of the peer's memory, and copies out of the bucket, if any."""
        copies, buffer = None, message.in_place
        if buffer is None:
            copies, buffer = CopyList(), bucket
            for part in message.parts:
                link.add_copies(copies, part, buffer)
            copies.build()
        kind, gpu = memory_kind(self._device)
        reads = []
        for (remote_kind, remote_gpu), (remote, local, nbytes) in message.descriptors().items():
            rows = np.column_stack([remote, nbytes, np.full(len(remote), remote_gpu)])
            own = np.column_stack([local + buffer.data_ptr(), nbytes, np.full(len(local), gpu)])
            reads.append(self._reader.prepare(self.peer, (remote_kind, rows), (kind, own)))
        return reads, copies


class NixlTransport:
    """An engine rank's side: all that it lacks is read from the trainer ranks' memory, or that of other engines."""

    def __init__(self, context: TransportContext) -> None:
        assert context.nixl is not None
        self._context, self._reader = context, context.nixl
        plan, sizes, relays = context.read_plan, dict(context.round_bytes), context.relays
        self._relayed: dict[str, list[Stream]] = {}  # by engine
        if relays is not None:
            plan = plan.only(relays.direct)
            sizes, *of_routes = _message_bytes([plan, *(r.read_plan for r in relays.routes)], context.bucket_bytes)
            for route, of_route in zip(relays.routes, of_routes, strict=True):
                self._relayed[route.engine] = self._relay_streams(route, of_route, relays.check)
        self._direct = self._trainer_streams(plan, sizes)
        relayed = [stream for of_engine in self._relayed.values() for stream in of_engine]
        self.extra_bytes = sum(stream.extra_bytes for stream in (*self._direct.values(), *relayed))
        self.read_bytes = {trainer_rank: sum(stream.payload_bytes) for trainer_rank, stream in self._direct.items()}
        self._relayed_bytes = sum(stream.read_bytes for stream in relayed)
        self.received_bytes = self._relayed_bytes + sum(stream.read_bytes for stream in self._direct.values())
        self._counts = self._own_counts()

    def move(self) -> None:
        """Raises PeerDisconnected and DeadlineExceeded for trainer ranks; the reader is closed then."""
        relays = self._context.relays
        self._context.arrivals.begin()
        streams = [*self._direct.values(), *(s for of_engine in self._relayed.values() for s in of_engine)]
        for stream in streams:
            stream.begin(relays.progress.update if relays is not None else 0)
        try:
            try:
                self._run(streams)
                if relays is not None:
                    relays.outcome.read_bytes = self._relayed_bytes
            except RelayLost as lost:
                assert relays is not None
                logger.warning("engine rank %d: %s; the rest is read from the trainer", self._context.engine_rank, lost)
                relays.outcome.lost = str(lost)
                self._run(self._instead_of_relays(lost, relays))
        except BaseException:
            self._reader.close()
            raise

    def _run(self, streams: Sequence[Stream]) -> None:
        engine_of = {stream.peer: engine for engine, of_engine in self._relayed.items() for stream in of_engine}
        left, polls, since = list(streams), 0, time.monotonic()
        self._announce()  # what it owns may be nothing
        while left:
            advanced = False
            for stream in left:
                advanced |= self._advance(stream, engine_of.get(stream.peer))
            self._finish_turns()
            if advanced:
                self._announce()
                left = [stream for stream in left if not stream.is_done]
                polls, since = 0, time.monotonic()
                continue
            if time.monotonic() > since + self._context.timeout_s:
                names = ", ".join(stream.peer for stream in left)
                raise DeadlineExceeded(
                    f"engine rank {self._context.engine_rank} could not finish reading from {names} in time; is that "
                    "rank's process stopped, or its host unreachable?"
                )
            polls += 1
            time.sleep(0 if polls < _SPINS else _POLL_S)

    def _finish_turns(self) -> None:
        """Ends the turns of which the trainer ranks' messages have arrived."""
        arrivals = self._context.arrivals
        while arrivals.finished < arrivals.turns:
            turn = arrivals.finished
            if any(stream.finished <= turn < stream.count for stream in self._direct.values()):
                return
            arrivals.finish(turn)

    def _advance(self, stream: Stream, engine: str | None) -> bool:
        try:
            return stream.advance()
        except PeerDisconnected as error:
            if engine is None or self._reader.aborted:
                raise
            raise RelayLost(engine, f"cannot be read: {error}") from error

    def _announce(self) -> None:
        """Tells other engines how many of the tensors that this one owns are complete."""
        relays = self._context.relays
        if relays is not None:
            complete = (counts[stream.finished] for stream, counts in self._counts)
            relays.progress.advance(min(complete, default=relays.owned))

    def _own_counts(self) -> list[tuple[Stream, list[int]]]:
        """Returns, by stream, how many of the own tensors are complete once it has finished so many messages."""
        relays, found = self._context.relays, []
        for stream in self._direct.values() if relays is not None else ():
            assert relays is not None
            counts = [relays.owned]
            for tensors in reversed(stream.tensors):
                own = relays.positions[tensors]
                counts.append(min(counts[-1], int(own[own >= 0].min(initial=relays.owned))))
            found.append((stream, counts[::-1]))
        return found

    def _instead_of_relays(self, lost: RelayLost, relays: Relays) -> list[Stream]:
        """Returns streams from the trainer ranks for all that has not arrived, and what came from a lost engine."""
        context = self._context
        missing = np.zeros(len(relays.direct), bool)
        for route in relays.routes:
            if route.engine == lost.engine or not all(stream.is_done for stream in self._relayed[route.engine]):
                missing |= relays.owned_by == route.number
        for stream in self._direct.values():
            for tensors in stream.tensors[stream.finished :]:
                missing[tensors] = True
        self._reader.restart([_trainer(trainer_rank) for trainer_rank in context.round_bytes])
        read = {t: sum(s.payload_bytes[: s.finished]) for t, s in self._direct.items()}
        self._relayed, self._direct = {}, {}  # so that their buckets are freed
        self._direct = self._trainer_streams(context.read_plan.only(missing), dict(context.round_bytes))
        for trainer_rank, stream in self._direct.items():
            read[trainer_rank] = read.get(trainer_rank, 0) + sum(stream.payload_bytes)
            self.received_bytes += stream.read_bytes
        self.read_bytes, self._counts = read, self._own_counts()
        return list(self._direct.values())

    def _trainer_streams(self, plan: ReadPlan, sizes: Mapping[int, int]) -> dict[int, Stream]:
        layout, arrivals = self._context.tensor_index.layout, self._context.arrivals
        device = self._context.device

        def links() -> dict[int, NixlLink]:
            return {rank: self._link(_trainer(rank), layout, plan, rank, sizes[rank]) for rank in plan.traffic()}

        if not self._context.program.arrivals:
            return {t: Stream(self._reader, _trainer(t), link, device) for t, link in links().items()}
        rounds = targets_by_round({rank: link.link for rank, link in links().items()}, plan)
        arrivals.place(rounds, (), ahead=BUCKETS - 1)
        arrivals.begin()
        return {t: Stream(self._reader, _trainer(t), link, device, arrivals) for t, link in links().items()}

    def _relay_streams(self, route: RelayRoute, sizes: Mapping[int, int], check: int) -> list[Stream]:
        self._reader.connect({route.peer(rank): memory for rank, memory in route.memory.items()})
        streams = []
        for rank in route.read_plan.traffic():
            peer = route.peer(rank)
            link = self._link(peer, route.layout, route.read_plan, rank, sizes[rank])
            needed = [max(tensors) + 1 for tensors in link.tensors]
            gate = RelayGate(self._reader, peer, route.engine, check)
            streams.append(Stream(self._reader, peer, link, self._context.device, None, gate, needed))
        return streams

    def _link(self, peer: str, layout: SourceLayout, plan: ReadPlan, rank: int, message_bytes: int) -> NixlLink:
        return NixlLink.cut(
            peer,
            layout,
            send_request(plan, rank),
            lambda tensor: self._reader.shard(peer, tensor),
            [
                tuple(destination_view(self._context.program, plan, read) for read in reads)
                for reads in destination_reads(plan, rank)
            ],
            message_bytes,
            self._context.device,
        )


def _trainer(trainer_rank: int) -> str:
    return f"trainer rank {trainer_rank}"


def _message_bytes(plans: Sequence[ReadPlan], bucket_bytes: int) -> list[dict[int, int]]:
    """Returns, for each plan, rank -> bytes read from it at once; those of all ranks together fit a bucket."""
    traffic = [plan.traffic() for plan in plans]
    column = np.array([[nbytes] for of_plan in traffic for nbytes, _ in of_plan.values()], np.int64).reshape(-1, 1)
    sizes = iter(round_bytes(column, max(1, min(bucket_bytes, int(column.sum()) // _RELAY_ROUNDS)))[:, 0].tolist())
    return [{rank: min(size, _MAX_RELAY_BYTES) for rank, size in zip(p, sizes, strict=False)} for p in traffic]
