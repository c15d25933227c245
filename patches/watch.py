"""An update as the tokenizer manager sees it, whatever becomes of it: a log line, metrics, a span."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard import spans
from sglang_reshard.logs import about, get_logger
from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.patches import metrics

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
        with about(**named), spans.span("reshard.serve", parent=request.traceparent, **named) as span:
            try:
                parent = spans.traceparent() or request.traceparent  # of the schedulers' spans
                output = await update(manager, msgspec.structs.replace(request, traceparent=parent))
            finally:
                seconds = time.perf_counter() - started
                metrics.observe(manager, output, seconds)
                _log(request, output, seconds)
            if output.success:
                spans.tell(span, transport=output.transport, received_bytes=_received(output))
            else:
                spans.tell(span, phase=output.phase or metrics.REQUEST)
                spans.fail(span, output.message)
        return output

    return run


_LEFT = DistributedUpdateWeightsOutput(
    success=False, message="whoever asked for it did not wait for its end", phase=metrics.LEFT
)


def _log(request: DistributedUpdateWeightsReq, output: DistributedUpdateWeightsOutput, seconds: float) -> None:
    whose = f"update {request.update} of session {request.address.session}"
    if output.success:
        version = f"version {request.weight_version}, " if request.weight_version is not None else ""
        logger.info(
            "%s: %s%.3f GB to %d engine ranks by %s in %.3f s",
            whose, version, _received(output) / 1e9, len(output.ranks), output.transport, seconds,
        )  # fmt: skip
    else:
        logger.error("%s failed (%s) after %.3f s: %s", whose, output.phase or metrics.REQUEST, seconds, output.message)


def _received(output: DistributedUpdateWeightsOutput) -> int:
    return sum(rank.received_bytes for rank in output.ranks)
