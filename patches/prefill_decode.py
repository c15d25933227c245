"""Prefill and decode apart: an update writes neither server while a request may be on both.

The prefill server computes the cache of a request's prompt, and the decode server continues with it. Neither knows the
other's weights. If both are updated while requests arrive, one server admits a request before its update and the other
one after it, so that two sets of weights answer it. Only a pause of both prevents that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq


def refusal(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns why the server has to be paused before the update; empty if it need not be.

    flush_cache=False lets old and new weights answer a request together, on these servers as on any other.
    """
    mode = manager.server_args.disaggregation_mode
    if mode == "null" or manager.is_pause or not request.flush_cache:
        return ""
    return (
        f"the {mode} server is not paused: a request that reaches it before the update, and the other server after it, "
        "would be answered with the old and the new weights. Call pause_generation('abort') on all prefill and decode "
        "servers, update them, and call continue_generation() once all updates have succeeded"
    )


def between_servers(scheduler: Scheduler) -> int:
    """Returns the number of requests whose cache is on its way between the servers, or set aside in host memory."""
    mode = scheduler.server_args.disaggregation_mode
    if mode == "prefill":
        return len(scheduler.disagg_prefill_bootstrap_queue.queue) + len(scheduler.disagg_prefill_inflight_queue)
    if mode == "decode":
        # Retracted requests have cache of the old weights in host memory. SGLang 0.5.12 counts a scheduler with such as
        # idle, and flushes its cache without theirs.
        waiting = scheduler.disagg_decode_prealloc_queue
        return len(scheduler.disagg_decode_transfer_queue.queue) + len(waiting.queue) + len(waiting.retracted_queue)
    return 0
