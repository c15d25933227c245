"""The way from trainer ranks to one engine rank, built and ready: a choice, the memory it reads, a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.digest.target import TargetChecksums
from sglang_reshard.engine.shadow_weights import ShadowWeights, check_room, staged_bytes
from sglang_reshard.engine.target import TargetPlan
from sglang_reshard.engine.unused_names import check_used, remark
from sglang_reshard.engine.verification import selection_of
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import ClusterTopology, RankDemand, Strategy, choose_strategy, unread_tensors
from sglang_reshard.plan.p2p import send_request
from sglang_reshard.protocol.messages import (
    ConnectPeers,
    DistributedUpdateWeightsReq,
    PrepareSend,
    RequestChecksums,
    StartTransfer,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.protocol.validation import check_handles
from sglang_reshard.trace import Program
from sglang_reshard.transports.base import Transport, TransportContext
from sglang_reshard.transports.communicator import BroadcastCommunicators, P2pCommunicator
from sglang_reshard.transports.factory import create_transport
from sglang_reshard.transports.memory import Handles, PeerMemory


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the engine ranks have agreed on, seen from one of them.

    memory   trainer rank -> its mapped memory, of those that this rank reads
    connect  what trainer ranks are told, where some of them send
    auditor  of this rank's weights, where they are verified; its claims are in the session
    claims   the key of these
    remark   what the trainer should know about the plan
    """

    choice: Strategy
    memory: dict[int, PeerMemory]
    connect: PrepareSend | None
    auditor: TargetChecksums | None
    claims: str
    remark: str


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A transport ready to move, good for one target, one set of handles and the request's options.

    staging  where what moves arrives, if that is not the live weights
    claims   of all engine ranks
    """

    target: TargetPlan
    request: DistributedUpdateWeightsReq
    planned: TransferPlan
    staging: ShadowWeights | None
    claims: tuple[str, ...]
    transport: Transport

    def serves(self, request: DistributedUpdateWeightsReq, target: TargetPlan) -> bool:
        """Whether an update can go this way again: nothing has changed, and trainer ranks that send are ready to."""
        before, connect = self.request, self.planned.connect
        unchanged = _options(before) == _options(request)
        ready = connect is None or all(route == connect.route for route in request.routes)
        return self.target is target and unchanged and ready

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that stay between updates."""
        return self.transport.extra_bytes + self.target.program.scratch_bytes + self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        return staged_bytes(self.target.program) if self.staging is not None else 0


