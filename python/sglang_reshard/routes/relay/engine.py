"""An engine rank's end of relay, around nixl: reads from other engines what these have read from the trainer.

If an engine does not pass on its tensors, the rest is read from the trainer, in the same update.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
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
from sglang_reshard.routes.nixl.engine import NixlEngineEnd
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import trainer_name
from sglang_reshard.routes.nixl.streams import Stream, cut_link, read_streams, trainer_streams
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.read_link import ReadLink
from sglang_reshard.routes.relay.member import RelayMember
from sglang_reshard.routes.relay.offers import Relay
from sglang_reshard.routes.relay.progress import RelayGate, RelayLost, RelayRoute, Relays
from sglang_reshard.routes.strategy import Strategy

logger = get_logger(__name__)
# Others wait for each message, and one that does not arrive in `progress.STALLED_S` is lost.
_ROUNDS, _MAX_MESSAGE_BYTES = 32, 8 * 1024 * 1024


class RelayedStream(Stream):
    """A stream whose messages wait until the peer has what they bring. Its methods raise RelayLost if it will not."""

    def __init__(self, reader: NixlReader, peer: str, link: ReadLink, device: torch.device, gate: RelayGate) -> None:
        super().__init__(reader, peer, link, device)
        self._gate, self._advanced_at = gate, 0.0
        self._needed = [max(tensors) + 1 for tensors in link.tensors]  # complete tensors, for each message

    def begin(self, update: int) -> None:
        super().begin(update)
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


class RelayEngineEnd(AroundEnd):
    """Reads from trainer ranks what its engine owns, and from the other engines what these own."""

    def __init__(self, side: EngineSide, _strategy: Strategy, inner: EngineEnd) -> None:
        if not isinstance(inner, NixlEngineEnd) or side.reads.landing.holds_back:
            raise Mismatch("relay=True needs transport='nixl' and staged=False: engines read each other's live weights")
        super().__init__(inner)
        self._nixl, self._reads, self._bucket_bytes = inner, side.reads, side.request.bucket_bytes
        self._relay = Relay.of(side.request.around["relay"])
        member = side.kept.get("relay") or RelayMember(side.engine_rank)
        side.kept["relay"] = self._member = cast(RelayMember, member)
        self._relays: Relays | None = None  # None if all is read from the trainer

    def connect(self, meeting: Meeting) -> None:
        said: dict[str, str] = {}
        try:
            self._relays = self._member.agree(meeting, self._nixl.side, self._relay)
            self._nixl.open(meeting)
            self._prepare(self._relays)
        except RelayLost as lost:
            logger.warning("engine rank %d: %s; it reads all weights from the trainer", self._reads.engine_rank, lost)
            said = {"remark": str(lost)} if lost.final else {"detour": _detour(lost)}
        if said:  # by now the buckets of streams that cannot be used are freed
            self._relays = None
            self._nixl.close()
            self._member.passes_nothing_on(self._relay)
            self._nixl.connect(meeting)
            self.nbytes, self.traffic = self._nixl.nbytes, msgspec.structs.replace(self._nixl.traffic, **said)

    def serves(self, request: DistributedUpdateWeightsReq) -> bool:
        asked = Relay.of(request.around["relay"])
        same = msgspec.structs.replace(asked, update=self._relay.update) == self._relay
        return same and not self.traffic.detour

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises PeerDisconnected and DeadlineExceeded for trainer ranks."""
        if self._relays is None:
            self._nixl.move(request, taken)
            return
        update = Relay.of(request.around["relay"]).update
        self._relays.progress.begin(update, self._relays.check)
        try:
            read_streams(self._reads, [*self._direct.values(), *self._all_relayed()], self._announce, update)
            self.traffic = self._whole
        except RelayLost as lost:
            logger.warning(
                "engine rank %d: %s; it reads the remaining weights from the trainer", self._reads.engine_rank, lost
            )
            read_streams(self._reads, self._instead_of_relays(self._relays, lost), self._announce)

    def has_arrived(self, request: DistributedUpdateWeightsReq) -> None:
        """Lets other engines take all from here."""
        if self._relays is not None:
            self._relays.progress.begin(Relay.of(request.around["relay"]).update, self._relays.check)
            self._relays.progress.advance(self._relays.owned)

    def _prepare(self, relays: Relays) -> None:
        """Makes the streams from trainer ranks and from other engines."""
        own = self._reads.read_plan.only(relays.direct)
        plans = [own, *(route.read_plan for route in relays.routes)]
        sizes, *of_routes = _message_bytes(plans, self._bucket_bytes)
        self._from_engines = {
            route.engine: self._streams_of(route, of_route, relays.check)
            for route, of_route in zip(relays.routes, of_routes, strict=True)
        }
        self._direct = trainer_streams(self._nixl.reader, self._reads, own, sizes)
        streams = [*self._direct.values(), *self._all_relayed()]
        self.nbytes = sum(stream.extra_bytes for stream in streams)
        self._whole = self.traffic = Traffic(
            sum(stream.read_bytes for stream in streams),
            {trainer_rank: sum(stream.payload_bytes) for trainer_rank, stream in self._direct.items()},
            sum(stream.read_bytes for stream in self._all_relayed()),
        )
        self._counts = _own_counts(relays, self._direct.values())

    def _announce(self) -> None:
        """Tells other engines how many of the tensors that this one owns are complete; it may own none."""
        assert self._relays is not None
        complete = (counts[stream.finished] for stream, counts in self._counts)
        self._relays.progress.advance(min(complete, default=self._relays.owned))

    def _all_relayed(self) -> list[RelayedStream]:
        return [stream for of_engine in self._from_engines.values() for stream in of_engine]

    def _instead_of_relays(self, relays: Relays, lost: RelayLost) -> list[Stream]:
        """Returns streams from the trainer ranks for all tensors that have not arrived, and those that came from a lost
        engine.
        """
        sizes, missing = self._nixl.round_bytes, self._unconverted(len(relays.owned_by))
        for route in relays.routes:
            if route.engine == lost.engine or not all(stream.is_done for stream in self._from_engines[route.engine]):
                missing |= relays.owned_by == route.number
        for stream in self._direct.values():
            for tensors in stream.tensors[stream.finished :]:
                missing[tensors] = True
        self._nixl.reader.restart([trainer_name(trainer_rank) for trainer_rank in sizes])
        read = {t: sum(s.payload_bytes[: s.finished]) for t, s in self._direct.items()}
        received = self._whole.received_bytes
        self._from_engines, self._direct = {}, {}  # so that their buckets are freed
        self._direct = trainer_streams(self._nixl.reader, self._reads, self._reads.read_plan.only(missing), sizes)
        for trainer_rank, stream in self._direct.items():
            read[trainer_rank] = read.get(trainer_rank, 0) + sum(stream.payload_bytes)
            received += stream.read_bytes
        self._counts = _own_counts(relays, self._direct.values())
        self.traffic = Traffic(received, read, detour=_detour(lost))
        return list(self._direct.values())

    def _unconverted(self, tensors: int) -> np.ndarray:
        """Returns a mask of the tensors with parts of weights that are not converted yet: these parts lose their
        memory when the landing is placed again.
        """
        landing, plan = self._reads.landing, self._reads.read_plan
        targets = set(itertools.chain.from_iterable(landing.complete[landing.finished :]))
        found = np.zeros(tensors, bool)
        copies = zip(plan.tensor_ids, plan.copies, strict=True)
        found[[index for index, copy in copies if copy.target in targets]] = True
        return found

    def _streams_of(self, route: RelayRoute, sizes: Mapping[int, int], check: int) -> list[RelayedStream]:
        """Raises RelayLost if the engine cannot be reached: its process may have ended since it made its offer."""
        try:
            self._nixl.reader.connect({route.peer(rank): memory for rank, memory in route.memory.items()})
        except ReshardError as error:
            if self._nixl.reader.aborted:
                raise
            raise RelayLost(route.engine, f"cannot be reached: {error}") from error
        streams = []
        for rank in route.read_plan.traffic():
            peer = route.peer(rank)
            link = cut_link(self._nixl.reader, peer, self._reads, route.layout, route.read_plan, rank, sizes[rank])
            gate = RelayGate(self._nixl.reader, peer, route.engine, check)
            streams.append(RelayedStream(self._nixl.reader, peer, link, self._reads.device, gate))
        return streams


