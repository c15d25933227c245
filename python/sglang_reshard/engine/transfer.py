"""Plans, connects and keeps the transfer from trainer ranks to one engine rank.

target    TargetPlan        the traced loader and the exact boxes that it reads; kept while layouts are the same
plan      TransferPlan      the strategy of all engine ranks, and the memory that this rank reads
transfer  PreparedTransfer  the transport with its views and buffers; kept while request and handles are the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.delta.section import Sections
from sglang_reshard.delta.target import DeltaTarget
from sglang_reshard.digest.target import TargetChecksums
from sglang_reshard.engine.loader_names import LoaderNames
from sglang_reshard.engine.relay import RelayMember
from sglang_reshard.engine.shadow_weights import ShadowWeights, check_room, shadow_bytes
from sglang_reshard.engine.trainer_memory import TrainerMemory
from sglang_reshard.engine.unread import check_unread, unread_remark
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan import (
    ClusterTopology,
    RankDemand,
    ReadPlan,
    Strategy,
    TensorIndex,
    choose_strategy,
    unread_tensors,
)
from sglang_reshard.plan.p2p import send_request
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, PrepareSend
from sglang_reshard.protocol.session import Link, Session, remote_shards_key
from sglang_reshard.protocol.validation import check_remote_shards
from sglang_reshard.trace.kept import MayStay
from sglang_reshard.trace.program import Program
from sglang_reshard.transports.arrivals import ArrivalMemory
from sglang_reshard.transports.base import Transport, TransportContext
from sglang_reshard.transports.communicator import BroadcastCommunicators, P2pCommunicators, backend_of
from sglang_reshard.transports.factory import create_transport
from sglang_reshard.transports.memory import PeerMemory
from sglang_reshard.transports.nixl_reader import NixlReader
from sglang_reshard.transports.p2p import kept_dtypes
from sglang_reshard.transports.relay import Relays
from sglang_reshard.transports.remote_shards import RemoteShards

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """An engine rank's traced loader and read plan.

    Valid for one source layout (by content hash), its names for the loader, one rule of what may stay, one set of live
    addresses, one set of trainer ranks' hosts and GPUs, and one set of trainer ranks whose memory cannot be mapped.
    """

    layout: str
    signature: int | str
    may_stay: MayStay
    names: LoaderNames
    trainers: tuple[object, ...]
    tensor_index: TensorIndex
    program: Program
    read_plan: ReadPlan
    demand: RankDemand

    def is_current(self, request: DistributedUpdateWeightsReq, signature: int | str, names: LoaderNames) -> bool:
        return self.is_traced(request, signature, names) and self.trainers == trainers_of(request)

    def is_traced(self, request: DistributedUpdateWeightsReq, signature: int | str, names: LoaderNames) -> bool:
        known = self.layout, self.signature, self.may_stay, self.names.digest
        return known == (request.layout, signature, MayStay(request.frozen, request.only), names.digest)

    def unread(self, demands: Sequence[RankDemand]) -> tuple[str, ...]:
        """Returns the names, as the trainer has them, of tensors that no engine rank reads."""
        return self.names.trainer_names(unread_tensors(self.tensor_index, demands))


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The strategy that all engine ranks have chosen, and one engine rank's side of it.

    memory        trainer rank -> its mapped memory, for the trainer ranks whose memory this rank reads
    prepare_send  command to the trainer ranks, if any of them sends
    checksums     of this rank's weights, if they are verified; the regions are in the session
    regions       content hash of these regions
    names         content hash of the names by which the digest counts tensors; empty for the layout's own
    remark        on the plan, for the trainer's report
    kept          names of the parameters that any engine rank leaves as they are
    """

    strategy: Strategy
    memory: dict[int, PeerMemory]
    prepare_send: PrepareSend | None
    checksums: TargetChecksums | None
    regions: str
    names: str
    remark: str
    kept: tuple[str, ...] = ()


