"""Plans the writes of an engine rank, and its reads from each trainer rank, and keeps the plan between updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from sglang_reshard.engine.context import LastWrite, Phase, PrepareVote, UpdateContext, describe_error
from sglang_reshard.engine.prepared import Transfers
from sglang_reshard.engine.targets import LoaderNames, Target, TargetPlan, trainers_of
from sglang_reshard.engine.unread import check_kept, left_alone_remark, not_ignored
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.gpu.runtime import rank_device
from sglang_reshard.layout.names import renamed
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.memory.mapping import host_identity
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.plan import RankDemand, RankLocation, TensorIndex, plan_reads, rank_demand
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import PUBLISHED_S, Session
from sglang_reshard.protocol.update_channel import update_scope
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.trace.program import MayStay
from sglang_reshard.version import PROTOCOL, check_same_protocol

logger = get_logger(__name__)


_GIVEN = LoaderNames()


class TargetPlanner:
    """Plans one engine rank's target, unless that was done for the same layout and live parameters.

    placed  where experts were when the update under way was prepared, see `Target.placement`
    """

    def __init__(self, target: Target, device: torch.device, transfers: Transfers, last: LastWrite) -> None:
        self._target, self._device, self._transfers, self._last = target, device, transfers, last
        self._planned: TargetPlan | None = None
        self._names = LoaderNames()
        self.placed = b""

    def vote(self, context: UpdateContext) -> PrepareVote:
        """Plans the target. Returns this rank's vote, whether that has succeeded or not."""
        found = self._names_of(context.request)
        searched = found is self._names
        names = f"{searched}{found.digest}"
        try:
            reusable, accepts = self._plan(context)
            return PrepareVote(reusable=reusable, accepts=accepts, names=names)
        except Exception as error:
            in_trace = context.phase is Phase.TRACE and isinstance(error, ReshardError)
            return PrepareVote(self.described(context, error), names_open=in_trace and not searched, names=names)

    def find_names(self, context: UpdateContext) -> list[PrepareVote]:
        """Finds other names for tensors that the loader does not read, and plans the target for them. Collective.

        Returns the votes of all engine ranks, if none of them has a transfer to reuse.
        """
        from sglang_reshard.engine.names import search_names

        try:
            with context.enter(Phase.TRACE):
                self._names = search_names(context, self._target, get_layout(context.request, context.session))
            vote = msgspec.structs.replace(self.vote(context), reusable=False, accepts=False)
        except Mismatch as error:  # the same on all ranks
            vote = PrepareVote(str(error))
        return context.all_gather("prepare/names", vote)

    def demands(self, context: UpdateContext) -> tuple[TargetPlan, list[RankDemand]]:
        """Returns the plan, and the demands of all engine ranks. Looks for other names if some of them are unread.

        Collective. Raises PhaseFailed if the plan fails under other names.
        """
        found, exchanged = self._gathered(context, "demands")
        unread = found.unread(exchanged)
        searched = self._names_of(context.request) is self._names
        if unread and not searched and not_ignored(unread, context.request.ignore):
            context.check_votes(Phase.PREPARE, self.find_names(context))
            found, exchanged = self._gathered(context, "demands/names")
        return found, exchanged

    def described(self, context: UpdateContext, error: Exception) -> str:
        """Returns why a plan has failed, and the hint about the names of the tensors."""
        hint = self._names_of(context.request).hint
        told = describe_error(error)
        return f"{told.removesuffix('.')}. {hint}" if hint else told

    def _gathered(self, context: UpdateContext, name: str) -> tuple[TargetPlan, list[RankDemand]]:
        assert self._planned is not None
        with context.enter(Phase.PLAN):
            return self._planned, context.all_gather(name, self._planned.demand)

    def _names_of(self, request: DistributedUpdateWeightsReq) -> LoaderNames:
        """Returns what was found for this layout; the names that are given, as long as nothing was looked for."""
        return self._names if self._names.layout == request.layout else _GIVEN

    def _plan(self, context: UpdateContext) -> tuple[bool, bool]:
        """Returns whether the last transfer can be used again, and whether it takes the offers of the trainer ranks."""
        request = context.request
        if request.protocol != PROTOCOL:
            check_same_protocol(request.protocol, request.package_version, theirs="the trainer", ours="the engine")
        signature, self.placed = self._target.signature(), self._target.placement()
        names, target = self._names_of(request), self._planned
        tried_handles = self._transfers.trainer_memory.tried_handles
        if target is None or not target.is_current(request, signature, names) or tried_handles != request.handles:
            with context.enter(Phase.TRACE):
                self._planned = target = self._plan_target(context, signature, names)
        if target.program.kept:
            check_kept(target.program.kept, request, self._last)
        transfer = self._transfers.last
        if transfer is None or not transfer.is_current(request, target):
            return False, False
        if not request.offers:
            return True, False
        with context.enter(Phase.COMPARE):
            return True, transfer.end.accepts(request)

    def _plan_target(self, context: UpdateContext, signature: int, names: LoaderNames) -> TargetPlan:
        """Plans writes and reads. Returns the last plan if nothing has changed.

        Its program is used again for a trainer that has the same tensors elsewhere. All views of the trainer ranks'
        memory are dropped, but not for weights that the loader refuses.
        """
        request, rank, known = context.request, context.rank, self._planned
        may_stay, trainers = MayStay(request.frozen, request.only), trainers_of(request)
        if known is not None and known.is_traced(request, signature, names):
            tensor_index, program = known.tensor_index, known.program
        else:
            layout = get_layout(request, context.session)
            if names.names:
                layout = renamed(layout, names.names)
            program = self._target.program([t.spec for t in layout.tensors], may_stay)
            if program.left_alone:
                logger.info("engine rank %d: %s", rank, left_alone_remark(program))
            tensor_index, known = TensorIndex.of(layout), None
        self._transfers.drop_last()  # it would keep memory mapped that is mapped again
        host, gpu = host_identity(), rank_device(self._device)
        location = RankLocation(rank, context.size, host, request.trainer_hosts, gpu, request.trainer_devices)
        read_plan = None
        if known is not None and known.trainers == trainers:
            read_plan, location = known.read_plan, replace(location, unreadable=known.demand.unreadable)
        while True:
            read_plan = read_plan or plan_reads(tensor_index, program.copies, location)
            tried = {t for t in read_plan.traffic() if request.trainer_hosts[t] == host} | set(location.unreadable)
            unreadable = self._transfers.trainer_memory.unreadable(tried, context, tensor_index.layout)
            if unreadable.keys() == set(location.unreadable):
                break
            # Others may hold the same shards, and have not been tried.
            read_plan, location = None, replace(location, unreadable=unreadable)
        if known is not None and known.read_plan is read_plan and known.demand.unreadable == unreadable:
            return known
        demand = rank_demand(tensor_index, read_plan, host, gpu, unreadable)
        traced = request.layout, signature, may_stay, names
        return TargetPlan(*traced, trainers, tensor_index, program, read_plan, demand)


def names_are_open(votes: Sequence[PrepareVote]) -> bool:
    """Returns whether ranks that failed may succeed with other names, or ranks do not know of the same ones."""
    failed = [vote for vote in votes if vote.error]
    return all(vote.names_open for vote in failed) and (bool(failed) or len({vote.names for vote in votes}) > 1)


def get_layout(request: DistributedUpdateWeightsReq, session: Session) -> SourceLayout:
    """Returns the layout of the tensors that an update sends. Raises Mismatch if it is not valid."""
    wait_s, scope = min(request.timeout_s, PUBLISHED_S), update_scope(request.update)
    layout = session.get(request.layout, SourceLayout, "the source layout", wait_s, scope=scope)
    check_layout(layout, len(request.trainer_hosts))
    return layout
