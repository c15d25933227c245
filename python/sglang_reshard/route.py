"""The way from trainer ranks to one engine rank, built and ready: a choice, the memory it reads, a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang_reshard.digest import Auditor
from sglang_reshard.manifests import check_handles
from sglang_reshard.messages import Connect, DistributedUpdateWeightsReq, Join, Move, Vouch
from sglang_reshard.plan import Choice, Needs, Setting, choose, unneeded
from sglang_reshard.plan.streams import order_of
from sglang_reshard.session import Session
from sglang_reshard.sources.placements import Layout
from sglang_reshard.staging import Staging, check_room, staged_bytes
from sglang_reshard.talk import Talk
from sglang_reshard.target import Target
from sglang_reshard.trace import Program
from sglang_reshard.transports.base import Here, Transport
from sglang_reshard.transports.choice import build
from sglang_reshard.transports.groups import Groups
from sglang_reshard.transports.memory import Handles, PeerMemory
from sglang_reshard.transports.peers import Peers, join_peers
from sglang_reshard.unused_names import check_used, remark
from sglang_reshard.verification import selection_of


@dataclass(frozen=True, slots=True)
class Planned:
    """What the engine ranks have agreed on, seen from one of them.

    memory   trainer rank -> its mapped memory, of those that this rank reads
    connect  what trainer ranks are told, where some of them send
    auditor  of this rank's weights, where they are verified; its claims are in the session
    claims   the key of these
    remark   what the trainer should know about the plan
    """

    choice: Choice
    memory: dict[int, PeerMemory]
    connect: Connect | None
    auditor: Auditor | None
    claims: str
    remark: str


@dataclass(frozen=True, slots=True)
class Route:
    """A transport ready to move, good for one target, one set of handles and the request's options.

    staging  where what moves arrives, if that is not the live weights
    claims   of all engine ranks
    """

    target: Target
    request: DistributedUpdateWeightsReq
    planned: Planned
    staging: Staging | None
    claims: tuple[str, ...]
    transport: Transport

    def serves(self, request: DistributedUpdateWeightsReq, target: Target) -> bool:
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


class Router:
    """One engine rank's: makes routes, and keeps what they share (groups, mapped memory)."""

    def __init__(self, engine_rank: int, device: torch.device) -> None:
        self._rank, self._device = engine_rank, device
        self._groups: Groups | None = None
        self._peers: Peers | None = None
        self._staging: Staging | None = None  # kept from one staged update to the next
        self._memory = _MappedMemory()
        self.route: Route | None = None

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
        self, request: DistributedUpdateWeightsReq, needs: Sequence[Needs], session: Session, target: Target
    ) -> Planned:
        """Choose the way, map what this rank reads, leave in the session what it is to be sent.

        Raises Mismatch for names that no rank has a use for, and Unsupported for a way that cannot be gone, or for
        memory that there is not.
        """
        unused = unneeded(target.catalog, needs)
        check_used(unused, request.ignore)
        setting = Setting.of(needs, request.trainer_hosts, self._device.type)
        choice = choose(request.transport, target.catalog, needs, setting, request.bucket_bytes)
        memory = self._memory.of(_read(choice, target, self._rank), request, session, target.catalog.layout)
        connect = None
        if choice.shares.any():
            connect = Connect(
                route=f"{request.update}/{choice.digest()}",
                intakes=tuple(need.digest for need in needs),
                shares=tuple(tuple(row) for row in choice.shares.tolist()),
                backend="nccl" if self._device.type == "cuda" else "gloo",
                timeout_s=request.timeout_s,
            )
            for trainer_rank in choice.trainer_ranks_sending(self._rank):
                session.put_order(target.needs.digest, self._rank, trainer_rank, order_of(target.intake, trainer_rank))
        program = self._landing(request, needs, target)
        auditor = Auditor(target.catalog, program) if request.verify != "off" else None
        claims = session.put_claims(auditor.claims) if auditor is not None else ""
        return Planned(choice, memory, connect, auditor, claims, remark(unused))

    def _landing(self, request: DistributedUpdateWeightsReq, needs: Sequence[Needs], target: Target) -> Program:
        """The program as what moves lands: in memory beside the live weights, where that is asked for."""
        staging = self._staging
        if not request.staged:
            self._staging = None
            return target.program
        if staging is None or staging.live is not target.program:
            self._staging = None  # its memory counts as free
            neighbours = sum(need.host == needs[self._rank].host for need in needs)
            check_room(staged_bytes(target.program), neighbours, self._rank, self._device)
            self._staging = staging = Staging.of(target.program)
        return staging.program

    def call_trainers(self, request: DistributedUpdateWeightsReq, planned: Planned, talk: Talk) -> None:
        """Engine rank 0: let trainer ranks make ready to send. Raises what keeps one of them from it."""
        if planned.connect is None:
            return
        talk.say(planned.connect)
        talk.collect_ready(len(request.trainer_hosts), request.timeout_s)
        talk.say(Join())

    def connect(
        self,
        request: DistributedUpdateWeightsReq,
        planned: Planned,
        claims: tuple[str, ...],
        store: dist.Store,
        target: Target,
    ) -> None:
        """Make groups, connections, buffers and views; together with all engine ranks, and trainer ranks that send."""
        # By the number of this update all ranks find each other, and none what a broken group left behind.
        if self._groups is None:
            self._groups = Groups(self._rank, self._device, request.timeout_s, epoch=request.update)
        self._groups.meet_over(store)
        shares = planned.choice.trainer_ranks_sending(self._rank)
        if planned.connect is not None and shares:
            me = len(request.trainer_hosts) + self._rank
            self._peers = join_peers(store, planned.connect, me, self._device)
        here = Here(
            engine_rank=self._rank,
            device=self._device,
            catalog=target.catalog,
            intake=target.intake,
            program=self._staging.program if self._staging is not None else target.program,
            memory=planned.memory,
            broadcast=planned.choice.broadcast,
            groups=self._groups,
            shares=shares,
            peers=self._peers,
        )
        self.route = Route(target, request, planned, self._staging, claims, build(planned.choice, here))

    def start(self, request: DistributedUpdateWeightsReq, talk: Talk) -> None:
        """Engine rank 0: let trainer ranks begin to send, and to vouch."""
        assert self.route is not None
        if self.route.planned.connect is not None:
            talk.say(Move(self.route.planned.connect.route))
        if request.verify != "off":
            talk.say(Vouch(self.route.claims, selection_of(request.verify, request.update)))


def _options(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    """What a route was made for."""
    return request.handles, request.bucket_bytes, request.transport, request.staged, request.verify != "off"


class _MappedMemory:
    """The trainer ranks' memory that this engine rank has mapped, by trainer rank and content hash of the handles."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, PeerMemory]] = {}

    def of(
        self, trainer_ranks: Sequence[int], request: DistributedUpdateWeightsReq, session: Session, layout: Layout
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


def _read(choice: Choice, target: Target, engine_rank: int) -> tuple[int, ...]:
    """The trainer ranks whose memory an engine rank reads."""
    if choice.broadcast is None:
        sending = choice.trainer_ranks_sending(engine_rank)
        return tuple(t for t in target.intake.links() if t not in sending)
    alone = choice.broadcast.alone[engine_rank][target.intake.pieces(target.catalog)]
    led = {lane.trainer_rank for lane in choice.broadcast.lanes if lane.leader == engine_rank}
    return tuple(sorted(led | set(target.intake.trainer[alone].tolist())))
