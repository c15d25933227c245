"""Asks an engine's schedulers, on behalf of the tokenizer manager, and waits for the answer of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_reshard.errors import Mismatch
from sglang_reshard.patches import metrics
from sglang_reshard.patches.io_struct import (
    Asked,
    UpdateWeightsDistributedReqInput,
    UpdateWeightsDistributedReqOutput,
)
from sglang_reshard.protocol.messages import (
    WAITS,
    DistributedUpdateWeightsOutput,
    Step,
)
from sglang_reshard.protocol.validation import max_update_s

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_END_S = 10.0  # for an update that the schedulers end at their limit


async def ask_schedulers(self: TokenizerManager, request: Asked, step: Step) -> DistributedUpdateWeightsOutput:
    """Returns the schedulers' answer to a step that does not write live weights, of all data parallel ranks together.

    Returns a failure if they do not answer in time, or an answer cannot be read.
    """
    answer = asked(self, request, step)
    try:
        if await is_answered(answer, request):
            return together(answer.result())
        message = silence(request)
    except Mismatch as error:
        message = f"an answer of the engine's schedulers was lost: {error}"
    return DistributedUpdateWeightsOutput(success=False, message=message, phase=metrics.ENGINE)


def asked(
    self: TokenizerManager, request: Asked, step: Step
) -> asyncio.Future[list[UpdateWeightsDistributedReqOutput]]:
    """Asks the schedulers. The answer is never cancelled: SGLang would take a late one for that of the next request."""
    envelope = UpdateWeightsDistributedReqInput.of(request, step)
    return asyncio.ensure_future(self.update_weights_distributed_communicator(envelope))


async def is_answered(
    answer: asyncio.Future[list[UpdateWeightsDistributedReqOutput]],
    request: Asked,
) -> bool:
    """Waits for the schedulers' answer. Returns whether it comes in time."""
    done, _ = await asyncio.wait([answer], timeout=_longest_s(request))
    return bool(done)


def silence(request: Asked) -> str:
    """Returns an error for schedulers that do not answer in time."""
    return (
        f"the engine's schedulers have not answered within {_longest_s(request):g} s; look at the engine's log, "
        "and restart the engine if they never do"
    )


def _longest_s(request: Asked) -> float:
    return min(WAITS * request.timeout_s, max_update_s() + _END_S)


def together(replies: Sequence[UpdateWeightsDistributedReqOutput]) -> DistributedUpdateWeightsOutput:
    """Returns the worst answer of the data parallel ranks: torn, then failed, then still under way.

    Raises Mismatch for one that cannot be read.
    """
    return max((reply.open() for reply in replies), key=lambda o: (o.torn, not o.success, o.under_way))
