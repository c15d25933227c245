"""A trainer rank's end of delta, around p2p or nixl: keeps the weights it has sent, and offers later changes."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from sglang_reshard.gpu.runtime import trainer_device
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import Prepare, encode
from sglang_reshard.routes.base import Meeting, TrainerEnd, TrainerSide
from sglang_reshard.routes.delta.offer import DeltaOffer
from sglang_reshard.routes.delta.source import DeltaSource, send_sections
from sglang_reshard.routes.nixl.remote_shards import trainer_name
from sglang_reshard.routes.nixl.trainer import NixlTrainerEnd
from sglang_reshard.routes.p2p.ask import Links, get_send_requests, invalid_ask
from sglang_reshard.routes.p2p.links import sent_link
from sglang_reshard.routes.p2p.messages import SendRequest
from sglang_reshard.routes.p2p.trainer import P2pTrainerEnd

logger = get_logger(__name__)


class DeltaSources:
    """One trainer rank's, of all engines of a session: engines that are sent the same share one."""

    def __init__(self, base_device: torch.device | None = None) -> None:
        """`base_device`: where what was sent is kept; by default where messages are packed."""
        self._base_device = base_device
        self._known: WeakValueDictionary[tuple[object, ...], DeltaSource] = WeakValueDictionary()

    def get(
        self, side: TrainerSide, request: SendRequest, round_bytes: int, device: torch.device, read_from: str
    ) -> DeltaSource:
        key = side.identity, request, round_bytes, device, read_from
        known = self._known.get(key)
        if known is None:
            link = sent_link(side.layout, side.shards, request, round_bytes)
            known = self._known[key] = DeltaSource(link, round_bytes, device, self._base_device, read_from)
        return known


class DeltaTrainerEnd(TrainerEnd):
    """Sends all weights by another route, or deltas over the connections of that route."""

    def __init__(self, side: TrainerSide, command: Prepare) -> None:
        inner = command.asked(Prepare)  # of the other route
        self._rank, self._p2p = side.trainer_rank, P2pTrainerEnd(side, inner) if inner.route == "p2p" else None
        if self._p2p is not None:
            links, requests, device, read_from = self._p2p.links, self._p2p.requests, self._p2p.device, ""
        elif inner.route == "nixl":
            links, read_from = inner.asked(Links), trainer_name(side.trainer_rank)
            links.check(side.layout.trainer_ranks)
            requests = get_send_requests(side, links)
            device = trainer_device(side.shards) or torch.device("cpu")
        else:
            raise invalid_ask(f"transport {inner.route[:40]!r} does not send deltas")
        # By engine rank; None unless all of them can be sent so.
        self._sources: dict[int, DeltaSource] | None = None
        self._changed: dict[int, DeltaSource] = {}  # those whose section has room for what has changed
        if all(request.delta for request in requests.values()):
            sizes = links.of_trainer_rank(side.trainer_rank)
            shared: DeltaSources = side.shared["delta"]
            self._sources = {
                e: shared.get(side, request, sizes[e], device, read_from) for e, request in requests.items()
            }
        sections = [source.section for source in (self._sources or {}).values()]
        self.connections = self._inner = self._p2p or NixlTrainerEnd(side, inner, sections)
        self.writable_bytes, self.holds_pages = self._inner.writable_bytes, self._inner.holds_pages
        self._first_peer = side.layout.trainer_ranks

    def connect(self, meeting: Meeting) -> None:
        self._inner.connect(meeting)

    def offer(self, update: int) -> dict[int, bytes] | None:
        self._changed = {}
        if self._sources is None or not all(source.has_base for source in self._sources.values()):
            return None
        self._changed = {e: source for e, source in self._sources.items() if source.encode(update)}
        return {e: encode(self._section(source, e not in self._changed)) for e, source in self._sources.items()}

    def start(self, taken: bool) -> None:
        if self._p2p is None:
            return
        if taken and self._sources is not None:
            send_sections({self._first_peer + e: s for e, s in self._changed.items()}, self._p2p.communicators)
            if len(self._changed) < len(self._sources):
                self._p2p.sender_to(self._sources.keys() - self._changed.keys()).send(self._p2p.communicators)
        else:
            self._p2p.start(taken)

    def commit(self, update: int) -> None:
        try:
            for source in (self._sources or {}).values():
                source.commit(update)
        except Exception:
            logger.exception(
                "trainer rank %d cannot keep the weights it sent as the base of deltas; it sends full weights from "
                "now on",
                self._rank,
            )
            self._sources = None

    def _section(self, source: DeltaSource, whole: bool) -> DeltaOffer:
        nbytes = source.message_bytes if whole else source.nbytes
        place = () if isinstance(self._inner, P2pTrainerEnd) else self._inner.place(source.section)
        return DeltaOffer(source.checksum, nbytes, source.message_bytes, whole, *place)
