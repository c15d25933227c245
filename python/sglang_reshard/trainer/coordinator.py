"""Sends one update request to each engine, and the results to all trainer ranks. Runs on trainer rank 0 only."""

from __future__ import annotations

import contextlib
import functools
import glob
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait

import msgspec

from sglang_reshard import tasks
from sglang_reshard.errors import Aborted, DeadlineExceeded, ReshardError
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.observability import spans
from sglang_reshard.observability.report import TrainerRankReport, UpdateReport, slowest_seconds
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Failure,
    Outcome,
    TrainerStatus,
    UpdateResults,
)
from sglang_reshard.protocol.publication import next_publication
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import ANSWER_S, TrainerChannel
from sglang_reshard.routes import options_around
from sglang_reshard.shown_names import some_names
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.trainer.publisher import PublishedShards, check_alike
from sglang_reshard.trainer.settlement import Settlement
from sglang_reshard.version import PROTOCOL, __version__

_TORN = "The engine's weights are torn: repeat the update before generating"
_UNLOADED = "The engine has unloaded the LoRA adapter {}: repeat the update"
Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


class UpdateCoordinator:
    """Requests updates of all engines for all trainer ranks."""

    def __init__(self, session: Session, global_ranks: Sequence[int], config: SenderOptions) -> None:
        self._session, self._size, self._config = session, len(global_ranks), config
        self._around = options_around(config)
        self._engines: dict[int, Send] = {}
        self._asking: dict[int, Future[None]] = {}  # of the last update, which may still wait for an answer

    def set_engines(self, engines: Mapping[int, Send]) -> None:
        """Sets the engines of further updates: number -> function that sends a request and returns the answer."""
        self._engines = dict(engines)
        self._asking = {engine: asking for engine, asking in self._asking.items() if engine in engines}

    def run(
        self, channel: TrainerChannel, published: PublishedShards | None, options: UpdateOptions, started: float
    ) -> UpdateResults:
        """Runs the update. Returns the results, and sends them to all trainer ranks, without their parts of reports.

        published  what this rank has published; None if it has failed, which its status reports
        started    when the update began, by `time.perf_counter`
        """
        publish_seconds = time.perf_counter() - started
        try:
            statuses = self._statuses(channel)
            assert published is not None  # else this rank's own status has failed the update
        except Exception as error:
            results = dict.fromkeys(self._engines, Outcome[UpdateReport](None, Failure.of(error)))
        else:

            def report(output: DistributedUpdateWeightsOutput) -> UpdateReport:
                seconds = {"publish": publish_seconds, "total": time.perf_counter() - started}
                return _report(output, published.shard_bytes, options, self._config, seconds)

            request = functools.partial(self._request, channel.update, statuses, published, options)
            if_torn = _UNLOADED.format(some_names([a.name for a in options.lora])) if options.lora else _TORN
            answers = {engine: self._ask(channel, engine, request, report, if_torn) for engine in self._engines}
            results = {engine: answer.result() for engine, answer in answers.items()}
        with contextlib.suppress(ReshardError):
            channel.end()
        with contextlib.suppress(ReshardError):  # no rank is left to receive it
            channel.send_results(UpdateResults({engine: _for_all(result) for engine, result in results.items()}))
        return UpdateResults(results)

    def _ask(
        self,
        channel: TrainerChannel,
        engine: int,
        request: Callable[[int], DistributedUpdateWeightsReq],
        report: Callable[[DistributedUpdateWeightsOutput], UpdateReport],
        if_torn: str,
    ) -> Future[Outcome[UpdateReport]]:
        """Sends a request in a thread, whose answer is given up soon after an abort of this engine's update."""
        settlement = Settlement(channel.engine(engine), self._config.timeout_s, if_torn)
        result: Future[Outcome[UpdateReport]] = Future()

        def settle(outcome: Callable[[], DistributedUpdateWeightsOutput]) -> None:
            try:
                found = Outcome(report(outcome()))
            except Exception as error:
                found = Outcome(None, Failure.of(error))
            with contextlib.suppress(InvalidStateError):  # the first one stays
                result.set_result(found)

        def give_up(reason: str) -> None:
            with contextlib.suppress(TimeoutError):
                result.result(ANSWER_S)  # the engine's own answer says more
                return
            settle(lambda: settlement.outcome(Aborted(reason)))

        try:
            settlement.scope.on_abort(give_up)
        except ReshardError as error:
            result.set_result(Outcome(None, Failure.of(error)))
            return result
        result.add_done_callback(lambda _: settlement.scope.off_abort(give_up))  # the worker watches on
        answer = functools.partial(self._answer, channel, engine, request, self._asking.get(engine), settlement)
        self._asking[engine] = tasks.start(f"engine {engine}", functools.partial(settle, answer))
        return result

    def _answer(
        self,
        channel: TrainerChannel,
        engine: int,
        request: Callable[[int], DistributedUpdateWeightsReq],
        previous: Future[None] | None,
        settlement: Settlement,
    ) -> DistributedUpdateWeightsOutput:
        """Returns the outcome of an engine's update. Raises what it means for the weights if it has not succeeded.

        previous  asks for the update before, which may have been given up
        """
        if previous is not None and wait([previous], self._config.timeout_s).not_done:
            raise DeadlineExceeded(
                f"the engine has not answered update {channel.update - 1} yet. Look at its log, and restart it if it "
                "hangs"
            )
        with spans.span("reshard.request"):
            asked = request(engine)
            answer: DistributedUpdateWeightsOutput | Exception
            try:
                answer = self._engines[engine](asked)
            except Exception as error:
                answer = error.with_traceback(None)  # which would keep this frame, and all that it refers to
        if isinstance(answer, DistributedUpdateWeightsOutput) and not answer.torn:
            if answer.success and settlement.scope.has_written():
                return answer
            if not answer.success and channel.why_aborted():
                answer = Aborted(answer.message)  # the engine only reports it
        return settlement.outcome(answer)

    def _statuses(self, channel: TrainerChannel) -> list[TrainerStatus]:
        """Waits until all trainer ranks are ready. Raises what any of them raised, and Mismatch if they disagree."""
        outcomes = channel.collect_statuses(self._size, self._config.timeout_s)
        if channel.update > 1:  # every rank has published its status, so every rank has read the last results
            channel.delete_update(channel.update - 1)
        statuses = [outcome.result() for outcome in outcomes]
        check_alike(self._session, [status.layout for status in statuses], self._config.timeout_s)
        return statuses

    def _request(
        self,
        update: int,
        statuses: Sequence[TrainerStatus],
        published: PublishedShards,
        options: UpdateOptions,
        engine: int,
    ) -> DistributedUpdateWeightsReq:
        """Returns the request of an engine, which carries metadata only."""
        prepared = {status.prepared.get(engine, "") for status in statuses}
        tied = tuple(glob.escape(name) for name in published.tied)
        equal: tuple[str, ...] = ()
        apart: dict[str, str] = {}
        if any(status.heads for status in statuses):
            from sglang_reshard.trainer.tied_heads import judged

            equal, apart = judged([status.heads for status in statuses])
        return DistributedUpdateWeightsReq(
            address=self._session.address,
            engine=engine,
            update=update,
            layout=statuses[0].layout,
            handles=tuple(status.handles for status in statuses),
            trainer_hosts=tuple(status.host for status in statuses),
            trainer_devices=_devices(statuses),
            prepared=prepared.pop() if len(prepared) == 1 else "",
            weight_version=options.weight_version,
            transport=self._config.transport,
            bucket_bytes=self._config.bucket_bytes,
            timeout_s=self._config.timeout_s,
            flush_cache=options.flush_cache,
            abort_all_requests=options.abort_all_requests,
            ignore=(*tied, *equal),
            apart=apart,
            frozen=tuple(options.frozen),
            only=tuple(options.only),
            verify=options.verify,
            staged=options.staged or bool(options.lora),  # it costs an adapter nothing
            unmap_after=options.unmap_after,
            draft=options.draft,
            lora=tuple(options.lora),
            merged=tuple(options.merged),
            around=self._around,
            offers=_offers(statuses, engine),
            publication=next_publication(),
            package_version=__version__,
            protocol=PROTOCOL,
            traceparent=spans.traceparent(),
        )