@dataclass(slots=True)
class PreparedTransfer:
    """A transport that is ready to move, for one target plan, one set of handles and one set of options.

    shadow         where it writes, unless it writes to the live weights
    regions        content hashes of all engine ranks' regions
    arrivals       its memory for what is quantized on arrival
    relays         what is read from other engines, if anything is
    scratch_bytes  bytes that the program holds for operands of expressions
    deltas         receives deltas instead, if the trainer may send any; made for the first of them
    """

    target: TargetPlan
    request: DistributedUpdateWeightsReq
    plan: TransferPlan
    shadow: ShadowWeights | None
    regions: tuple[str, ...]
    transport: Transport
    arrivals: ArrivalMemory
    relays: Relays | None
    context: TransportContext
    scratch_bytes: int
    deltas: DeltaTarget | None = None

    def is_current(self, request: DistributedUpdateWeightsReq, target: TargetPlan) -> bool:
        """Returns True if nothing has changed for `request`, and the trainer ranks that send are still prepared."""
        prepare = self.plan.prepare_send
        unchanged = _options(self.request) == _options(request)
        prepared = prepare is None or all(transfer == prepare.transfer for transfer in request.prepared)
        lost = self.relays is not None and self.relays.outcome.lost
        return self.target is target and unchanged and prepared and not lost

    def is_checked(self, request: DistributedUpdateWeightsReq) -> bool:
        """Returns True if `request` comes from the same version of the package and names the same transport."""
        known = self.request
        return (known.package_version, known.transport) == (request.package_version, request.transport)

    def is_base_of(self, request: DistributedUpdateWeightsReq) -> bool:
        """Returns whether the live weights are what the deltas change that `request` offers."""
        if self.target.program.arrivals:  # they are kept in another form than they arrive in
            return False
        try:
            if self.deltas is None:
                self.deltas = DeltaTarget(self.context, self.target.program)
            return self.deltas.is_base_of(self._sections(request))
        except torch.OutOfMemoryError as error:  # a full update needs less
            logger.warning("engine rank %d has no memory for deltas: %s", self.context.engine_rank, error)
            self.deltas = None
            return False

    def receive_indexes(self, request: DistributedUpdateWeightsReq) -> None:
        """Receives what says where deltas go, and checks it; raises as `DeltaTarget.receive_indexes` does."""
        assert self.deltas is not None
        self.deltas.receive_indexes(self._sections(request))

    def move_deltas(self, request: DistributedUpdateWeightsReq) -> None:
        """Receives what has changed, after `receive_indexes`; other engines may take all from here then."""
        assert self.deltas is not None
        self.deltas.move(self._sections(request))
        if self.relays is not None:
            self.relays.outcome.read_bytes = 0
            self.relays.progress.advance(self.relays.owned)

    def _sections(self, request: DistributedUpdateWeightsReq) -> Sections:
        rank = self.context.engine_rank
        return {t: of_ranks[rank] for t, of_ranks in enumerate(request.sections) if rank in of_ranks}

    def begin(self, request: DistributedUpdateWeightsReq) -> None:
        """Must be called before `transport.move` and `move_deltas`."""
        if self.relays is not None:
            assert request.relay is not None
            self.relays.progress.begin(request.relay.update, self.relays.check)

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that are kept between updates."""
        delta_bytes = self.deltas.extra_bytes if self.deltas is not None else 0
        return self.transport.extra_bytes + delta_bytes + self.scratch_bytes + self.arrivals.nbytes + self.shadow_bytes

    @property
    def shadow_bytes(self) -> int:
        return self.shadow.nbytes if self.shadow is not None else 0


class TransferCache:
    """Prepares one engine rank's transfers. Keeps the last one, communicators, mapped memory and shadow weights."""

    def __init__(self, engine_rank: int, device: torch.device, live: bool = True) -> None:
        """`live` is false if requests are not served from the memory that is written: it needs no shadow."""
        self._rank, self._device, self._live = engine_rank, device, live
        self._broadcast_groups: BroadcastCommunicators | None = None
        self._p2p: P2pCommunicators | None = None
        self._nixl: NixlReader | None = None
        self._shadow: ShadowWeights | None = None
        self.relay = RelayMember(engine_rank)
        self.trainer_memory = TrainerMemory(device)
        self.transfer: PreparedTransfer | None = None

    @property
    def has_communicators(self) -> bool:
        """True if it has this session's broadcast communicators. If any rank lacks them, all create new ones."""
        return self._broadcast_groups is not None

    def drop_communicators(self) -> None:
        if self._broadcast_groups is not None:
            self._broadcast_groups.close()
            self._broadcast_groups = None

    def drop_transfer(self) -> None:
        """Drops the prepared transfer, and the connections that only it uses."""
        self.transfer = None
        if self._p2p is not None:
            self._p2p.close()
            self._p2p = None
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    def unmap(self) -> None:
        """Unmaps the trainer ranks' memory, and drops all that has views of it."""
        self.drop_transfer()
        self._shadow = None
        self.trainer_memory.unmap()

    def clear(self) -> None:
        """Drops all that depends on other ranks."""
        self.unmap()
        self.relay.close()
        self.trainer_memory.clear()
        self.drop_communicators()

    def abort(self) -> None:
        """Ends this rank's waits for other ranks. Called from another thread."""
        broadcast_groups, p2p, nixl = self._broadcast_groups, self._p2p, self._nixl
        if broadcast_groups is not None:
            broadcast_groups.abort()
        if p2p is not None:
            p2p.abort()
        if nixl is not None:
            nixl.abort()

    def plan(
        self, request: DistributedUpdateWeightsReq, demands: Sequence[RankDemand], session: Session, target: TargetPlan
    ) -> TransferPlan:
        """Chooses the strategy, maps the memory that this rank reads, and publishes its send requests.

        Raises Mismatch for names that no engine rank reads, and Unsupported for an infeasible transport or
        insufficient memory.
        """
        unread = target.unread(demands)
        check_unread(unread, request.ignore, request.apart)
        topology = ClusterTopology.of(demands, request.trainer_hosts, request.trainer_devices)
        index, bucket_bytes = target.tensor_index, request.bucket_bytes
        strategy = choose_strategy(request.transport, index, demands, topology, bucket_bytes, delta=request.delta)
        trainer_ranks = _trainer_ranks_read(strategy, target, self._rank)
        memory = self.trainer_memory.map(trainer_ranks, request, session, target.tensor_index.layout)
        prepare_send = None
        one_sided = strategy.name == "nixl"
        if strategy.round_bytes.any():
            prepare_send = PrepareSend(
                transfer=f"{request.update}/{strategy.digest()}",
                read_plans=tuple(demand.digest for demand in demands),
                round_bytes=tuple(tuple(row) for row in strategy.round_bytes.tolist()),
                backend="nixl" if one_sided else backend_of(self._device),
                timeout_s=request.timeout_s,
                groups=strategy.groups,
                delta=request.delta,
            )
            for trainer_rank in strategy.senders(self._rank) if not one_sided or request.delta else ():
                program, dtypes = target.program, list[str]()
                if request.delta:
                    dtypes = kept_dtypes(target.tensor_index.layout, target.read_plan, program, trainer_rank)
                can_apply = request.delta and not program.arrivals
                asked = send_request(target.read_plan, trainer_rank, dtypes, delta=can_apply)
                link = Link(request.engine, self._rank, trainer_rank)
                session.put(asked, link.key(target.demand.digest), hashed=False)
        self._allocate_shadow(request, demands, target)
        checksums, regions, names = None, "", ""
        if request.verify != "off":
            names = session.put(target.names.names) if target.names.names else ""
            checksums = TargetChecksums(target.tensor_index, self._program(target))
            regions = session.put(checksums.regions)
        remark = "; ".join(filter(None, (unread_remark(unread), target.names.remark)))
        return TransferPlan(strategy, memory, prepare_send, checksums, regions, names, remark)

    def connect(
        self,
        request: DistributedUpdateWeightsReq,
        plan: TransferPlan,
        regions: tuple[str, ...],
        session: Session,
        scope: str,
        target: TargetPlan,
        relays: Relays | None,
    ) -> None:
        """Creates communicators, buffers and views. Collective over engine ranks and the trainer ranks that send."""
        if self._broadcast_groups is None:
            # Named by the update, so that all ranks use the same name and none that an aborted update left behind.
            self._broadcast_groups = BroadcastCommunicators(
                self._rank, self._device, request.timeout_s, epoch=request.update
            )
        self._broadcast_groups.use_store(session.store(request.engine, request.timeout_s, scope), session.local_address)
        round_bytes = plan.strategy.senders(self._rank)
        if plan.strategy.name == "nixl":
            self._nixl = NixlReader(self._rank)
            remote = {}
            for trainer_rank in round_bytes:
                key, who = remote_shards_key(request.engine, trainer_rank), f"trainer rank {trainer_rank}"
                what = f"the registered memory of {who}"
                remote[who] = session.get(key, RemoteShards, what, request.timeout_s, hashed=False)
                check_remote_shards(remote[who], len(target.tensor_index.layout.tensors), who)
            self._nixl.connect(remote)
        elif plan.prepare_send is not None and round_bytes:
            peer_id = len(request.trainer_hosts) + self._rank
            self._p2p = session.p2p_communicators(plan.prepare_send, peer_id, self._device)
            self._p2p.connect(session.p2p_store(request.engine, plan.prepare_send, scope), session.local_address)
        arrivals = ArrivalMemory(self._program(target), self._device, request.bucket_bytes, plan.checksums)
        context = TransportContext(
            engine_rank=self._rank,
            device=self._device,
            tensor_index=target.tensor_index,
            read_plan=target.read_plan,
            arrivals=arrivals,
            memory=plan.memory,
            broadcast=plan.strategy.broadcast,
            broadcast_groups=self._broadcast_groups,
            round_bytes=round_bytes,
            p2p=self._p2p,
            nixl=self._nixl,
            relays=relays,
            bucket_bytes=request.bucket_bytes,
            timeout_s=request.timeout_s,
            delta=request.delta,
        )
        transport = create_transport(plan.strategy, context)
        shadow, scratch_bytes = self._shadow, target.program.scratch_bytes
        self.transfer = PreparedTransfer(
            target, request, plan, shadow, regions, transport, arrivals, relays, context, scratch_bytes
        )

    def _allocate_shadow(
        self, request: DistributedUpdateWeightsReq, demands: Sequence[RankDemand], target: TargetPlan
    ) -> None:
        """Allocates the shadow weights of a staged update, unless they are there; frees those of another."""
        shadow = self._shadow
        if not request.staged:
            self._shadow = None
        elif shadow is None or shadow.live is not target.program:
            self._shadow = shadow = None  # so that its memory counts as free
            if not self._live:
                self._shadow = ShadowWeights.in_place(target.program)
                return
            ranks_on_host = sum(demand.host == demands[self._rank].host for demand in demands)
            check_room(shadow_bytes(target.program), ranks_on_host, self._device)
            self._shadow = ShadowWeights.of(target.program)

    def _program(self, target: TargetPlan) -> Program:
        """Returns the program that writes to where the transfer arrives."""
        return self._shadow.program if self._shadow is not None else target.program


def trainers_of(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    return request.trainer_hosts, request.trainer_devices


def _options(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    """Returns what must be equal for a prepared transfer to be used again."""
    relay = request.relay and (request.relay.address, request.relay.engines, request.relay.own)
    chosen = request.bucket_bytes, request.transport, request.staged, request.verify != "off", request.delta
    return request.handles, chosen, relay, request.ignore, request.apart


def _trainer_ranks_read(strategy: Strategy, target: TargetPlan, engine_rank: int) -> tuple[int, ...]:
    """Returns the trainer ranks whose memory an engine rank reads."""
    plan = target.read_plan
    if strategy.broadcast is None:
        sending = strategy.senders(engine_rank)
        return tuple(t for t in plan.traffic() if t not in sending)
    read_alone = strategy.broadcast.direct_reads[engine_rank][plan.shards(target.tensor_index)]
    led = {group.trainer_rank for group in strategy.broadcast.groups if group.leader == engine_rank}
    return tuple(sorted(led | set(plan.trainer_ranks[read_alone].tolist())))
