"""An engine rank's end of delta, around p2p or nixl: takes deltas, if the live weights are their base."""

from __future__ import annotations

import msgspec
import torch

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import AroundEnd, EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.delta.incoming import Incoming, NixlReads, P2pReceives
from sglang_reshard.routes.delta.offer import Sections, moves_less, offered_sections
from sglang_reshard.routes.delta.target import DeltaTarget
from sglang_reshard.routes.delta.trainer import DeltaTrainerEnd
from sglang_reshard.routes.nixl.engine import NixlEngineEnd
from sglang_reshard.routes.p2p.ask import put_send_requests
from sglang_reshard.routes.p2p.engine import P2pEngineEnd
from sglang_reshard.routes.strategy import Strategy

logger = get_logger(__name__)


class DeltaEngineEnd(AroundEnd):
    """Receives all weights by another route, or deltas over the connections of that route."""

    def __init__(self, side: EngineSide, _strategy: Strategy, inner: EngineEnd) -> None:
        super().__init__(inner)
        self._side = side
        wire = inner.inner if isinstance(inner, AroundEnd) else inner  # whose messages are encoded
        # None where all is read from mapped memory: then there is nothing to encode.
        self._wire = wire if isinstance(wire, P2pEngineEnd | NixlEngineEnd) else None
        self._can_apply = not side.live.arrivals  # else they are kept in another form than they arrive in
        if isinstance(wire, P2pEngineEnd):
            wire.keep_dtypes(can_apply=self._can_apply)
        self._target: DeltaTarget | None = None  # made for the first offer
        self._offered: Sections = {}  # to this rank, in the last request

    def ask(self, session: Session) -> Prepare | None:
        asked, wire = self.inner.ask(session), self._wire
        if asked is None or wire is None:
            return asked
        if isinstance(wire, NixlEngineEnd):  # p2p has published them
            put_send_requests(session, self._side, wire.round_bytes, as_kept=True, can_apply=self._can_apply)
        return self._side.prepare("delta", asked)

    def connect(self, meeting: Meeting) -> None:
        self.inner.connect(meeting)
        self._count()

    def accepts(self, request: DistributedUpdateWeightsReq) -> bool:
        wire = self._wire
        if wire is None or not self._can_apply:
            return False
        offered = offered_sections(request)
        self._offered = offered.get(self._side.engine_rank, {})
        # Messages that come as they are need reads of them, which other engines have in place of this one.
        whole = [t for t, section in self._offered.items() if section.whole]
        if not moves_less(offered) or (isinstance(wire, NixlEngineEnd) and not wire.streams.keys() >= set(whole)):
            return False
        try:
            if self._target is None:
                reads, live = self._side.reads, self._side.live
                incoming: Incoming
                if isinstance(wire, NixlEngineEnd):
                    incoming = NixlReads(wire.reader, reads, wire.streams)
                else:
                    incoming = P2pReceives(wire.communicators, reads, wire.round_bytes)
                self._target = DeltaTarget(reads, live, wire.round_bytes, incoming)
            return self._target.is_base_of(self._offered)
        except torch.OutOfMemoryError as error:  # a full update needs less
            logger.warning(
                "engine rank %d cannot allocate memory for deltas and receives full weights: %s",
                self._side.engine_rank,
                error,
            )
            self._target = None
            return False
        finally:
            self._count()

    def check(self, request: DistributedUpdateWeightsReq) -> None:
        """Receives what says where deltas go, and checks it; raises as `DeltaTarget.receive_indexes` does."""
        assert self._target is not None, "accepted"
        self._target.receive_indexes(self._offered)

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        if not taken:
            self.inner.move(request, taken)
            self.traffic = self.inner.traffic
            return
        assert self._target is not None, "accepted"
        self._target.move(self._offered)
        self.traffic = msgspec.structs.replace(self._target.traffic, detour=self.inner.traffic.detour)
        self._count()
        self.inner.has_arrived(request)

    def close(self) -> None:
        self._target = None
        super().close()

    def _count(self) -> None:
        self.nbytes = self.inner.nbytes + (self._target.extra_bytes if self._target is not None else 0)


engine_end, trainer_end = DeltaEngineEnd, DeltaTrainerEnd
