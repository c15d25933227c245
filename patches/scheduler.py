"""sglang.srt.managers.scheduler: handles an update's request, on every TP rank in the same iteration of its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import (
    cache_versions,
    disk_loads,
    draft_models,
    hooks,
    metrics,
    model_runner,
    prefill_decode,
    sglang_versions,
    token_versions,
)
from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput, UpdateWeightsDistributedReqOutput
from sglang_reshard.patches.pipeline import PipelineStage
from sglang_reshard.protocol.messages import (
    BY_VERSION,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
    StockLoadReq,
)
from sglang_reshard.version import VERSION_KEY

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = get_logger(__name__)


def apply() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.update_weights_distributed = update_weights_distributed


def dispatch(_result: Any, scheduler: Scheduler, *_: Any, **__: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    disk_loads.forget()
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(UpdateWeightsDistributedReqInput, scheduler.update_weights_distributed)]
    )
    if scheduler.server_args.pp_size > 1:
        PipelineStage(scheduler, scheduler.update_weights_distributed)


def report_version(output: Any, *_: Any, **__: Any) -> None:
    """Adds this package's version to the scheduler's internal state, which GET /server_info returns too."""
    output.internal_state[VERSION_KEY] = hooks.installed_version()


def update_weights_distributed(
    self: Scheduler, envelope: UpdateWeightsDistributedReqInput
) -> UpdateWeightsDistributedReqOutput:
    """Updates, then flushes the cache or begins a version of it; or shares.

    Raises nothing: an exception here would end the server. One that follows the write leaves the weights torn:
    requests could be answered with them and the cache of the old ones.
    """
    written = False
    try:
        if envelope.step == "share":
            return UpdateWeightsDistributedReqOutput.of(_share(self, envelope.open(ShareWeightsReq)))
        if envelope.step == "loaded":
            return UpdateWeightsDistributedReqOutput.of(disk_loads.loaded(self, envelope.open(StockLoadReq)))
        request = envelope.open(DistributedUpdateWeightsReq)
        writes = envelope.step in ("update", "commit")
        refusal = _refusal(self, request, writes) if envelope.step != "staged" else ""
        of_all = request.draft and not request.lora
        drafts = draft_models.drafts_of(self) if of_all else draft_models.Drafts([])
        runner = self.tp_worker.model_runner
        output = model_runner.update_weights_distributed(runner, request, envelope.step, refusal, drafts)
        written = writes and output.success
        if written:
            token_versions.record(self, request.weight_version)
            if request.flush_cache == BY_VERSION:
                cache_versions.begin(self)
            elif request.flush_cache:
                _flush_cache(self)
    except Exception as error:
        logger.exception("update_weights_distributed failed")
        rank, _ = sglang_versions.engine_rank(self.tp_worker.model_runner)
        message = f"engine rank {rank}: {type(error).__name__}: {error}"
        output = DistributedUpdateWeightsOutput(success=False, message=message, torn=written, phase=metrics.ENGINE)
    return UpdateWeightsDistributedReqOutput.of(output)


def _share(scheduler: Scheduler, request: ShareWeightsReq) -> DistributedUpdateWeightsOutput:
    if refusal := _offloaded(scheduler) or _session_open(scheduler):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    return model_runner.share_weights(scheduler.tp_worker.model_runner, request)


def _refusal(scheduler: Scheduler, request: DistributedUpdateWeightsReq, writes: bool) -> str:
    """Returns why the scheduler's state does not allow the update; empty if it does. `writes`: to live weights."""
    if refusal := _offloaded(scheduler) or _session_open(scheduler):
        return refusal
    if request.draft and (refusal := draft_models.unknown_reason(scheduler)):
        return refusal
    if writes and request.flush_cache == BY_VERSION:
        return cache_versions.refusal(scheduler)
    _drop_finished_requests(scheduler)
    with _without_waiting_requests(scheduler):
        idle = scheduler.is_fully_idle()
    between = prefill_decode.between_servers(scheduler)
    if writes and request.flush_cache and (between or not idle):
        return _not_flushed(_running_requests(scheduler), between)
    return ""


def _not_flushed(running: int, between: int) -> str:
    if between:
        return (
            f"the cache cannot be flushed: {running} requests are running, and {between} are between the prefill and "
            "the decode server. Pause both with mode='abort'"
        )
    return (
        f"the cache cannot be flushed: {running} requests are running. Pause with mode='abort' or mode='retract', "
        "pass abort_all_requests=True, or pass flush_cache='by_version', with which running requests alone keep the "
        "cache of the old weights"
    )


def _offloaded(scheduler: Scheduler) -> str:
    if "weights" not in sglang_versions.offload_tags(scheduler):
        return ""
    return (
        "the weights are offloaded by release_memory_occupation; "
        "call resume_memory_occupation(['weights']) before the update"
    )


def _session_open(scheduler: Scheduler) -> str:
    if not sglang_versions.weight_update_session_open(scheduler):
        return ""
    return "a weight-update session of SGLang is open; call end_weight_update first. This update needs no session"


def _drop_finished_requests(scheduler: Scheduler) -> None:
    """Drops them as the scheduler's next iteration would.

    An update may arrive before it: the last tokens have been sent, the readers' locks are released, and the batch still
    contains the requests.
    """
    if not _running_requests(scheduler):
        for batch in sglang_versions.batches(scheduler):
            batch.filter_batch()


def _running_requests(scheduler: Scheduler) -> int:
    """Returns the number of unfinished requests in all batches."""
    requests = (request for batch in sglang_versions.batches(scheduler) for request in batch.reqs)
    return len({request.rid for request in requests if not request.finished()})


def _flush_cache(scheduler: Scheduler) -> None:
    """Flushes the cache although requests wait, which SGLang does not: waiting requests hold no cache."""
    with _without_waiting_requests(scheduler):
        if not scheduler.flush_cache():
            raise RuntimeError(
                "the cache was not flushed after the update, so generation may use results computed from the old "
                "weights; flush the cache"
            )
    sglang_versions.clear_embedding_cache()


@contextmanager
def _without_waiting_requests(scheduler: Scheduler) -> Iterator[None]:
    """Removes requests that hold no KV cache from the queue inside the block; a retracting pause leaves such."""
    waiting = scheduler.waiting_queue
    scheduler.waiting_queue = [request for request in waiting if sglang_versions.holds_kv_cache(request)]
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
