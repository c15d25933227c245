"""sglang.srt.managers.tokenizer_control_mixin: adds the update as a control request, under SGLang's own locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.errors import DeadlineExceeded, Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import (
    hook_check,
    lora_names,
    metrics,
    sglang_versions,
    stock_weights,
    torn_weights,
    weights_info,
)
from sglang_reshard.patches.io_struct import UpdateWeightsDistributedReqInput, UpdateWeightsDistributedReqOutput
from sglang_reshard.patches.supported_engine import unsupported_reason
from sglang_reshard.patches.update_observer import observed
from sglang_reshard.protocol.messages import (
    WAITS,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
    Step,
)

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
_NAME = "update_weights_distributed"
_POLL_S = 0.02


def apply() -> None:
    from sglang.srt.managers import tokenizer_control_mixin as mixin

    if all(spec[0] != _NAME for spec in mixin._COMMUNICATOR_SPECS):
        mixin._COMMUNICATOR_SPECS.append((_NAME, UpdateWeightsDistributedReqOutput))
    mixin.TokenizerControlMixin.update_weights_distributed = observed(update_weights_distributed)


async def update_weights_distributed(
    self: TokenizerManager, request: DistributedUpdateWeightsReq
) -> DistributedUpdateWeightsOutput:
    """Sends the request to the schedulers while no generation request runs.

    A paused engine is updated at once; otherwise running requests finish first, as in SGLang's own weight updates.
    """
    self.auto_create_handle_loop()
    if refusal := getattr(self, weights_info.RUNNING, ""):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    # A client that disconnects cancels its request. The update goes on: its outcome decides which weights are live.
    return await asyncio.shield(asyncio.ensure_future(_run_alone(self, request)))


async def _run_alone(self: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    with weights_info.running(self, f"{request.name()} is running; repeat this one when it has ended"):
        return await run_update(self, request)


async def run_update(self: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    """Runs an update; the caller has made sure that no other one runs."""
    if refusal := _refusal(self, request) or await _missing_patches(self, request.timeout_s):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    if not await weights_info.unshared(self, request.timeout_s):
        message = f"another engine has been reading the live weights for {request.timeout_s:.0f} s; repeat the update"
        return DistributedUpdateWeightsOutput(success=False, message=message)
    request = stock_weights.told(self, request)
    if request.lora is None:
        return await _update(self, request)
    async with self.lora_update_lock:
        lora = lora_names.with_lora_id(self, request.lora)
        return await _update(self, msgspec.structs.replace(request, lora=lora))


async def _update(self: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    step: Step = "update"
    if request.staged:  # requests are served with the old weights until the new ones have arrived
        output = await ask_schedulers(self, request, "stage")
        while output.success and (output := await ask_schedulers(self, request, "staged")).under_way:
            await asyncio.sleep(_POLL_S)
        if not output.success:
            return output
        step = "commit"
    if request.abort_all_requests:
        self.abort_request(abort_all=True)
    async with self.is_pause_cond:  # held during the update, so that the pause cannot be lifted
        paused = self.is_pause
        if paused:
            output = await _write(self, request, step)
    if not paused:
        async with self.model_update_lock.writer_lock:
            output = await _write(self, request, step)
    return output


async def _write(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, step: Step
) -> DistributedUpdateWeightsOutput:
    """Lets the schedulers write the weights. Lets nobody use them if that fails halfway."""
    output = await ask_schedulers(self, request, step, lambda late: _settle_late(self, request, late))
    if output.success and request.lora is not None:
        await lora_names.updated(self, request.lora)
    elif output.success:
        torn_weights.heal(self)
        weights_info.record(self, request, output)
    elif output.torn and request.lora is not None:
        lora_names.unload(self, request.lora, output.message)
    elif output.torn:
        torn_weights.mark(self, output.message)
    if output.success:
        self._update_weight_version_if_provided(request.weight_version)
    return output


def _settle_late(
    self: TokenizerManager, request: DistributedUpdateWeightsReq, late: DistributedUpdateWeightsOutput
) -> None:
    """Serves again, if the weights count as torn only because schedulers, stopped perhaps, had not answered in time."""
    if request.lora is not None or late.torn:
        return
    logger.warning("%s has ended late: %s", request.name(), late.message or "the new weights are live")
    torn_weights.heal(self)
    if late.success:
        weights_info.record(self, request, late)
        self._update_weight_version_if_provided(request.weight_version)


async def ask_schedulers(
    self: TokenizerManager,
    request: DistributedUpdateWeightsReq | ShareWeightsReq,
    step: Step,
    on_late_answer: Callable[[DistributedUpdateWeightsOutput], None] = lambda _: None,
) -> DistributedUpdateWeightsOutput:
    """Returns the schedulers' answer, of all data parallel ranks together.

    on_late_answer  is given an answer that comes after this has reported that there is none
    """
    envelope = UpdateWeightsDistributedReqInput.of(request, step)
    within = WAITS * request.timeout_s
    # Not cancelled: a late answer belongs to this request, and SGLang would take it for the next one's.
    answer = asyncio.ensure_future(self.update_weights_distributed_communicator(envelope))
    done, _ = await asyncio.wait([answer], timeout=within)
    if not done:
        answer.add_done_callback(lambda future: on_late_answer(_together([reply.open() for reply in future.result()])))
        return DistributedUpdateWeightsOutput(
            success=False,
            torn=step in ("update", "commit"),
            message=f"the engine's schedulers did not answer within {within:.0f} s; look at their log, and restart "
            "the engine",
            phase=metrics.ENGINE,
        )
    return _together([reply.open() for reply in answer.result()])


def _together(outputs: list[DistributedUpdateWeightsOutput]) -> DistributedUpdateWeightsOutput:
    """Returns the worst answer of the data parallel ranks: torn, then failed, then still under way."""
    return max(outputs, key=lambda o: (o.torn, not o.success, o.under_way))


async def _missing_patches(self: TokenizerManager, timeout_s: float) -> str:
    """Returns which of the engine's processes lack these patches; empty if none does."""
    try:
        await hook_check.check(self, timeout_s)
    except (DeadlineExceeded, Unsupported) as error:
        return str(error)
    return ""


def _refusal(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns why the update is refused before the schedulers are asked; empty if it is not."""
    if reason := unsupported_reason(manager.server_args):
        return reason
    if request.staged and manager.server_args.pp_size > 1:
        return (
            f"staged=True with pp_size={manager.server_args.pp_size}: an engine's pipeline stages are updated while no "
            "request runs; pass staged=False"
        )
    if request.lora is not None and (reason := lora_names.refusal(manager, request.lora)):
        return reason
    if request.weight_version is not None and request.weight_version == sglang_versions.weight_version(manager):
        return (
            f"the engine's weights are already version {request.weight_version!r}; "
            "pass a different weight_version to every update, or none"
        )
    return ""