class TransferCache:
    """One engine rank's: makes routes, and keeps what they share (groups, mapped memory)."""

    def __init__(self, engine_rank: int, device: torch.device) -> None:
        self._rank, self._device = engine_rank, device
        self._groups: BroadcastCommunicators | None = None
        self._peers: P2pCommunicator | None = None
        self._staging: ShadowWeights | None = None  # kept from one staged update to the next
        self._memory = _MappedMemory()
        self.route: PreparedTransfer | None = None

    @property
    def grouped(self) -> bool:
        """Whether it has the groups of this session; when some rank has not, all make them anew."""
        return self._groups is not None

    def regroup(self) -> None:
        self._groups = None

    def drop(self) -> None:
        """The route, and the connections that only it uses."""
        self.route = None
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def break_off(self) -> None:
        """From another thread: end what this rank waits for of others."""
        groups, peers = self._groups, self._peers
        if groups is not None:
            groups.abort()
        if peers is not None:
            peers.abort()

    def let_go(self) -> None:
        """The trainer ranks' memory, and the route, whose views keep it."""
        self.drop()
        self._staging = None
        self._memory.forget()

    def forget(self) -> None:
        """All that was agreed with others."""
        self.let_go()
        self.regroup()

    def plan(
        self, request: DistributedUpdateWeightsReq, needs: Sequence[RankDemand], session: Session, target: TargetPlan
    ) -> TransferPlan:
        """Choose the way, map what this rank reads, leave in the session what it is to be sent.

        Raises Mismatch for names that no rank has a use for, and Unsupported for a way that cannot be gone, or for
        memory that there is not.
        """
        unused = unread_tensors(target.catalog, needs)
        check_used(unused, request.ignore)
        setting = ClusterTopology.of(needs, request.trainer_hosts, self._device.type)
        choice = choose_strategy(request.transport, target.catalog, needs, setting, request.bucket_bytes)
        memory = self._memory.of(_read(choice, target, self._rank), request, session, target.catalog.layout)
        connect = None
        if choice.shares.any():
            connect = PrepareSend(
                route=f"{request.update}/{choice.digest()}",
                intakes=tuple(need.digest for need in needs),
                shares=tuple(tuple(row) for row in choice.shares.tolist()),
                backend="nccl" if self._device.type == "cuda" else "gloo",
                timeout_s=request.timeout_s,
            )
            for trainer_rank in choice.trainer_ranks_sending(self._rank):
                session.put_order(
                    target.needs.digest, self._rank, trainer_rank, send_request(target.intake, trainer_rank)
                )
        program = self._landing(request, needs, target)
        auditor = TargetChecksums(target.catalog, program) if request.verify != "off" else None
        claims = session.put_claims(auditor.claims) if auditor is not None else ""
        return TransferPlan(choice, memory, connect, auditor, claims, remark(unused))

    def _landing(
        self, request: DistributedUpdateWeightsReq, needs: Sequence[RankDemand], target: TargetPlan
    ) -> Program:
        """The program as what moves lands: in memory beside the live weights, where that is asked for."""
        staging = self._staging
        if not request.staged:
            self._staging = None
            return target.program
        if staging is None or staging.live is not target.program:
            self._staging = None  # its memory counts as free
            neighbours = sum(need.host == needs[self._rank].host for need in needs)
            check_room(staged_bytes(target.program), neighbours, self._rank, self._device)
            self._staging = staging = ShadowWeights.of(target.program)
        return staging.program

    def call_trainers(self, request: DistributedUpdateWeightsReq, planned: TransferPlan, talk: UpdateChannel) -> None:
        """Engine rank 0: let trainer ranks make ready to send. Raises what keeps one of them from it."""
        if planned.connect is None:
            return
        talk.say(planned.connect)
        talk.collect_ready(len(request.trainer_hosts), request.timeout_s)
        talk.say(ConnectPeers())

    def connect(
        self,
        request: DistributedUpdateWeightsReq,
        planned: TransferPlan,
        claims: tuple[str, ...],
        session: Session,
        scope: str,
        target: TargetPlan,
    ) -> None:
        """Make groups, connections, buffers and views; together with all engine ranks, and trainer ranks that send."""
        # By the number of this update all ranks find each other, and none what a broken group left behind.
        if self._groups is None:
            self._groups = BroadcastCommunicators(self._rank, self._device, request.timeout_s, epoch=request.update)
        self._groups.use_store(session.store(request.timeout_s, scope))
        shares = planned.choice.trainer_ranks_sending(self._rank)
        if planned.connect is not None and shares:
            me = len(request.trainer_hosts) + self._rank
            self._peers = session.connect_peers(planned.connect, me, self._device, scope)
        here = TransportContext(
            engine_rank=self._rank,
            device=self._device,
            catalog=target.catalog,
            intake=target.intake,
            program=self._staging.program if self._staging is not None else target.program,
            memory=planned.memory,
            broadcast=planned.choice.broadcast,
            broadcast_groups=self._groups,
            round_bytes=shares,
            p2p=self._peers,
        )
        self.route = PreparedTransfer(target, request, planned, self._staging, claims, create_transport(planned.choice, here))

    def start(self, request: DistributedUpdateWeightsReq, talk: UpdateChannel) -> None:
        """Engine rank 0: let trainer ranks begin to send, and to vouch."""
        assert self.route is not None
        if self.route.planned.connect is not None:
            talk.say(StartTransfer(self.route.planned.connect.route))
        if request.verify != "off":
            talk.say(RequestChecksums(self.route.claims, selection_of(request.verify, request.update)))


def _options(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    """What a route was made for."""
    return request.handles, request.bucket_bytes, request.transport, request.staged, request.verify != "off"


class _MappedMemory:
    """The trainer ranks' memory that this engine rank has mapped, by trainer rank and content hash of the handles."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, PeerMemory]] = {}

    def of(
        self, trainer_ranks: Sequence[int], request: DistributedUpdateWeightsReq, session: Session, layout: SourceLayout
    ) -> dict[int, PeerMemory]:
        """Trainer rank -> its memory. What is not asked for any more is unmapped."""
        kept = {}
        for trainer_rank in trainer_ranks:
            digest = request.handles[trainer_rank]
            known = self._known.get(trainer_rank)
            if known is None or known[0] != digest:
                handles = session.get_handles(trainer_rank, digest, Handles, request.timeout_s)
                check_handles(handles, layout, trainer_rank)
                known = digest, PeerMemory(trainer_rank, handles)
            kept[trainer_rank] = known
        self._known = kept
        return {trainer_rank: memory for trainer_rank, (_, memory) in kept.items()}

    def forget(self) -> None:
        self._known = {}


def _read(choice: Strategy, target: TargetPlan, engine_rank: int) -> tuple[int, ...]:
    """The trainer ranks whose memory an engine rank reads."""
    if choice.broadcast is None:
        sending = choice.trainer_ranks_sending(engine_rank)
        return tuple(t for t in target.intake.links() if t not in sending)
    alone = choice.broadcast.alone[engine_rank][target.intake.pieces(target.catalog)]
    led = {lane.trainer_rank for lane in choice.broadcast.lanes if lane.leader == engine_rank}
    return tuple(sorted(led | set(target.intake.trainer[alone].tolist())))
