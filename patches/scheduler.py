"""sglang.srt.managers.scheduler: the request's handler, which every TP rank enters in the same turn of its loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import metrics, presence, versions
from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput, UpdateWeightsDistributedReqOutput
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.version import VERSION_KEY

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = get_logger(__name__)


def apply() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Scheduler.update_weights_distributed = update_weights_distributed
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher", _dispatch, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _tell_version, HookType.AFTER)


def _dispatch(_result: Any, scheduler: Scheduler, *_: Any, **__: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(UpdateWeightsDistributedReqInput, scheduler.update_weights_distributed)]
    )


def _tell_version(output: Any, *_: Any, **__: Any) -> None:
    """Among what a scheduler says of itself: in `get_server_info` and GET /server_info, too."""
    output.internal_state[VERSION_KEY] = presence.told()


def update_weights_distributed(
    self: Scheduler, envelope: UpdateWeightsDistributedReqInput
) -> UpdateWeightsDistributedReqOutput:
    """Update, then flush the cache. An exception here would end the server, so none gets out."""
    try:
        request = envelope.open()
        writes = envelope.step in ("update", "commit")
        refusal = _refusal(self, request, writes) if envelope.step != "staged" else ""
        output = self.tp_worker.update_weights_distributed(request, envelope.step, refusal)
        if writes and output.success:
            versions.record_weight_version(self, request.weight_version)
            if request.flush_cache:
                _flush_cache(self)
    except Exception as error:
        logger.exception("update_weights_distributed failed")
        from sglang.srt.distributed import get_tp_group

        message = f"engine rank {get_tp_group().rank_in_group}: {type(error).__name__}: {error}"
        output = DistributedUpdateWeightsOutput(success=False, message=message, phase=metrics.ENGINE)
    return UpdateWeightsDistributedReqOutput.of(output)


def _refusal(scheduler: Scheduler, request: DistributedUpdateWeightsReq, writes: bool) -> str:
    """Why the scheduler's state forbids the update now; empty if it does not. `writes`: into live weights."""
    if "weights" in versions.offload_tags(scheduler):
        return (
            "the weights are offloaded by release_memory_occupation; "
            "call resume_memory_occupation(['weights']) before the update"
        )
    if versions.session_is_open(scheduler):
        return (
            "a weight-update session of SGLang's own is open; call end_weight_update before the update, which needs no "
            "session"
        )
    if scheduler.draft_worker is not None and not scheduler.spec_algorithm.is_ngram():  # n-grams have no weights
        return "a draft model is loaded, which is not carried yet; start the engine without speculative decoding"
    _drop_finished_requests(scheduler)
    with _without_waiting_requests(scheduler):
        idle = scheduler.is_fully_idle()
    if writes and request.flush_cache and not idle:
        return (
            f"the cache cannot be flushed: {_running(scheduler)} requests are running; pause with "
            "mode='abort' or mode='retract', pass abort_all_requests=True, or pass flush_cache=False to go on with "
            "what was computed from the old weights"
        )
    return ""


def _drop_finished_requests(scheduler: Scheduler) -> None:
    """As the scheduler's next turn would.

    An update may arrive before it: the last tokens have been sent, the readers' locks are free, and the batch still
    holds the requests.
    """
    if not _running(scheduler):
        for batch in versions.batches(scheduler):
            batch.filter_batch()


def _running(scheduler: Scheduler) -> int:
    """How many requests are in any batch that have not all their tokens."""
    requests = (request for batch in versions.batches(scheduler) for request in batch.reqs)
    return len({request.rid for request in requests if not request.finished()})


def _flush_cache(scheduler: Scheduler) -> None:
    """SGLang flushes only while no request waits. One that waits owns nothing of the cache: it may."""
    with _without_waiting_requests(scheduler):
        if not scheduler.flush_cache():
            raise RuntimeError("the cache was not flushed after the update, so tokens may come from the old weights")


@contextmanager
def _without_waiting_requests(scheduler: Scheduler) -> Iterator[None]:
    """While requests that have no part of the cache are taken out of the queue, as after a retracting pause."""
    waiting = scheduler.waiting_queue
    scheduler.waiting_queue = [request for request in waiting if versions.owns_cache(request)]
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
