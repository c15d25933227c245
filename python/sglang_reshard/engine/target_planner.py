"""Keeps the plan of one engine rank's target from update to update, and the names that its loader reads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from sglang_reshard.engine.context import LastWrite, Phase, PrepareVote, UpdateContext, describe_error
from sglang_reshard.engine.prepared import Transfers
from sglang_reshard.engine.target_planning import LoaderNames, TargetPlan, get_layout, plan_target
from sglang_reshard.engine.targets import Target
from sglang_reshard.engine.unread import not_ignored
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.plan import RankDemand
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.version import check_same_protocol

_GIVEN = LoaderNames()


class TargetPlanner:
    """Plans one engine rank's target, unless that was done for the same layout and live parameters.

    placed  where experts were when the update under way was prepared, see `Target.placement`
    """

    def __init__(self, target: Target, device: torch.device, transfers: Transfers) -> None:
        self._target, self._device, self._transfers = target, device, transfers
        self._planned: TargetPlan | None = None
        self._names = LoaderNames()
        self.placed = b""

    def vote(self, context: UpdateContext, last: LastWrite, torn: bool) -> PrepareVote:
        """Plans the target. Returns this rank's vote, whether that has succeeded or not.

        last, torn  see `sound_weights.check_kept`
        """
        found = self._names_of(context.request)
        searched = found is self._names
        names = f"{searched}{found.digest}"
        try:
            reusable, accepts = self._plan(context, last, torn)
            return PrepareVote(reusable=reusable, accepts=accepts, names=names)
        except Exception as error:
            in_trace = context.phase is Phase.TRACE and isinstance(error, ReshardError)
            return PrepareVote(self.described(context, error), names_open=in_trace and not searched, names=names)

    def find_names(self, context: UpdateContext, last: LastWrite, torn: bool) -> list[PrepareVote]:
        """Finds other names for tensors that the loader does not read, and plans the target for them. Collective.

        Returns the votes of all engine ranks, if none of them has a transfer to reuse.
        """
        from sglang_reshard.engine.names.search import search_names

        try:
            with context.enter(Phase.TRACE):
                self._names = search_names(context, self._target, get_layout(context.request, context.session))
            vote = msgspec.structs.replace(self.vote(context, last, torn), reusable=False, accepts=False)
        except Mismatch as error:  # the same on all ranks
            vote = PrepareVote(str(error))
        return context.all_gather("prepare/names", vote)

    def demands(self, context: UpdateContext, last: LastWrite, torn: bool) -> tuple[TargetPlan, list[RankDemand]]:
        """Returns the plan, and the demands of all engine ranks. Looks for other names if some of them are unread.

        Collective. Raises PhaseFailed if the plan fails under other names.
        """
        found, exchanged = self._gathered(context, "demands")
        unread = found.unread(exchanged)
        searched = self._names_of(context.request) is self._names
        if unread and not searched and not_ignored(unread, context.request.ignore):
            context.check_votes(Phase.PREPARE, self.find_names(context, last, torn))
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

    def _plan(self, context: UpdateContext, last: LastWrite, torn: bool) -> tuple[bool, bool]:
        """Returns whether the last transfer can be used again, and whether it takes the offers of the trainer ranks."""
        request, transfer = context.request, self._transfers.last
        if transfer is None or not transfer.is_checked(request):
            check_same_protocol(request.protocol, request.package_version, theirs="the trainer", ours="the engine")
        signature, self.placed = self._target.signature(), self._target.placement()
        names, target = self._names_of(request), self._planned
        tried_handles = self._transfers.trainer_memory.tried_handles
        if target is None or not target.is_current(request, signature, names) or tried_handles != request.handles:
            with context.enter(Phase.TRACE):
                memory, drop_views = self._transfers.trainer_memory, self._transfers.drop_last
                self._planned = target = plan_target(
                    context, self._target, signature, self._device, memory, drop_views, known=target, names=names
                )
        if target.program.kept:
            from sglang_reshard.engine.sound_weights import check_kept

            check_kept(target.program.kept, request, last, torn=torn)
        transfer = self._transfers.last
        if transfer is None or not transfer.is_current(request, target):
            return False, False
        if not request.offers:
            return True, False
        with context.enter(Phase.COMPARE):
            return True, transfer.end.accepts(request)


def names_are_open(votes: Sequence[PrepareVote]) -> bool:
    """Returns whether ranks that failed may succeed with other names, or ranks do not know of the same ones."""
    failed = [vote for vote in votes if vote.error]
    return all(vote.names_open for vote in failed) and (bool(failed) or len({vote.names for vote in votes}) > 1)
