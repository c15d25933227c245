"""An engine rank's end of p2p: receives from the trainer ranks that send, and reads the memory of the others.

All views and buffers are made when the transfer is connected. Two buckets alternate: while one is in transit, the other
is unpacked. See `trainer` for why no order of messages can deadlock.
"""

from __future__ import annotations

import torch.distributed as dist

from sglang_reshard.observability.report import Traffic
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import Ask, EngineEnd, EngineSide, Meeting, Reads
from sglang_reshard.routes.ipc import DirectReads, mapped_reads, read_targets
from sglang_reshard.routes.p2p.ask import Links, P2pAsk, put_send_requests
from sglang_reshard.routes.p2p.links import build_rounds, engine_links, targets_by_round
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.routes.wire.abortable_group import backend_of
from sglang_reshard.routes.wire.communicator import Communicators, PendingRound
from sglang_reshard.routes.wire.rounds import BUCKETS, run_rounds


class P2pReceiver:
    """Receives messages, and at the same time reads the memory of trainer ranks that send nothing.

    traffic      of each update
    extra_bytes  of its buckets and tables
    """

    def __init__(
        self,
        reads: Reads,
        round_bytes: dict[int, int],
        communicators: Communicators | None,
        *,
        as_kept: bool = False,
    ) -> None:
        """`round_bytes`: by trainer rank, for those that send. `as_kept`: see `engine_links`."""
        plan, layout = reads.read_plan, reads.tensor_index.layout
        direct = mapped_reads(reads, round_bytes)
        if reads.program.arrivals:  # what does each round bring?
            links = engine_links(layout, plan, reads.program, round_bytes, as_kept=as_kept)
            reads.landing.place(targets_by_round(links, plan), read_targets(plan, direct), ahead=BUCKETS - 1)
        links = engine_links(layout, plan, reads.program, round_bytes, as_kept=as_kept)
        self._rounds, self.extra_bytes = build_rounds(links, reads.device, pack=False)
        self._direct = DirectReads(reads, direct)
        self.extra_bytes += self._direct.extra_bytes
        self.traffic = Traffic.of(self._direct.read_bytes | {t: link.payload_bytes for t, link in links.items()})
        self._communicators = communicators

    def move(self) -> None:
        """Raises as `PendingOps.wait` does, after closing the communicators."""
        try:
            run_rounds(len(self._rounds), self._receive, self._unpack, self._direct.run)
            self._direct.finish_from(len(self._rounds))
        except BaseException:
            if self._communicators is not None:
                self._communicators.close()
            raise

    def _receive(self, number: int) -> PendingRound:
        assert self._communicators is not None  # ranks with rounds have them
        return self._communicators.receive(self._rounds[number][0])

    def _unpack(self, number: int) -> None:
        self._rounds[number][1].run()
        self._direct.finish(number)


class P2pEngineEnd(EngineEnd):
    """Connects one engine rank to the trainer ranks that send to it.

    links          of all ranks
    round_bytes    trainer rank -> bytes that it sends to this rank per round, for the trainer ranks that send
    communicators  with them; None if all is read from mapped memory
    """

    calls = True

    def __init__(self, side: EngineSide, strategy: Strategy) -> None:
        self._side, self._groups = side, strategy.groups
        self.links = Links.of(side.read_plans, strategy.round_bytes)
        self.round_bytes = self.links.of_engine_rank(side.engine_rank)
        self.communicators: Communicators | None = None
        self._receiver: P2pReceiver | None = None
        self._as_kept = self._can_apply = False

    def keep_dtypes(self, *, can_apply: bool) -> None:
        """Lets trainer ranks send in the dtypes of the kept weights. `can_apply`: see `SendRequest.delta`."""
        self._as_kept, self._can_apply = True, can_apply

    def ask(self, session: Session) -> Ask | None:
        if not self.links.any():
            return None
        put_send_requests(session, self._side, self.round_bytes, self._as_kept, self._can_apply)
        return Ask("p2p", P2pAsk(self.links, backend_of(self._side.reads.device), self._groups))

    def connect(self, meeting: Meeting) -> None:
        side, reads = self._side, self._side.reads
        if self.round_bytes:
            self.connections = self.communicators = Communicators(
                self._groups,
                peer_id=side.trainer_ranks + side.engine_rank,
                trainer_ranks=side.trainer_ranks,
                backend=backend_of(reads.device),
                device=reads.device,
                timeout_s=reads.timeout_s,
            )
            store = meeting.session.store(side.engine, reads.timeout_s, meeting.scope)
            of_transfer, address = dist.PrefixStore(f"p2p/{side.transfer}", store), meeting.session.local_address
            self.communicators.connect(of_transfer, list(self.round_bytes), address)
        self._receiver = P2pReceiver(reads, self.round_bytes, self.communicators, as_kept=self._as_kept)
        self.nbytes = self._receiver.extra_bytes

    @property
    def traffic(self) -> Traffic:
        assert self._receiver is not None
        return self._receiver.traffic

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        assert self._receiver is not None
        self._receiver.move()
