"""Executes the phases of an update on one engine rank. `trainer.worker` is the other side of them.

    prepare  trace the loader and plan reads, if anything has changed since the last update
    plan     all demands are known: choose the strategy, map trainer memory, check what can be checked
    call     trainer ranks that send prepare to do so
    connect  create communicators, buffers and views, together with the trainer ranks that send
    staged   a staged update has arrived where the landing holds it back, and is verified
    check    what has to be checked of an offer has arrived, and is sound
    ready    all engine ranks are about to write
    move     bytes arrive where the landing has them written: in the live parameters, or apart from them
    verify   checksums of the arrived weights are compared with the trainer's, if requested
    commit   staged weights are made live; the loader's local steps run; what forward passes have derived
             from the old weights is dropped, or computed again

All engine ranks vote between the phases, and so proceed or fail together. The first byte is written to live memory
after all ranks have voted `ready`: before `move`, or before `commit` of a staged update. The control server
counts that vote only while the trainer stands by the update, and lets the trainer know of it: see `update_channel`. A
failure before that leaves the old weights untouched. A failure after it leaves the rank torn until an update succeeds.
An update for which nothing has changed goes from `prepare` straight to `move`: that vote then stands for `ready`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from sglang_reshard.engine.context import (
    LastWrite,
    Phase,
    PlanVote,
    PrepareVote,
    UpdateContext,
    V,
    Vote,
    WrittenVote,
    describe_error,
)
from sglang_reshard.engine.prepared import Prepared, Transfers
from sglang_reshard.engine.target_planner import TargetPlanner, names_are_open
from sglang_reshard.engine.targets import Target, TargetPlan
from sglang_reshard.errors import ConnectionLost, ReshardError, Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import (
    Connect,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Start,
)
from sglang_reshard.protocol.update_channel import WRITING, WRITTEN
from sglang_reshard.routes.base import EngineEnd
from sglang_reshard.trace.program import Program

logger = get_logger(__name__)


class UpdateExecutor:
    """Executes updates on one engine rank. Keeps the traced loader and the prepared transfer between them.

    A phase that fails raises PhaseFailed or Aborted if all ranks know of it, and any other error if they do not.
    """

    def __init__(self, target: Target, rank: int, device: torch.device) -> None:
        """See `WeightReceiver`."""
        self._target, self._rank, self._device = target, rank, device
        # Signature and layout of the target whose remark is in an earlier report; a reference would keep its memory.
        self._remarked: tuple[int, str] | None = None
        self._live: TargetPlan | None = None  # by which the live weights, and scratch memory, were written
        self.transfers = Transfers(device, target.live)
        self.last = LastWrite()
        self._planner = TargetPlanner(target, device, self.transfers, self.last)

    @garbage_collector_paused()  # tracing and planning make objects for every tensor
    def prepare(self, context: UpdateContext, refusal: str) -> None:
        """Does all that can be done before a byte is written. `refusal` fails the update on all ranks."""
        vote = PrepareVote(error=refusal) if refusal else self._planner.vote(context)
        # What is offered may have to be checked first.
        last = vote.reusable and not context.request.staged and not context.request.offers
        votes = self._vote_before_writing(context, Phase.PREPARE, vote, may_write=last)
        reusable = all([v.reusable for v in votes])
        if not reusable and names_are_open(votes):
            votes = self._planner.find_names(context)
        context.check_votes(Phase.PREPARE, votes)
        context.reused, context.may_write = reusable, reusable and last
        if reusable:
            context.taken = all([v.accepts for v in votes])
            context.kept_bytes = self.transfer.held_bytes
            return
        self.transfers.drop_last()
        self._connect(context, self._plan(context))

    def receive_staged(self, context: UpdateContext) -> None:
        """Receives where the landing holds back what arrives, and verifies it."""
        if self.transfer.target.program.scratch_bytes:  # it is written at once
            self._live = None

        def receive() -> None:
            if context.taken:
                self._check_taken(context)
            self._move(context)
            self._verify(context)

        context.all_gather_votes(Phase.STAGED, Vote(context.attempt(receive)))

    def write(self, context: UpdateContext, refusal: str) -> DistributedUpdateWeightsOutput:
        """Writes the live weights: everything that a failure leaves torn. `refusal` fails the update before that."""
        if not context.may_write:
            self._last_vote(context, refusal)
        target, last = self.transfer.target, self.last
        last.torn, last.stock_changes = _torn(context.request), context.request.stock_changes
        last.kept, self._live = target.program.kept, None

        def write() -> None:
            landing = self.transfer.landing  # no other name may hold it: a staged update's memory is freed below
            if not landing.holds_back:
                self._move(context)
                self._verify(context)
            with context.enter(Phase.COMMIT):
                landing.commit()
                target.program.run_steps()
                self._target.renew(model_ran=context.request.staged or not context.reused)
                self._synchronize()

        output, vote = self._outcome(context, context.attempt(write))
        if context.request.unmap_after:
            self.unmap()  # before the vote: after it the trainer may be answered, and free its memory
        votes = self._vote_written(context, output, vote)
        last.torn, self._live, self._remarked = "", target, (target.signature, target.layout)
        return _with_votes(output, votes)

    def live_program(self) -> tuple[Program, dict[str, tuple[int, ...]]]:
        """See `WeightReceiver.live_program`."""
        live = self._live
        if live is None:
            raise Unsupported(
                f"engine rank {self._rank}: the live weights were not brought by an update of this package, so it is "
                "unknown which checkpoint tensors they hold. Update this engine first"
            )
        if live.signature != self._target.signature():
            raise Unsupported(
                f"engine rank {self._rank}: live parameters were replaced, or experts moved, since the last update. "
                "Update this engine again"
            )
        if live.program.kept:
            raise Unsupported(
                f"engine rank {self._rank}: the last update did not write {live.program.kept[0]} and others, so it is "
                "unknown which checkpoint tensors they hold. Send all weights to this engine once"
            )
        return live.program, {tensor.name: tensor.shape for tensor in live.tensor_index.layout.tensors}

    def accept_new_addresses(self) -> None:
        """See `WeightReceiver.moving_memory`."""
        if self._live is not None:
            self._live = replace(self._live, signature=self._target.signature())

    def written_by_others(self) -> None:
        """See `WeightReceiver.written_by_others`."""
        self.last.torn, self._live = "", None
        try:
            self._target.renew(model_ran=True)
        except ReshardError as error:
            logger.warning("SGLang has loaded weights, and some state may still depend on the old ones: %s", error)

    def release_pages(self) -> None:
        """See `WeightReceiver.release_pages`."""
        self._live = None  # their values are lost, as far as is known here
        self.transfers.release_pages()

    def unmap(self) -> None:
        """Unmaps the trainer ranks' memory, and returns what is not used without it to the GPU, as the trainer does."""
        self.transfers.unmap()
        runtime().trim(self._device)

    def _outcome(self, context: UpdateContext, error: str) -> tuple[DistributedUpdateWeightsOutput, WrittenVote]:
        """Returns what all ranks report alike, and this rank's vote."""
        transfer, target = self.transfer, self.transfer.target
        # Buffers of an earlier update count too, and so do those that found room in freed memory.
        peak_extra_bytes = max(context.memory.extra_bytes() + context.kept_bytes, transfer.held_bytes)
        traffic = transfer.end.traffic
        report = traffic.report(
            rank=self._rank,
            least_bytes=transfer.target.demand.least_bytes,
            peak_extra_bytes=peak_extra_bytes,
            seconds=context.seconds,
            staged_bytes=transfer.landing.staged_bytes,
            foreign_bytes=context.memory.foreign_bytes(),
        )
        vote = WrittenVote(
            error,
            report=report,
            digest=traffic.digest or context.digest,
            detour=traffic.detour,
            remark="" if self._remarked == (target.signature, target.layout) else target.remark,
        )
        strategy, tensor_index = transfer.strategy, transfer.target.tensor_index
        output = DistributedUpdateWeightsOutput(
            success=True,
            message="; ".join(filter(None, (transfer.remark, traffic.remark, self._target.remark))),
            transport=strategy.name,
            transport_reason=strategy.reason,
            tensors=len(tensor_index.layout.tensors),
            source_bytes=tensor_index.nbytes,
            taken=context.taken,
            kept=transfer.kept,
        )
        return output, vote

    def _plan(self, context: UpdateContext) -> Prepared:
        target, demands = self._planner.demands(context)
        plan, vote = None, PlanVote()
        with context.enter(Phase.PLAN):
            try:
                plan = self.transfers.plan(context, demands, target)
                vote = PlanVote(plan=plan.strategy.digest(), kept=target.program.kept)
            except Exception as error:
                vote = PlanVote(error=self._planner.described(context, error))
            votes = context.all_gather_votes(Phase.PLAN, vote)
        if plan is None or len({v.plan for v in votes}) > 1:
            raise ReshardError("engine ranks made different plans. This is a bug; please report it")
        plan.kept = tuple(sorted({name for v in votes for name in v.kept}))
        return plan

    def _connect(self, context: UpdateContext, plan: Prepared) -> None:
        request, channel = context.request, context.channel
        with context.enter(Phase.CONNECT):
            if plan.command is not None:
                error = ""
                if self._rank == 0:
                    try:
                        channel.send_command(plan.command)
                        channel.collect_ready(len(request.trainer_hosts), request.timeout_s)
                        channel.send_command(Connect())
                    except Exception as failure:
                        error = describe_error(failure)
                context.all_gather_votes(Phase.CALL, Vote(error))
            context.all_gather_votes(Phase.CONNECT, Vote(context.attempt(self.transfers.connect, context)))

    def _check_taken(self, context: UpdateContext) -> None:
        with context.enter(Phase.CHECK):
            self._call_trainers(context)
            with self._end_of_route() as end:
                end.check(context.request)

    def _call_trainers(self, context: UpdateContext) -> None:
        command = self.transfer.command
        if self._rank == 0 and command is not None and self.transfer.end.calls:
            context.channel.send_command(Start(command.transfer, context.taken))

    def _move(self, context: UpdateContext) -> None:
        request, transfer = context.request, self.transfer
        with context.enter(Phase.MOVE):
            if not context.taken:  # else it has begun with what was checked
                self._call_trainers(context)
            transfer.landing.begin(context)
            with self._end_of_route() as end:
                end.move(request, context.taken)
            self._synchronize()  # a GPU has only been given the copies

    @contextmanager
    def _end_of_route(self) -> Iterator[EngineEnd]:
        """A failure within closes the end, so that ranks that wait for this one fail as well."""
        end = self.transfer.end
        try:
            yield end
        except BaseException:
            end.close()
            raise

    def _verify(self, context: UpdateContext) -> None:
        """Raises Mismatch, naming the tensors, if this rank's weights are not the trainer's."""
        if context.request.verify == "off":
            return
        with context.enter(Phase.VERIFY):
            context.digest = self.transfer.landing.check(context)

    def _synchronize(self) -> None:
        runtime().synchronize([self._device])

    @property
    def transfer(self) -> Prepared:
        transfer = self.transfers.last
        assert transfer is not None
        return transfer

    def _last_vote(self, context: UpdateContext, error: str) -> None:
        """Takes the vote after which all ranks write, where `prepare` has not. Fails on all, if any has an error."""
        if not error and self._target.placement() != self._planner.placed:
            error = "experts were rebalanced after the update was staged; repeat the update"
        if not error and context.taken and not self.transfer.landing.holds_back:
            error = context.attempt(self._check_taken, context)  # what this rank receives may be damaged
        votes = self._vote_before_writing(context, Phase.READY, Vote(error), may_write=not error)
        context.check_votes(Phase.READY, votes)

    def _vote_before_writing(self, context: UpdateContext, phase: Phase, vote: V, *, may_write: bool) -> list[V]:
        """Returns the votes of all ranks, after which all write if all may.

        A rank that loses its connection in that vote asks whether the others write, and counts as torn if they do, or
        if nobody can tell.

        may_write  by this rank's own vote: one that votes failure stops all
        """
        try:
            return context.all_gather(phase.value, vote, WRITING if may_write else "")
        except ConnectionLost:
            if may_write:
                standing = context.channel.standing_without_connection()
                if standing is None or standing.mark == WRITING:
                    self.last.torn = _torn(context.request)
            raise

    def _vote_written(
        self, context: UpdateContext, output: DistributedUpdateWeightsOutput, vote: WrittenVote
    ) -> list[WrittenVote]:
        """Ends an update of the live weights. Returns the votes; only this rank's if it has lost its connection since.

        Raises what leaves the weights torn.
        """
        if self._rank == 0 and not vote.error:
            # Only the answer can say the versions of parameters that were left, which the engine's digest covers.
            known = vote if context.request.draft and not output.kept else msgspec.structs.replace(vote, digest="")
            context.channel.put_outcome(_with_votes(output, [known]))
        try:
            return context.all_gather_votes(Phase.COMMIT, vote, "" if vote.error else WRITTEN)
        except ConnectionLost:
            standing = None if vote.error else context.channel.standing_without_connection()
            if standing is None or standing.mark != WRITTEN:
                raise
            return [vote]


def _torn(request: DistributedUpdateWeightsReq) -> str:
    return f"update {request.update} failed while weights were being written"


def _with_votes(output: DistributedUpdateWeightsOutput, votes: list[WrittenVote]) -> DistributedUpdateWeightsOutput:
    return msgspec.structs.replace(
        output,
        message="; ".join(dict.fromkeys(filter(None, (output.message, *(vote.remark for vote in votes))))),
        digest=votes[0].digest,
        detour=next((vote.detour for vote in votes if vote.detour), ""),
        ranks=tuple(vote.report for vote in votes if vote.report is not None),
    )
