"""Executes the phases of an update on one engine rank. `trainer.worker` is the other side of them.

    prepare  trace the loader and plan reads, if anything has changed since the last update
    plan     all demands are known: choose the strategy, map trainer memory, check what can be checked
    call     trainer ranks that send prepare to do so
    connect  create communicators, buffers and views, together with the trainer ranks that send
    check    what has to be checked of an offer has arrived, and is sound, on all engine ranks
    staged   a staged update has arrived where the landing holds it back, and is verified
    move     bytes arrive where the landing has them written: in the live parameters, or apart from them
    verify   checksums of the arrived weights are compared with the trainer's, if requested
    commit   staged weights are made live; the loader's local steps run; what forward passes have derived
             from the old weights is dropped, or computed again

All engine ranks vote between the phases, and so proceed or fail together. The first byte is written to live memory
after all ranks have voted that they are ready: before `move`, or before `commit` of a staged update. The control server
counts that vote only while the trainer stands by the update, and lets the trainer know of it: see `update_channel`. A
failure before that leaves the old weights untouched. A failure after it leaves the rank torn until an update succeeds.
An update for which nothing has changed goes from `prepare` straight to `move`, or to `check` if an offer is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from sglang_reshard.engine.context import LastWrite, Phase, UpdateContext, Vote, describe_error
from sglang_reshard.engine.prepared import Prepared, Transfers
from sglang_reshard.engine.target_planning import LoaderNames, TargetPlan, get_layout, plan_target
from sglang_reshard.engine.targets import Target
from sglang_reshard.engine.unread import not_ignored
from sglang_reshard.errors import ConnectionLost, Mismatch, ReshardError, Unsupported
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
from sglang_reshard.trace.program import Program
from sglang_reshard.version import check_same_protocol

logger = get_logger(__name__)
_GIVEN = LoaderNames()


class UpdateExecutor:
    """Executes updates on one engine rank. Keeps the traced loader and the prepared transfer between them.

    A phase that fails raises PhaseFailed or Aborted if all ranks know of it, and any other error if they do not.
    """

    def __init__(self, target: Target, rank: int, size: int, device: torch.device) -> None:
        """See `WeightReceiver`."""
        self._target, self._rank, self._size, self._device = target, rank, size, device
        # Signature and layout of the target whose remark is in an earlier report; a reference would keep its memory.
        self._remarked: tuple[int, str] | None = None
        self._placed = b""  # when the update under way was prepared
        self._planned: TargetPlan | None = None
        self._live: TargetPlan | None = None  # by which the live weights, and scratch memory, were written
        self.transfers = Transfers(rank, device, target.live)
        self._written = LastWrite()
        self._names = LoaderNames()
        self.torn = ""  # why the weights are partly written; empty if they are sound

    def prepare(self, context: UpdateContext, refusal: str) -> None:
        """Does all that can be done before a byte is written. `refusal` fails the update on all ranks."""
        with garbage_collector_paused():  # tracing and planning make objects for every tensor
            self._prepare(context, refusal)

    def _prepare(self, context: UpdateContext, refusal: str) -> None:
        vote = Vote(error=refusal) if refusal else self._target_vote(context)
        # Where something is offered, the votes tell whether it is taken, and so which vote is the last one.
        last = vote.reusable and not context.request.staged and not context.request.offers
        with self._begins_to_write(context, last) as mark:
            votes = context.all_gather(Phase.PREPARE.value, vote, mark)
        reusable = all([v.reusable for v in votes])
        if not reusable and _names_are_open(votes):
            votes = self._find_names(context)
        context.check_votes(Phase.PREPARE, votes)
        context.reused = reusable
        if reusable:
            context.taken = all([v.accepts for v in votes])
            context.kept_bytes = self.transfer.held_bytes
            if context.request.offers and not context.request.staged and not context.taken:
                self.prepare_commit(context, refusal)
            return
        self.transfers.drop_last()
        self._connect(context, self._plan(context))

    def receive_staged(self, context: UpdateContext) -> None:
        """Receives where the landing holds back what arrives, and verifies it."""
        if self.transfer.target.program.scratch_bytes:  # it is written at once
            self._live = None
        error = ""
        try:
            if context.taken:
                self._check_taken(context)
            self._move(context)
            self._verify(context)
        except Exception as failure:
            error = context.abort_because(failure)
        context.all_gather_votes(Phase.STAGED, Vote(error))

    def prepare_commit(self, context: UpdateContext, refusal: str) -> None:
        """Takes the last vote before the live weights are written, where `prepare` has not: time may have passed."""
        if not refusal and self._target.placement() != self._placed:
            refusal = "experts were rebalanced after the update was staged; repeat the update"
        with self._begins_to_write(context, not refusal) as mark:
            context.all_gather_votes(Phase.READY, Vote(refusal), mark)

    def write(self, context: UpdateContext) -> DistributedUpdateWeightsOutput:
        """Writes the live weights: everything that a failure leaves torn. An offer is checked before it begins."""
        landing = self.transfer.landing
        if context.taken and not landing.holds_back:
            self._vote_on_taken(context)
        self.torn, self._live, target = _torn(context.request), None, self.transfer.target
        self._written = LastWrite(context.request.stock_changes, target.program.kept)
        error = ""
        try:
            if not landing.holds_back:
                self._move(context)
                self._verify(context)
            with context.enter(Phase.COMMIT):
                landing.commit()
                target.program.run_steps()
                self._target.renew(model_ran=context.request.staged or not context.reused)
                self._synchronize()
        except Exception as failure:
            error = context.abort_because(failure)
        output, vote = self._outcome(context, error)
        del landing  # the memory in which a staged update arrives would stay until this call returns
        if context.request.unmap_after:
            self.unmap()  # before the vote: after it the trainer may be answered, and free its memory
        votes = self._vote_written(context, output, vote)
        self.torn, self._live, self._remarked = "", target, (target.signature, target.layout)
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
        self.torn, self._live = "", None
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

    def _outcome(self, context: UpdateContext, error: str) -> tuple[DistributedUpdateWeightsOutput, Vote]:
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
        vote = Vote(
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

    def _target_vote(self, context: UpdateContext) -> Vote:
        """Prepares the target. Returns this rank's vote, whether that has succeeded or not."""
        found = self._names_of(context.request)
        searched = found is self._names
        names = f"{searched}{found.digest}"
        try:
            return msgspec.structs.replace(self._prepare_target(context), names=names)
        except Exception as error:
            in_trace = context.phase is Phase.TRACE and isinstance(error, ReshardError)
            return Vote(error=self._described(context, error), names_open=in_trace and not searched, names=names)

    def _find_names(self, context: UpdateContext) -> list[Vote]:
        """Finds other names for tensors that the loader does not read, and prepares the target for them. Collective.

        Returns the votes of all engine ranks, if none of them has a transfer to reuse.
        """
        from sglang_reshard.engine.names.probe import search_names

        try:
            with context.enter(Phase.TRACE):
                self._names = search_names(context, self._target, get_layout(context.request, context.session))
            vote = msgspec.structs.replace(self._target_vote(context), reusable=False, accepts=False)
        except Mismatch as error:  # the same on all ranks
            vote = Vote(error=str(error))
        return context.all_gather("prepare/names", vote)

    def _names_of(self, request: DistributedUpdateWeightsReq) -> LoaderNames:
        """Returns what was found for this layout; the names that are given, as long as nothing was looked for."""
        return self._names if self._names.layout == request.layout else _GIVEN

    def _described(self, context: UpdateContext, error: Exception) -> str:
        hint = self._names_of(context.request).hint
        told = describe_error(error)
        return f"{told.removesuffix('.')}. {hint}" if hint else told

    def _prepare_target(self, context: UpdateContext) -> Vote:
        """Traces and plans this rank's reads, unless that was done for the same layout and live parameters."""
        request = context.request
        transfer = self.transfers.last
        if transfer is None or not transfer.is_checked(request):
            check_same_protocol(request.protocol, request.package_version, theirs="the trainer", ours="the engine")
        signature, self._placed = self._target.signature(), self._target.placement()
        names = self._names_of(request)
        target, tried_handles = self._planned, self.transfers.trainer_memory.tried_handles
        if target is None or not target.is_current(request, signature, names) or tried_handles != request.handles:
            with context.enter(Phase.TRACE):
                self._planned = target = plan_target(
                    self._target,
                    signature,
                    request,
                    context.session,
                    self._rank,
                    self._size,
                    self._device,
                    self.transfers.trainer_memory,
                    self.transfers.drop_last,
                    known=target,
                    names=names,
                )
        if target.program.kept:
            from sglang_reshard.engine.sound_weights import check_kept

            check_kept(target.program.kept, request, self._written, torn=bool(self.torn))
        transfer = self.transfers.last
        reusable = transfer is not None and transfer.is_current(request, target)
        accepts = False
        if reusable and request.offers:
            assert transfer is not None
            with context.enter(Phase.COMPARE):
                accepts = transfer.end.accepts(request)
        return Vote(reusable=reusable, accepts=accepts)

    def _plan(self, context: UpdateContext) -> Prepared:
        target = self._planned
        assert target is not None
        plan, vote = None, Vote()
        with context.enter(Phase.PLAN):
            demands = context.all_gather("demands", target.demand)
        searched = self._names_of(context.request) is self._names
        unread = target.unread(demands)
        if unread and not searched and not_ignored(unread, context.request.ignore):
            context.check_votes(Phase.PREPARE, self._find_names(context))
            target = self._planned
            assert target is not None
            demands = context.all_gather("demands/names", target.demand)
        with context.enter(Phase.PLAN):
            try:
                plan = self.transfers.plan(context.request, demands, context.session, target)
                vote = Vote(plan=plan.strategy.digest(), landing=plan.landing.tells(), kept=target.program.kept)
            except Exception as error:
                vote = Vote(error=self._described(context, error))
            votes = context.all_gather_votes(Phase.PLAN, vote)
        if plan is None or len({v.plan for v in votes}) > 1:
            raise ReshardError("engine ranks made different plans. This is a bug; please report it")
        plan.kept = tuple(sorted({name for v in votes for name in v.kept}))
        plan.landing.told(tuple(v.landing for v in votes), plan.kept)
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
            error = ""
            try:
                self.transfers.connect(context.session, channel.scope, context.all_gather)
            except Exception as failure:
                error = context.abort_because(failure)
            with self._begins_to_write(context, not error and not request.staged) as mark:
                context.all_gather_votes(Phase.CONNECT, Vote(error), mark)

    def _vote_on_taken(self, context: UpdateContext) -> None:
        """Fails on all ranks, without changing live weights, if one of them receives damaged data."""
        error = ""
        try:
            self._check_taken(context)
        except Exception as failure:
            error = context.abort_because(failure)
        with self._begins_to_write(context, not error) as mark:
            context.all_gather_votes(Phase.CHECK, Vote(error), mark)

    def _check_taken(self, context: UpdateContext) -> None:
        with context.enter(Phase.CHECK):
            self._call_trainers(context)
            self.transfer.end.check(context.request)

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
            transfer.end.move(request, context.taken)
            self._synchronize()  # a GPU has only been given the copies

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

    @contextmanager
    def _begins_to_write(self, context: UpdateContext, may_write: bool) -> Iterator[str]:
        """Yields the mark for a vote after which all ranks write.

        A rank that loses its connection in that vote asks whether the others write, and counts as torn if they do, or
        if nobody can tell.

        may_write  whether they may by this rank's own vote: one that votes failure stops all
        """
        try:
            yield WRITING if may_write else ""
        except ConnectionLost:
            if may_write:
                standing = context.channel.standing_without_connection()
                if standing is None or standing.mark == WRITING:
                    self.torn = _torn(context.request)
            raise

    def _vote_written(self, context: UpdateContext, output: DistributedUpdateWeightsOutput, vote: Vote) -> list[Vote]:
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


def _names_are_open(votes: Sequence[Vote]) -> bool:
    """Returns whether ranks that failed may succeed with other names, or ranks do not know of the same ones."""
    failed = [vote for vote in votes if vote.error]
    return all(vote.names_open for vote in failed) and (bool(failed) or len({vote.names for vote in votes}) > 1)


def _torn(request: DistributedUpdateWeightsReq) -> str:
    return f"update {request.update} failed while weights were being written"


def _with_votes(output: DistributedUpdateWeightsOutput, votes: list[Vote]) -> DistributedUpdateWeightsOutput:
    return msgspec.structs.replace(
        output,
        message="; ".join(dict.fromkeys(filter(None, (output.message, *(vote.remark for vote in votes))))),
        digest=votes[0].digest,
        detour=next((vote.detour for vote in votes if vote.detour), ""),
        ranks=tuple(vote.report for vote in votes if vote.report is not None),
    )
