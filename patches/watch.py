"""An update as the tokenizer manager sees it, whatever becomes of it: a log line, metrics, a span."""

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


def watched(update: Update) -> Update:
    """`update`, with all of it told."""

    @functools.wraps(update)
    async def run(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        started = time.perf_counter()
        named = request.named()
        output = _LEFT
        with log_context(**named), spans.span("reshard.serve", parent=request.traceparent, **named) as span:
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


_LEFT = DistributedUpdateWeightsOutput(
    success=False, message="whoever asked for it did not wait for its end", phase=metrics.LEFT
)


def _log(request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput, seconds: float) -> None:
    if output.success:
        told = summary(output.ranks, output.transport, request.weight_version, seconds)
        logger.info("%s: %s", request.whose(), told)
    else:
        phase = output.phase or metrics.REQUEST
        logger.error("%s failed (%s) after %.3f s: %s", request.whose(), phase, seconds, output.message)
