"""sglang.srt.model_executor.model_runner: executes an update on the live parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, Step

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_IN_PROGRESS = DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
_RECEIVER = "_reshard_receiver"


def apply() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.update_weights_distributed = update_weights_distributed


def update_weights_distributed(
    self: ModelRunner, request: DistributedUpdateWeightsReq, step: Step, refusal: str
) -> DistributedUpdateWeightsOutput:
    """Executes a step of an update on this engine rank. `refusal` is why this rank must not be updated, or empty."""
    from sglang.srt.distributed import get_tp_group

    from sglang_reshard.engine.receiver import WeightReceiver

    device = next(self.model.parameters()).device
    kept: tuple[WeightReceiver, str] | None = getattr(self, _RECEIVER, None)
    if kept is None:
        tp = get_tp_group()
        # Repacking depends on how the engine was started, so the modules need to be checked only once.
        kept = WeightReceiver(self.model, tp.rank_in_group, tp.world_size, device), repacked_reason(self.model)
        setattr(self, _RECEIVER, kept)
    receiver, repacked = kept
    if step == "stage":
        return receiver.stage(request, refusal or repacked)
    if step == "staged":
        return receiver.staged() or _IN_PROGRESS
    if device.type == "cuda":
        self.forward_stream.synchronize()  # a forward pass in flight still reads the old weights
    run = receiver.commit if step == "commit" else receiver.update
    return run(request, refusal or repacked)


def repacked_reason(model: torch.nn.Module) -> str:
    """Returns why the live weights do not have the loader's layout; empty if they do, as far as is known.

    Most repacking changes shapes, which the trace rejects. These kinds keep the shape and reorder the elements, so that
    weights written in the loader's layout would be silently wrong.
    """
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            return f"{name} was packed for AMX after loading, which an update cannot redo; start the engine without AMX"
        if getattr(getattr(module, "quant_method", None), "use_flashinfer_trtllm_moe", False):
            return (
                f"{name} was reordered for flashinfer-trtllm after loading, which an update cannot redo; "
                "start the engine with another moe_runner_backend, triton for example"
            )
    return ""
