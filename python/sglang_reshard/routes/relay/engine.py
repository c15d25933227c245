"""An engine rank's end of relay, around nixl: reads from other engines what these have read from the trainer.

If an engine does not pass on its tensors, the rest is read from the trainer, in the same update.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch, PeerDisconnected, ReshardError
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ReadPlan
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.routes.base import AroundEnd, EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.nixl.ask import trainer_name
from sglang_reshard.routes.nixl.engine import NixlEngineEnd
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.streams import Stream, cut_link, read_streams, trainer_streams
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.read_link import ReadLink
from sglang_reshard.routes.relay.member import RelayMember
from sglang_reshard.routes.relay.offers import Relay
from sglang_reshard.routes.relay.owners import positions
from sglang_reshard.routes.relay.progress import RelayGate, RelayLost, RelayRoute, Relays
from sglang_reshard.routes.strategy import Strategy

logger = get_logger(__name__)
# Others wait for each message, and one that does not arrive in `progress.STALLED_S` is lost.
_ROUNDS, _MAX_MESSAGE_BYTES = 32, 8 * 1024 * 1024


class RelayEngineEnd(AroundEnd):
    """Reads from trainer ranks what its engine owns, and from the other engines what these own."""

    def __init__(self, side: EngineSide, _strategy: Strategy, inner: EngineEnd) -> None:
        if not isinstance(inner, NixlEngineEnd) or side.reads.landing.holds_back:
            raise Mismatch("relay=True needs transport='nixl' and staged=False: engines read each other's live weights")
        super().__init__(inner)
        self._side, self._nixl = side, inner
        self._relay = Relay.of(side.options["relay"])
        member = side.kept.get("relay") or RelayMember(side.engine_rank)
        side.kept["relay"] = self._member = cast(RelayMember, member)
        self._moving: EngineEnd = inner  # moves the weights; this one if all are read from the trainer

    def connect(self, meeting: Meeting) -> None:
        relays = self._member.agree(meeting, self._side, self._relay)
        if relays is not None:
            self._nixl.open(meeting)
            try:
                self._moving = _Relayed(self._nixl, relays, self._side.bucket_bytes)
            except RelayLost as lost:
                logger.warning(
                    "engine rank %d: %s; it reads all weights from the trainer", self._side.engine_rank, lost
                )
                self._nixl.reader.close()
                self._member.passes_nothing_on(self._relay, str(lost))
        if self._moving is self.inner:
            self.inner.connect(meeting)
        self.nbytes = self._moving.nbytes

    def abort(self) -> None:
        self._member.abort()
        super().abort()

    def serves(self, request: DistributedUpdateWeightsReq) -> bool:
        asked = Relay.of(request.around["relay"])
        same = msgspec.structs.replace(asked, update=self._relay.update) == self._relay
        return same and not self._moving.traffic.detour

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        self._moving.move(request, taken)
        self.traffic = self._moving.traffic
        if self._moving is self.inner:
            detour, remark = _detour(self._member.lost), self._member.remark
            self.traffic = msgspec.structs.replace(self.traffic, detour=detour, remark=remark)

    def has_arrived(self, request: DistributedUpdateWeightsReq) -> None:
        self._moving.has_arrived(request)


engine_end = RelayEngineEnd


class RelayedStream(Stream):
    """A stream whose messages wait until the peer has what they bring. Its methods raise RelayLost if it will not."""

    def __init__(self, reader: NixlReader, peer: str, link: ReadLink, device: torch.device, gate: RelayGate) -> None:
        super().__init__(reader, peer, link, device)
        self._gate, self._advanced_at = gate, 0.0
        self._needed = [max(tensors) + 1 for tensors in link.tensors]  # complete tensors, for each message

    def begin_update(self, update: int) -> None:
        self.begin()
        self._gate.begin(update)
        self._advanced_at = time.monotonic()

    def advance(self) -> bool:
        if self.started > self.finished:
            self._gate.check_stalled(self._advanced_at)
        before = self.finished, self.started
        try:
            advanced = super().advance()
        except PeerDisconnected as error:
            if self.reader.aborted:
                raise
            raise RelayLost(self._gate.engine, f"cannot be read: {error}") from error
        if before != (self.finished, self.started):
            self._advanced_at = time.monotonic()
        return advanced

    def may_start(self, number: int) -> bool:
        return self._gate.is_open(self._needed[number])

    def confirm(self) -> bool:
        return self._gate.confirm()


class _Relayed(EngineEnd):
    """The streams of one engine rank, from trainer ranks and from other engines."""

    def __init__(self, nixl: NixlEngineEnd, relays: Relays, bucket_bytes: int) -> None:
        self._nixl, self._reads, self._reader, self._relays = nixl, nixl.side.reads, nixl.reader, relays
        self._owned = relays.owned
        own = self._reads.read_plan.only(relays.direct)
        sizes, *of_routes = _message_bytes([own, *(route.read_plan for route in relays.routes)], bucket_bytes)
        self._from_engines = {
            route.engine: self._streams_of(route, of_route)
            for route, of_route in zip(relays.routes, of_routes, strict=True)
        }
        self._direct = trainer_streams(self._reader, self._reads, own, sizes)
        streams = [*self._direct.values(), *self._all_relayed()]
        self.nbytes = sum(stream.extra_bytes for stream in streams)
        self._whole = self.traffic = Traffic(
            sum(stream.read_bytes for stream in streams),
            {trainer_rank: sum(stream.payload_bytes) for trainer_rank, stream in self._direct.items()},
            sum(stream.read_bytes for stream in self._all_relayed()),
        )
        self._counts = self._own_counts()

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises PeerDisconnected and DeadlineExceeded for trainer ranks; in this case the reader is closed."""
        update = Relay.of(request.around["relay"]).update
        self._relays.progress.begin(update, self._relays.check)
        for stream in self._direct.values():
            stream.begin()
        for relayed in self._all_relayed():
            relayed.begin_update(update)
        try:
            try:
                read_streams(self._reads, [*self._direct.values(), *self._all_relayed()], self._announce)
                self.traffic = self._whole
            except RelayLost as lost:
                logger.warning(
                    "engine rank %d: %s; it reads the remaining weights from the trainer", self._reads.engine_rank, lost
                )
                read_streams(self._reads, self._instead_of_relays(lost), self._announce)
        except BaseException:
            self._reader.close()
            raise

    def has_arrived(self, request: DistributedUpdateWeightsReq) -> None:
        """Lets other engines take all from here."""
        self._relays.progress.begin(Relay.of(request.around["relay"]).update, self._relays.check)
        self._relays.progress.advance(self._owned)

    def _all_relayed(self) -> list[RelayedStream]:
        return [stream for of_engine in self._from_engines.values() for stream in of_engine]

    def _announce(self) -> None:
        """Tells other engines how many of the tensors that this one owns are complete; it may own none."""
        complete = (counts[stream.finished] for stream, counts in self._counts)
        self._relays.progress.advance(min(complete, default=self._owned))

    def _own_counts(self) -> list[tuple[Stream, list[int]]]:
        """Returns, by stream, how many of the own tensors are complete once it has finished so many messages."""
        place, found = positions(self._relays.owned_by, self._relays.own), []
        for stream in self._direct.values():
            counts = [self._owned]
            for tensors in reversed(stream.tensors):
                own = place[tensors]
                counts.append(min(counts[-1], int(own[own >= 0].min(initial=self._owned))))
            found.append((stream, counts[::-1]))
        return found

    def _instead_of_relays(self, lost: RelayLost) -> list[Stream]:
        """Returns streams from the trainer ranks for all tensors that have not arrived, and those that came from a lost
        engine.
        """
        relays, sizes = self._relays, self._nixl.round_bytes
        missing = self._unconverted()
        for route in relays.routes:
            if route.engine == lost.engine or not all(stream.is_done for stream in self._from_engines[route.engine]):
                missing |= relays.owned_by == route.number
        for stream in self._direct.values():
            for tensors in stream.tensors[stream.finished :]:
                missing[tensors] = True
        self._reader.restart([trainer_name(trainer_rank) for trainer_rank in sizes])
        read = {t: sum(s.payload_bytes[: s.finished]) for t, s in self._direct.items()}
        received = self._whole.received_bytes
        self._from_engines, self._direct = {}, {}  # so that their buckets are freed
        self._direct = trainer_streams(self._reader, self._reads, self._reads.read_plan.only(missing), sizes)
        for trainer_rank, stream in self._direct.items():
            read[trainer_rank] = read.get(trainer_rank, 0) + sum(stream.payload_bytes)
            received += stream.read_bytes
        self._counts = self._own_counts()
        self.traffic = Traffic(received, read, detour=_detour(str(lost)))
        return list(self._direct.values())

    def _unconverted(self) -> np.ndarray:
        """Returns a mask of the tensors with parts of weights that are not converted yet: these parts lose their
        memory when the landing is placed again.
        """
        landing, plan = self._reads.landing, self._reads.read_plan
        targets = set(itertools.chain.from_iterable(landing.complete[landing.finished :]))
        found = np.zeros(len(self._relays.owned_by), bool)
        copies = zip(plan.tensor_ids, plan.copies, strict=True)
        found[[index for index, copy in copies if copy.target in targets]] = True
        return found

    def _streams_of(self, route: RelayRoute, sizes: Mapping[int, int]) -> list[RelayedStream]:
        """Raises RelayLost if the engine cannot be reached: its process may have ended since it made its offer."""
        try:
            self._reader.connect({route.peer(rank): memory for rank, memory in route.memory.items()})
        except ReshardError as error:
            if self._reader.aborted:
                raise
            raise RelayLost(route.engine, f"cannot be reached: {error}") from error
        streams = []
        for rank in route.read_plan.traffic():
            peer = route.peer(rank)
            link = cut_link(self._reader, peer, self._reads, route.layout, route.read_plan, rank, sizes[rank])
            gate = RelayGate(self._reader, peer, route.engine, self._relays.check)
            streams.append(RelayedStream(self._reader, peer, link, self._reads.device, gate))
        return streams


def _detour(lost: str) -> str:
    return lost and f"engines did not pass on all weights: {lost}"


def _message_bytes(plans: Sequence[ReadPlan], bucket_bytes: int) -> list[dict[int, int]]:
    """Returns, for each plan, rank -> bytes read from it at once; those of all ranks together fit a bucket."""
    traffic = [plan.traffic() for plan in plans]
    column = np.array([[nbytes] for of_plan in traffic for nbytes, _ in of_plan.values()], np.int64).reshape(-1, 1)
    sizes = iter(round_bytes(column, max(1, min(bucket_bytes, int(column.sum()) // _ROUNDS)))[:, 0].tolist())
    return [{rank: min(size, _MAX_MESSAGE_BYTES) for rank, size in zip(p, sizes, strict=False)} for p in traffic]
