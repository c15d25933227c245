"""An engine rank's end of p2p: receives from the trainer ranks that send, and reads the memory of the others.

ipc+p2p is the same where engine ranks map the memory of some trainer ranks, and are sent the rest.

All views and buffers are made when the transfer is connected. Two buckets alternate: while one is in transit, the other
is unpacked. See `trainer` for why no order of messages can deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.ipc import DirectReads, mapped_reads, read_targets
from sglang_reshard.routes.p2p.ask import Links, P2pAsk, put_send_requests
from sglang_reshard.routes.p2p.groups import plan_p2p_groups
from sglang_reshard.routes.p2p.links import P2pLink, Round, build_rounds, engine_links, targets_by_round
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.p2p.trainer import P2pTrainerEnd
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes
from sglang_reshard.routes.wire.communicator import Communicators, backend_of
from sglang_reshard.routes.wire.rounds import BUCKETS, Wait, run_rounds


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    """Returns the strategy that sends all weights from trainer ranks. Raises Unsupported if NCCL would refuse it."""
    read, unread = demanded_bytes(demands, topology)
    try:
        return send("p2p", REQUESTED, read + unread, topology, bucket_bytes)
    except Unsupported as error:
        by_reading = "use transport='auto' or 'ipc', with which the engine rank reads the GPU's memory"
        raise Unsupported(error.problem, cure=error.cure or by_reading) from None


def send(name: str, reason: str, sent: np.ndarray, topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    """Returns the strategy that sends these bytes, [trainer ranks, engine ranks].

    Raises Unsupported if NCCL would refuse the communicators for it.
    """
    per_round = round_bytes(sent, bucket_bytes)
    groups = plan_p2p_groups(per_round, topology)
    for members in groups:
        topology.check_communicator(members)
    return Strategy(name, reason, per_round, groups)


class P2pEngineEnd(EngineEnd):
    """Receives messages, and at the same time reads the memory of trainer ranks that send nothing.

    links          of all ranks
    round_bytes    trainer rank -> bytes that it sends to this rank per round, for the trainer ranks that send
    communicators  with them; None if all is read from mapped memory
    """

    calls = True

    def __init__(self, side: EngineSide, strategy: Strategy) -> None:
        self._side, self._groups = side, strategy.groups
        self.links = Links.of(side.read_plans, strategy.round_bytes)
        self.round_bytes = strategy.senders(side.engine_rank)
        self.communicators: Communicators | None = None
        self._rounds: list[Round] = []
        self._as_kept = self._can_apply = False

    def keep_dtypes(self, *, can_apply: bool) -> None:
        """Lets trainer ranks send in the dtypes of the kept weights. `can_apply`: see `SendRequest.delta`."""
        self._as_kept, self._can_apply = True, can_apply

    def ask(self, session: Session) -> Prepare | None:
        if not self.links.any():
            return None
        put_send_requests(session, self._side, self.round_bytes, self._as_kept, self._can_apply)
        return self._side.prepare("p2p", P2pAsk(self.links, backend_of(self._side.reads.device), self._groups))

    def connect(self, meeting: Meeting) -> None:
        side, reads = self._side, self._side.reads
        if self.round_bytes:
            trainer_ranks = len(side.request.trainer_hosts)
            self.connections = self.communicators = Communicators(
                self._groups,
                peer_id=trainer_ranks + side.engine_rank,
                trainer_ranks=trainer_ranks,
                device=reads.device,
                timeout_s=reads.timeout_s,
            )
            store = meeting.session.store(side.request.engine, reads.timeout_s, meeting.scope)
            of_transfer, address = dist.PrefixStore(f"p2p/{side.transfer}", store), meeting.session.local_address
            self.communicators.connect(of_transfer, list(self.round_bytes), address)
        self.prepare()

    def prepare(self) -> None:
        """Makes all views and buffers."""
        reads = self._side.reads
        plan, direct = reads.read_plan, mapped_reads(reads, self.round_bytes)
        links = self._cut()
        if reads.program.arrivals:
            reads.landing.place(targets_by_round(links, plan), read_targets(plan, direct), ahead=BUCKETS - 1)
            links = self._cut()  # into the memory that weights are converted from
        self._rounds, self.nbytes = build_rounds(links, reads.device, pack=False)
        self._direct = DirectReads(reads, direct)
        self.nbytes += self._direct.extra_bytes
        self.traffic = Traffic.of(self._direct.read_bytes | {t: link.payload_bytes for t, link in links.items()})

    def _cut(self) -> dict[int, P2pLink]:
        return engine_links(self._side.reads, self.round_bytes, as_kept=self._as_kept)

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises as `PendingOps.wait` does."""
        run_rounds(len(self._rounds), self._receive, self._unpack, self._direct.run)
        self._direct.finish_from(len(self._rounds))

    def _receive(self, number: int) -> Wait:
        assert self.communicators is not None  # ranks with rounds have them
        return self.communicators.receive(self._rounds[number][0]).wait

    def _unpack(self, number: int) -> None:
        self._rounds[number][1].run()
        self._direct.finish(number)


engine_end, trainer_end = P2pEngineEnd, P2pTrainerEnd
