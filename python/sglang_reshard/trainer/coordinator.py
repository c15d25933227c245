"""Trainer rank 0's part beside its own: the engine is asked once for all trainer ranks, who are told how it went."""

from __future__ import annotations

import contextlib
import contextvars
import glob
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_reshard.errors import DeadlineExceeded, EngineRefused, Mismatch, ReshardError, TornWeights
from sglang_reshard.layout.difference import first_difference
from sglang_reshard.observability import spans
from sglang_reshard.observability.report import TrainerRankReport, UpdateReport, slowest_seconds
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Failure,
    TrainerStatus,
    UpdateResult,
    Verify,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.sources import SourceLayout
from sglang_reshard.trainer.publisher import PublishedShards
from sglang_reshard.version import __version__

Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """What one update is asked for; see `WeightSender.update`."""

    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool
    ignore: tuple[str, ...]
    check_finite: bool
    verify: Verify
    staged: bool
    let_go: bool


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """How all updates of a session go; see `WeightSender`."""

    transport: str
    bucket_bytes: int
    timeout_s: float


class UpdateCoordinator:
    """See the module's text. `send` reaches the engine."""

    def __init__(self, session: Session, global_ranks: Sequence[int], send: Send, way: SenderConfig) -> None:
        self._session, self._size, self._send, self._way = session, len(global_ranks), send, way
        self._engine_ranks = 0  # as the last successful update reported
        self._asking: threading.Thread | None = None

    def begin(
        self, talk: UpdateChannel, published: PublishedShards | None, options: UpdateOptions, started: float
    ) -> None:
        """In a thread of its own, as this rank has a part in the update like all others.

        published  what this rank has; None where it has failed, which its note tells
        started    when the update began, by `time.perf_counter`
        """
        arguments = self._run, talk, published, options, started, self._asking
        run = contextvars.copy_context().run  # this thread's span and what its log lines are of
        self._asking = threading.Thread(target=run, args=arguments, name="sglang-reshard lead", daemon=True)
        self._asking.start()

    def _run(
        self,
        talk: UpdateChannel,
        published: PublishedShards | None,
        options: UpdateOptions,
        started: float,
        before: threading.Thread | None,
    ) -> None:
        """Have the engine updated, and say to all trainer ranks how it went.

        before  the thread of the update before this one, whose answer is waited for still if that was given up
        """
        seconds = {"publish": time.perf_counter() - started}
        try:
            if before is not None:
                before.join(self._way.timeout_s)
                if before.is_alive():
                    raise DeadlineExceeded(
                        f"the engine has not answered update {talk.update - 1} yet; look at its log, and start it "
                        "anew if it does not go on"
                    )
            answer = self._ask(talk, published, options)
            seconds["total"] = time.perf_counter() - started
            assert published is not None  # an error of this rank's own is among the notes and was raised
            done = UpdateResult(_report(answer, published.shard_bytes, options, self._way.bucket_bytes, seconds), None)
            self._engine_ranks = len(answer.ranks)
        except Exception as error:
            done = UpdateResult(None, Failure.of(error))
        with contextlib.suppress(ReshardError):  # nobody is there any more to be told
            talk.say(done)

    def _ask(
        self, talk: UpdateChannel, published: PublishedShards | None, options: UpdateOptions
    ) -> DistributedUpdateWeightsOutput:
        """All ranks ready and agreed? Then one request, which carries metadata only."""
        notes = talk.collect_notes(self._size, self._way.timeout_s)
        if talk.update > 1:  # every rank has announced this update, so every rank has read the last one's result
            talk.forget(talk.update - 1, self._size, self._engine_ranks)
        for note in notes:
            if note.failure is not None:
                raise note.failure.error()
        self._check_agreement(notes)
        assert published is not None
        tied = tuple(glob.escape(name) for name in published.tied)
        with spans.span("reshard.request"):
            answer = self._send(
                DistributedUpdateWeightsReq(
                    address=self._session.address,
                    update=talk.update,
                    layout=notes[0].layout,
                    handles=tuple(note.handles for note in notes),
                    trainer_hosts=tuple(note.host for note in notes),
                    routes=tuple(note.route for note in notes),
                    weight_version=options.weight_version,
                    transport=self._way.transport,
                    bucket_bytes=self._way.bucket_bytes,
                    timeout_s=self._way.timeout_s,
                    flush_cache=options.flush_cache,
                    abort_all_requests=options.abort_all_requests,
                    ignore=options.ignore + tied,
                    verify=options.verify,
                    staged=options.staged,
                    let_go=options.let_go,
                    package_version=__version__,
                    traceparent=spans.traceparent(),
                )
            )
        if answer.success:
            return answer
        if answer.torn:
            raise TornWeights(f"{answer.message}. The engine's weights are torn: repeat the update before generating")
        raise EngineRefused(answer.message)

    def _check_agreement(self, notes: list[TrainerStatus]) -> None:
        for rank, note in enumerate(notes):
            if note.layout == notes[0].layout:
                continue
            mine, other = (
                self._session.get_layout(digest, SourceLayout, self._way.timeout_s)
                for digest in (notes[0].layout, note.layout)
            )
            raise Mismatch(first_difference(mine, other, rank))


def _report(
    answer: DistributedUpdateWeightsOutput,
    shard_bytes: Sequence[int],
    options: UpdateOptions,
    bucket_bytes: int,
    seconds: dict[str, float],
) -> UpdateReport:
    trainers = tuple(
        TrainerRankReport(rank, held, answer.read_bytes.get(rank, 0)) for rank, held in enumerate(shard_bytes)
    )
    return UpdateReport(
        success=True,
        message=answer.message,
        weight_version=options.weight_version,
        verified=options.verify,
        transport=answer.transport,
        transport_reason=answer.transport_reason,
        predicted_seconds=answer.predicted_seconds,
        digest=answer.digest,
        bucket_bytes=bucket_bytes,
        seconds=seconds | slowest_seconds(answer.ranks),
        engine_ranks=answer.ranks,
        trainer_ranks=trainers,
    )