engine_end = RelayEngineEnd


def _own_counts(relays: Relays, streams: Iterable[Stream]) -> list[tuple[Stream, list[int]]]:
    """Returns, by stream, how many of the own tensors are complete once it has finished so many messages."""
    owns, owned, found = relays.owned_by == relays.own, relays.owned, []
    place = np.where(owns, np.cumsum(owns) - 1, -1)  # of each tensor among those that are owned
    for stream in streams:
        counts = [owned]
        for tensors in reversed(stream.tensors):
            own = place[tensors]
            counts.append(min(counts[-1], int(own[own >= 0].min(initial=owned))))
        found.append((stream, counts[::-1]))
    return found


def _detour(lost: RelayLost) -> str:
    return f"engines did not pass on all weights: {lost}"


def _message_bytes(plans: Sequence[ReadPlan], bucket_bytes: int) -> list[dict[int, int]]:
    """Returns, for each plan, rank -> bytes read from it at once; those of all ranks together fit a bucket."""
    traffic = [plan.traffic() for plan in plans]
    column = np.array([[nbytes] for of_plan in traffic for nbytes, _ in of_plan.values()], np.int64).reshape(-1, 1)
    sizes = iter(round_bytes(column, max(1, min(bucket_bytes, int(column.sum()) // _ROUNDS)))[:, 0].tolist())
    return [{rank: min(size, _MAX_MESSAGE_BYTES) for rank, size in zip(p, sizes, strict=False)} for p in traffic]
