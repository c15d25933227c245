"""Lets the stages of a pipelined engine handle an update's request together.

A stage of SGLang's pipeline handles the requests of an iteration of its loop before it sends them to the next stage.
An update is collective over all stages, so the first stage would wait for ranks that have not been asked. Here

    the first stage keeps the request back until no microbatch is in any stage, then lets it pass
    every stage sends it to the next one, and handles it in the same iteration, once it is sent
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_reshard.patches import metrics, sglang_versions
from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput, UpdateWeightsDistributedReqOutput
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

Handle = Callable[[UpdateWeightsDistributedReqInput], UpdateWeightsDistributedReqOutput]
DRAIN_S = 10.0  # for requests that were aborted or paused to leave the pipeline
_BUSY = DistributedUpdateWeightsOutput(
    success=False,
    message=f"requests still run in the engine's pipeline stages after {DRAIN_S:.0f} s; pause with mode='abort', or "
    "pass abort_all_requests=True",
    phase=metrics.REQUEST,
)


class PipelineStage:
    """Replaces two methods of `scheduler`: the function that handles an iteration's requests, and its successor.

    handle  executes an update's request on this engine rank
    """

    def __init__(self, scheduler: Scheduler, handle: Handle) -> None:
        self._scheduler, self._handle = scheduler, handle
        self._stock_process, self._stock_next = scheduler.process_input_requests, scheduler.get_next_batch_to_run
        self._kept: list[UpdateWeightsDistributedReqInput] = []  # on the first stage
        self._since = 0.0  # when the first of them came
        self._quiet = 0  # iterations without a request in the pipeline
        self._passed: list[UpdateWeightsDistributedReqInput] = []  # handled once they are sent on
        scheduler.process_input_requests = self._process
        scheduler.get_next_batch_to_run = self._next

    def _process(self, requests: list[Any]) -> None:
        """Modifies the list, which SGLang sends to the next stage when this returns."""
        ours = [request for request in requests if isinstance(request, UpdateWeightsDistributedReqInput)]
        if ours:
            requests[:] = [request for request in requests if request not in ours]
        self._stock_process(requests)
        if self._scheduler.pp_group.is_first_rank:
            ours = self._ready(ours)
        if ours:
            requests.extend(ours)
            self._passed += ours

    def _ready(self, come: list[UpdateWeightsDistributedReqInput]) -> list[UpdateWeightsDistributedReqInput]:
        """Returns the requests that may pass, of those that have `come` now or before."""
        if come and not self._kept:
            self._since, self._quiet = time.monotonic(), 0
        self._kept += come
        if not self._kept:
            return []
        # A microbatch's results go round the stages after its last request has ended.
        self._quiet = self._quiet + 1 if _is_empty(self._scheduler) else 0
        if self._quiet > 2 * self._scheduler.pp_loop_size:
            passed, self._kept = self._kept, []
            return passed
        if time.monotonic() - self._since > DRAIN_S:
            for request in self._kept:
                sglang_versions.send_output(self._scheduler, UpdateWeightsDistributedReqOutput.of(_BUSY), request)
            self._kept = []
        return []

    def _next(self, *args: Any, **kwargs: Any) -> Any:
        passed, self._passed = self._passed, []
        for request in passed:
            sglang_versions.send_output(self._scheduler, self._handle(request), request)
        return self._stock_next(*args, **kwargs)


def _is_empty(scheduler: Scheduler) -> bool:
    """Returns whether this stage holds no microbatch. Requests that wait to be scheduled do not count."""
    return all(batch is None or batch.is_empty() for batch in (*scheduler.mbs, *scheduler.running_mbs))
