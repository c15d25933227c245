"""sglang.srt.managers.tokenizer_control_mixin: one more control request, under SGLang's own locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.patches.fitness import unfit
from sglang_reshard.patches.io_struct import (
    UpdateWeightsDistributedReqInput,
    UpdateWeightsDistributedReqOutput,
)

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_NAME = "update_weights_distributed"
_RUNNING = "_reshard_running"  # on the manager: the update that is under way


def apply() -> None:
    from sglang.srt.managers import tokenizer_control_mixin as mixin

    if all(spec[0] != _NAME for spec in mixin._COMMUNICATOR_SPECS):
        mixin._COMMUNICATOR_SPECS.append((_NAME, UpdateWeightsDistributedReqOutput))
    mixin.TokenizerControlMixin.update_weights_distributed = update_weights_distributed


async def update_weights_distributed(
    self: TokenizerManager, request: DistributedUpdateWeightsReq
) -> DistributedUpdateWeightsOutput:
    """Send the request to the schedulers while no other request is being served.

    A paused engine is updated at once; otherwise the running requests finish first, as in SGLang's
    own weight updates.
    """
    self.auto_create_handle_loop()
    if refusal := _refusal(self.server_args, request) or getattr(self, _RUNNING, ""):
        return DistributedUpdateWeightsOutput(success=False, message=refusal)
    running = f"update {request.update} of session {request.session} is running; repeat this one when it has ended"
    setattr(self, _RUNNING, running)
    try:
        return await _update(self, request)
    finally:
        setattr(self, _RUNNING, "")


async def _update(self: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    if request.abort_all_requests:
        self.abort_request(abort_all=True)
    envelope = UpdateWeightsDistributedReqInput.of(request)
    async with self.is_pause_cond:  # held while updating, so that nobody unpauses meanwhile
        paused = self.is_pause
        if paused:
            replies = await self.update_weights_distributed_communicator(envelope)
    if not paused:
        async with self.model_update_lock.writer_lock:
            replies = await self.update_weights_distributed_communicator(envelope)
    outputs = [reply.open() for reply in replies]
    output = next((o for o in outputs if not o.success), outputs[0])
    if output.success:
        self._update_weight_version_if_provided(request.weight_version)
    return output


def _refusal(server_args: Any, request: DistributedUpdateWeightsReq) -> str:
    if reason := unfit(server_args):
        return reason
    if request.weight_version is not None and request.weight_version == server_args.weight_version:
        return (
            f"the engine's weights are already version {request.weight_version!r}; "
            "give every update another weight_version, or none"
        )
    return ""