def _offers(statuses: Sequence[TrainerStatus], engine: int) -> tuple[dict[int, bytes], ...]:
    """Returns what can be taken instead of all weights, by trainer rank; nothing unless all trainer ranks offer it."""
    found = [status.offers[engine] for status in statuses if engine in status.offers]
    return tuple(found) if len(found) == len(statuses) else ()


def _devices(statuses: Sequence[TrainerStatus]) -> tuple[RankGpuInfo, ...]:
    """Returns each trainer rank's GPU, without what its process sees: nothing depends on that."""
    devices = tuple(msgspec.structs.replace(status.device, visible=()) for status in statuses)
    return devices if any(device.uuid for device in devices) else ()


def _report(
    output: DistributedUpdateWeightsOutput,
    shard_bytes: Sequence[int],
    options: UpdateOptions,
    config: SenderOptions,
    seconds: dict[str, float],
) -> UpdateReport:
    sent = Counter[int]()
    for rank_report in output.ranks:
        sent.update(rank_report.read_bytes)
    trainer_ranks = tuple(TrainerRankReport(rank, nbytes, sent[rank]) for rank, nbytes in enumerate(shard_bytes))
    remarks = output.message, output.detour
    return UpdateReport(
        success=True,
        message="; ".join(filter(None, remarks)),
        weight_version=options.weight_version,
        verified=options.verify,
        transport=output.transport,
        transport_reason=output.transport_reason,
        digest=output.digest,
        delta=output.taken,
        kept=output.kept,
        kept_versions=output.kept_versions,
        bucket_bytes=config.bucket_bytes,
        seconds=seconds | slowest_seconds(output.ranks),
        engine_ranks=output.ranks,
        trainer_ranks=trainer_ranks,
    )


def _for_all(result: Outcome[UpdateReport]) -> Outcome[UpdateReport]:
    """Returns what all trainer ranks are sent: rows and pairs of trainer ranks, to each of them, would be too much."""
    report = result.value
    if report is None:
        return result
    ranks = tuple(msgspec.structs.replace(rank, read_bytes={}) for rank in report.engine_ranks)
    return Outcome(msgspec.structs.replace(report, trainer_ranks=(), engine_ranks=ranks))
