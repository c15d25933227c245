"""Emits a log line, metrics and a span for every update in the tokenizer manager, with any outcome."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import get_logger, log_context
from sglang_reshard.observability.report import received_bytes, summary
from sglang_reshard.patches import metrics
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
Update = Callable[["TokenizerManager", DistributedUpdateWeightsReq], Awaitable[DistributedUpdateWeightsOutput]]


def observed(update: Update) -> Update:
    """Wraps `update` in a span, and records its outcome."""

    @functools.wraps(update)
    async def run(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        started = time.perf_counter()
        labels = request.labels()
        output = _CANCELLED
        with log_context(**labels), spans.span("reshard.serve", parent=request.traceparent, **labels) as span:
            try:
                parent = spans.traceparent() or request.traceparent  # of the schedulers' spans
                output = await update(manager, msgspec.structs.replace(request, traceparent=parent))
            finally:
                seconds = time.perf_counter() - started
                metrics.observe(manager, output, seconds)
                _log(request, output, seconds)
            if output.success:
                spans.set_attributes(span, transport=output.transport, received_bytes=received_bytes(output.ranks))
            else:
                spans.set_attributes(span, phase=output.phase or metrics.REQUEST)
                spans.set_error(span, output.message)
        return output

    return run


_CANCELLED = DistributedUpdateWeightsOutput(
    success=False, message="the client disconnected before the update ended", phase=metrics.LEFT
)


def _log(request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput, seconds: float) -> None:
    if output.success:
        outcome = summary(output.ranks, output.transport, request.weight_version, seconds)
        logger.info("%s: %s", request.name(), outcome)
    else:
        phase = output.phase or metrics.REQUEST
        logger.error("%s failed (%s) after %.3f s: %s", request.name(), phase, seconds, output.message)
