"""Plans the writes of an engine rank, and its reads from each trainer rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.engine.targets import Target
from sglang_reshard.engine.trainer_memory import TrainerMemory
from sglang_reshard.engine.unread import left_alone_remark
from sglang_reshard.gpu.runtime import rank_device
from sglang_reshard.layout.names import renamed
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import host_identity
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan import RankDemand, RankLocation, ReadPlan, TensorIndex, plan_reads, rank_demand, unread_tensors
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import PUBLISHED_S, Session
from sglang_reshard.protocol.update_channel import update_scope
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.trace.program import MayStay, Program

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoaderNames:
    """The names of one source layout's tensors, in its order, see `engine.names`.

    layout  content hash of the layout; empty as long as no other names were looked for
    given   as the trainer has them
    names   as the loader reads them; empty if those are the names that were given
    hint    what to do about names that the loader does not read, for error messages
    digest  of `names`; empty if there are none
    remark  says which names were changed, for the trainer's report; empty if none was
    """

    layout: str = ""
    given: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    hint: str = ""
    digest: str = ""
    remark: str = ""

    def trainer_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the trainer's names of the tensors that the loader reads as `names`."""
        given = dict(zip(self.names, self.given, strict=True)) if self.names else {}
        return tuple(given.get(name, name) for name in names)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """An engine rank's program and read plan.

    Valid for one source layout (by content hash), its names for the loader, one rule for kept parameters, one set of
    live addresses, one set of trainer ranks' hosts and GPUs, and one set of trainer ranks whose memory cannot be
    mapped.
    """

    layout: str
    signature: int
    may_stay: MayStay
    names: LoaderNames
    trainers: tuple[object, ...]
    tensor_index: TensorIndex
    program: Program
    read_plan: ReadPlan
    demand: RankDemand

    def is_current(self, request: DistributedUpdateWeightsReq, signature: int, names: LoaderNames) -> bool:
        return self.is_traced(request, signature, names) and self.trainers == trainers_of(request)

    def is_traced(self, request: DistributedUpdateWeightsReq, signature: int, names: LoaderNames) -> bool:
        known = self.layout, self.signature, self.may_stay, self.names.digest
        return known == (request.layout, signature, MayStay(request.frozen, request.only), names.digest)

    @property
    def remark(self) -> str:
        """Names the parameters that the program does not write, for the trainer's report; empty if there are none."""
        return left_alone_remark(self.program) if self.program.left_alone else ""

    def unread(self, demands: Sequence[RankDemand]) -> tuple[str, ...]:
        """Returns the names, as the trainer has them, of tensors that no engine rank reads."""
        return self.names.trainer_names(unread_tensors(self.tensor_index, demands))


def plan_target(
    context: UpdateContext,
    target: Target,
    signature: int,
    device: torch.device,
    memory: TrainerMemory,
    drop_views: Callable[[], None],
    *,
    known: TargetPlan | None,
    names: LoaderNames,
) -> TargetPlan:
    """Plans the writes and reads of one engine rank, on `device`.

    signature  of the target, now
    memory     tries whether the trainer ranks' memory can be mapped
    drop_views drops all views of it; is called before, but not for weights that the loader refuses
    known      an earlier plan, whose program is reused for a trainer that has the same tensors elsewhere, and which
               is returned if nothing has changed
    names      of the layout's tensors, as the loader reads them
    """
    request, session, rank, size = context.request, context.session, context.rank, context.size
    if known is not None and known.is_traced(request, signature, names):
        tensor_index, program = known.tensor_index, known.program
    else:
        layout = get_layout(request, session)
        if names.names:
            layout = renamed(layout, names.names)
        may_stay = MayStay(request.frozen, request.only)
        program = target.program([t.spec for t in layout.tensors], may_stay)
        if program.left_alone:
            logger.info("engine rank %d: %s", rank, left_alone_remark(program))
        tensor_index, known = TensorIndex.of(layout), None
    drop_views()  # they would keep memory mapped that is mapped again
    host, gpu = host_identity(), rank_device(device)
    location = RankLocation(rank, size, host, request.trainer_hosts, gpu, request.trainer_devices)
    read_plan = None
    if known is not None and known.trainers == trainers_of(request):
        read_plan, location = known.read_plan, replace(location, unreadable=known.demand.unreadable)
    while True:
        read_plan = read_plan or plan_reads(tensor_index, program.copies, location)
        tried = {t for t in read_plan.traffic() if request.trainer_hosts[t] == host} | set(location.unreadable)
        unreadable = memory.unreadable(tried, request, session, tensor_index.layout)
        if unreadable.keys() == set(location.unreadable):
            break
        # Others may hold the same shards, and have not been tried.
        read_plan, location = None, replace(location, unreadable=unreadable)
    if known is not None and known.read_plan is read_plan and known.demand.unreadable == unreadable:
        return known
    demand = rank_demand(tensor_index, read_plan, host, len(os.sched_getaffinity(0)), gpu, unreadable)
    may_stay = MayStay(request.frozen, request.only)
    trainers = trainers_of(request)
    return TargetPlan(request.layout, signature, may_stay, names, trainers, tensor_index, program, read_plan, demand)


def get_layout(request: DistributedUpdateWeightsReq, session: Session) -> SourceLayout:
    """Returns the layout of the tensors that an update sends. Raises Mismatch if it is not valid."""
    wait_s, scope = min(request.timeout_s, PUBLISHED_S), update_scope(request.update)
    layout = session.get(request.layout, SourceLayout, "the source layout", wait_s, scope=scope)
    check_layout(layout, len(request.trainer_hosts))
    return layout


def trainers_of(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    return request.trainer_hosts, request.trainer_devices
