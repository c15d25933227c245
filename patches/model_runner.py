"""sglang.srt.model_executor.model_runner: where the live parameters are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, Step

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

UNDER_WAY = DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
_RECEIVER = "_reshard_receiver"


def apply() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.update_weights_distributed = update_weights_distributed


def update_weights_distributed(
    self: ModelRunner, request: DistributedUpdateWeightsReq, step: Step, refusal: str
) -> DistributedUpdateWeightsOutput:
    """A step of bringing this engine rank's parameters to the trainer's; `refusal` is why this rank must not."""
    from sglang.srt.distributed import get_tp_group

    from sglang_reshard.engine.receiver import WeightReceiver

    device = next(self.model.parameters()).device
    kept: tuple[WeightReceiver, str] | None = getattr(self, _RECEIVER, None)
    if kept is None:
        tp = get_tp_group()
        # Repacking is a matter of how the engine was started: one look at the modules is enough.
        kept = WeightReceiver(self.model, tp.rank_in_group, tp.world_size, device), repacked(self.model)
        setattr(self, _RECEIVER, kept)
    receiver, cannot = kept
    if step == "stage":
        return receiver.stage(request, refusal or cannot)
    if step == "staged":
        return receiver.staged() or UNDER_WAY
    if device.type == "cuda":
        self.forward_stream.synchronize()  # a forward pass in flight still reads the old weights
    run = receiver.commit if step == "commit" else receiver.update
    return run(request, refusal or cannot)


def repacked(model: torch.nn.Module) -> str:
    """Why the live weights are not laid out as the loader writes them; empty if they are, as far as can be told.

    Most repacking changes shapes, which the trace refuses by itself. These kinds keep the shape and
    reorder what is in it, so that weights written in the loader's layout would be wrong in silence.
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
