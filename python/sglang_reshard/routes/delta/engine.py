"""An engine rank's end of delta, around p2p or nixl: takes what has changed, where the weights are what it changes."""

from __future__ import annotations

import msgspec
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.report import Traffic
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import Ask, EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.delta.ask import DeltaAsk
from sglang_reshard.routes.delta.incoming import Incoming, NixlReads, P2pReceives
from sglang_reshard.routes.delta.section import Sections, moves_less, offered_sections
from sglang_reshard.routes.delta.target import DeltaTarget
from sglang_reshard.routes.nixl.engine import NixlEngineEnd
from sglang_reshard.routes.p2p.ask import Links, put_send_requests
from sglang_reshard.routes.p2p.engine import P2pEngineEnd
from sglang_reshard.routes.relay.engine import RelayEngineEnd
from sglang_reshard.routes.strategy import Strategy

logger = get_logger(__name__)


class DeltaEngineEnd(EngineEnd):
    """Receives all weights by another route, or what has changed by the connections of that."""

    def __init__(self, side: EngineSide, strategy: Strategy, inner: EngineEnd) -> None:
        self._side, self._inner = side, inner
        # RelayEngineEnd passes on what has arrived; the messages are those of nixl.
        self._wire = inner.inner if isinstance(inner, RelayEngineEnd) else inner
        self._links = Links.of(side.read_plans, strategy.round_bytes)
        self._can_apply = not side.live.arrivals  # else they are kept in another form than they arrive in
        if isinstance(self._wire, P2pEngineEnd):
            self._wire.keep_dtypes(can_apply=self._can_apply)
        self._target: DeltaTarget | None = None  # made for the first offer
        self._taken = False
        self.calls = inner.calls

    def ask(self, session: Session) -> Ask | None:
        asked = self._inner.ask(session)
        if asked is None:
            return None
        if not isinstance(self._wire, P2pEngineEnd):  # which has published them
            sending = self._links.of_engine_rank(self._side.engine_rank)
            put_send_requests(session, self._side, sending, as_kept=True, can_apply=self._can_apply)
        return Ask("delta", DeltaAsk(self._links, asked.route, msgspec.Raw(encode(asked.message))))

    def connect(self, meeting: Meeting) -> None:
        self._inner.connect(meeting)
        self.nbytes = self._inner.nbytes

    @property
    def traffic(self) -> Traffic:
        if self._target is None or not self._taken:
            return self._inner.traffic
        return msgspec.structs.replace(self._target.traffic, detour=self._inner.traffic.detour)

    def serves(self, request: DistributedUpdateWeightsReq) -> bool:
        return self._inner.serves(request)

    def accepts(self, request: DistributedUpdateWeightsReq) -> bool:
        if not self._can_apply:
            return False
        sections = offered_sections(request, self._side.engine_rank)
        if not moves_less(request) or not self._can_receive(sections):
            return False
        try:
            if self._target is None:
                self._target = DeltaTarget(self._side.reads, self._side.live, self._round_bytes, self._incoming())
                self.nbytes = self._inner.nbytes + self._target.extra_bytes
            return self._target.is_base_of(sections)
        except torch.OutOfMemoryError as error:  # a full update needs less
            logger.warning("engine rank %d has no memory for deltas: %s", self._side.engine_rank, error)
            self._target, self.nbytes = None, self._inner.nbytes
            return False

    def check(self, request: DistributedUpdateWeightsReq) -> None:
        """Receives what says where deltas go, and checks it; raises as `DeltaTarget.receive_indexes` does."""
        assert self._target is not None, "accepted"
        self._target.receive_indexes(offered_sections(request, self._side.engine_rank))

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        self._taken = taken
        if not taken:
            self._inner.move(request, taken)
            return
        assert self._target is not None, "accepted"
        self._target.move(offered_sections(request, self._side.engine_rank))
        self.nbytes = self._inner.nbytes + self._target.extra_bytes
        self._inner.has_arrived(request)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._target = None
        self._inner.close()

    @property
    def _round_bytes(self) -> dict[int, int]:
        return self._links.of_engine_rank(self._side.engine_rank)

    def _can_receive(self, sections: Sections) -> bool:
        """Returns False where messages come as they are, and this rank has no reads of them: other engines have."""
        if not isinstance(self._wire, NixlEngineEnd):
            return True
        return all(t in self._wire.streams for t, section in sections.items() if section.whole)

    def _incoming(self) -> Incoming:
        if isinstance(self._wire, NixlEngineEnd):
            return NixlReads(self._wire.reader, self._side.reads, self._wire.streams)
        if isinstance(self._wire, P2pEngineEnd):
            return P2pReceives(self._wire.communicators, self._side.reads, self._round_bytes)
        raise Mismatch("deltas are sent by transport='auto', 'p2p' or 'nixl', and by no other")
