"""Sends the single update request to the engine, and broadcasts its result. Runs on trainer rank 0 only."""

from __future__ import annotations

import contextlib
import contextvars
import glob
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sglang_reshard.errors import DeadlineExceeded, EngineRefused, Mismatch, ReshardError, TornWeights
from sglang_reshard.gpu.device import RankDevice
from sglang_reshard.layout.source_layout import SourceLayout, first_difference
from sglang_reshard.observability import spans
from sglang_reshard.observability.report import TrainerRankReport, UpdateReport, slowest_seconds
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Failure,
    LoraAdapter,
    TrainerStatus,
    UpdateResult,
    Verify,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.trainer.publisher import PublishedShards
from sglang_reshard.version import __version__

_TORN = "The engine's weights are torn: repeat the update before generating"
_UNLOADED = "The engine has unloaded the LoRA adapter {}: repeat the update"
Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of one update; see `WeightSender.update`."""

    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool
    ignore: tuple[str, ...]
    check_finite: bool
    verify: Verify
    staged: bool
    unmap_after: bool
    partial: bool = False


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """Options of all updates of a session; see `WeightSender`.

    lora  the adapter that is updated; None for the model's own weights
    """

    transport: str
    bucket_bytes: int
    timeout_s: float
    lora: LoraAdapter | None = None


class UpdateCoordinator:
    """Requests updates for all trainer ranks. `send` sends a request to the engine, and returns its answer."""

    def __init__(self, session: Session, global_ranks: Sequence[int], send: Send, config: SenderConfig) -> None:
        self._session, self._size, self._send, self._config = session, len(global_ranks), send, config
        self._engine_ranks = 0  # of the last successful update
        self._thread: threading.Thread | None = None

    def begin(
        self, channel: UpdateChannel, published: PublishedShards | None, options: UpdateOptions, started: float
    ) -> None:
        """Starts a thread that runs the update, so that this rank can execute commands like all others.

        published  what this rank has published; None if it has failed, which its status reports
        started    when the update began, by `time.perf_counter`
        """
        arguments = self._run, channel, published, options, started, self._thread
        run = contextvars.copy_context().run  # for the current span, and the attributes of log lines
        self._thread = threading.Thread(target=run, args=arguments, name="sglang-reshard coordinator", daemon=True)
        self._thread.start()

    def _run(
        self,
        channel: UpdateChannel,
        published: PublishedShards | None,
        options: UpdateOptions,
        started: float,
        previous: threading.Thread | None,
    ) -> None:
        """Runs the update, and sends its result to all trainer ranks.

        previous  thread of the update before, which may still wait for the engine's answer if that was aborted
        """
        seconds = {"publish": time.perf_counter() - started}
        try:
            if previous is not None:
                previous.join(self._config.timeout_s)
                if previous.is_alive():
                    raise DeadlineExceeded(
                        f"the engine has not answered update {channel.update - 1} yet; look at its log, and restart "
                        "it if it hangs"
                    )
            output = self._request(channel, published, options)
            seconds["total"] = time.perf_counter() - started
            assert published is not None  # else this rank's own status has failed the update
            report = _report(output, published.shard_bytes, options, self._config.bucket_bytes, seconds)
            result = UpdateResult(report, None)
            self._engine_ranks = len(output.ranks)
        except Exception as error:
            result = UpdateResult(None, Failure.of(error))
        with contextlib.suppress(ReshardError):  # no rank is left to receive it
            channel.send_command(result)

    def _request(
        self, channel: UpdateChannel, published: PublishedShards | None, options: UpdateOptions
    ) -> DistributedUpdateWeightsOutput:
        """Waits until all trainer ranks are ready and agree, and sends the request. It carries metadata only."""
        statuses = channel.collect_statuses(self._size, self._config.timeout_s)
        if channel.update > 1:  # every rank has published its status, so every rank has read the last result
            channel.delete_update(channel.update - 1, self._size, self._engine_ranks)
        for status in statuses:
            if status.failure is not None:
                raise status.failure.error()
        self._check_same_layout(statuses)
        assert published is not None
        tied = tuple(glob.escape(name) for name in published.tied)
        with spans.span("reshard.request"):
            output = self._send(
                DistributedUpdateWeightsReq(
                    address=self._session.address,
                    update=channel.update,
                    layout=statuses[0].layout,
                    handles=tuple(status.handles for status in statuses),
                    trainer_hosts=tuple(status.host for status in statuses),
                    trainer_devices=_devices(statuses),
                    prepared=tuple(status.prepared for status in statuses),
                    weight_version=options.weight_version,
                    transport=self._config.transport,
                    bucket_bytes=self._config.bucket_bytes,
                    timeout_s=self._config.timeout_s,
                    flush_cache=options.flush_cache,
                    abort_all_requests=options.abort_all_requests,
                    ignore=options.ignore + tied,
                    verify=options.verify,
                    staged=options.staged or self._config.lora is not None,  # it costs an adapter nothing
                    unmap_after=options.unmap_after,
                    lora=self._config.lora,
                    package_version=__version__,
                    traceparent=spans.traceparent(),
                )
            )
        if output.success:
            return output
        if output.torn:
            lora = self._config.lora
            raise TornWeights(f"{output.message}. {_TORN if lora is None else _UNLOADED.format(lora.name)}")
        raise EngineRefused(output.message)

    def _check_same_layout(self, statuses: list[TrainerStatus]) -> None:
        for rank, status in enumerate(statuses):
            if status.layout != statuses[0].layout:
                first, other = (
                    self._session.get_layout(digest, SourceLayout, self._config.timeout_s)
                    for digest in (statuses[0].layout, status.layout)
                )
                raise Mismatch(first_difference(first, other, rank))


def _devices(statuses: Sequence[TrainerStatus]) -> tuple[RankDevice, ...]:
    """Returns each trainer rank's GPU, without what its process sees: nothing depends on that."""
    devices = tuple(msgspec.structs.replace(status.device, visible=()) for status in statuses)
    return devices if any(device.uuid for device in devices) else ()


def _report(
    output: DistributedUpdateWeightsOutput,
    shard_bytes: Sequence[int],
    options: UpdateOptions,
    bucket_bytes: int,
    seconds: dict[str, float],
) -> UpdateReport:
    trainer_ranks = tuple(
        TrainerRankReport(rank, nbytes, output.read_bytes.get(rank, 0)) for rank, nbytes in enumerate(shard_bytes)
    )
    remarks = output.message, output.relay_lost and f"engines did not pass on all weights: {output.relay_lost}"
    return UpdateReport(
        success=True,
        message="; ".join(filter(None, remarks)),
        weight_version=options.weight_version,
        verified=options.verify,
        transport=output.transport,
        transport_reason=output.transport_reason,
        predicted_seconds=output.predicted_seconds,
        digest=output.digest,
        bucket_bytes=bucket_bytes,
        seconds=seconds | slowest_seconds(output.ranks),
        engine_ranks=output.ranks,
        trainer_ranks=trainer_ranks,
    )
