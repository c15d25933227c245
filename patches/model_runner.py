"""sglang.srt.model_executor.model_runner: executes an update on the live parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, Step

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_reshard.engine.receiver import WeightReceiver

_IN_PROGRESS = DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
_RECEIVER = "_reshard_receiver"


def apply() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.update_weights_distributed = update_weights_distributed


def update_weights_distributed(
    self: ModelRunner, request: DistributedUpdateWeightsReq, step: Step, refusal: str
) -> DistributedUpdateWeightsOutput:
    """Executes a step of an update on this engine rank. `refusal` is why this rank must not be updated, or empty."""
    device = next(self.model.parameters()).device
    kept: tuple[WeightReceiver, str] | None = getattr(self, _RECEIVER, None)
    if kept is None:
        from sglang.srt.distributed import get_tp_group

        from sglang_reshard.engine.receiver import WeightReceiver

        tp = get_tp_group()
        # Repacking depends on how the engine was started, so the modules need to be checked only once.
        kept = WeightReceiver(self.model, tp.rank_in_group, tp.world_size, device), repacked_reason(self.model)
        setattr(self, _RECEIVER, kept)
    receiver, repacked = kept
    if step == "stage":
        return receiver.stage(request, refusal or repacked)
    if step == "staged":
        return receiver.staged() or _IN_PROGRESS
    # A forward pass in flight still reads the old weights. Not every one runs in SGLang's forward_stream: without the
    # overlap schedule it is the scheduler's, with PD multiplexing one of several.
    runtime().synchronize([device])
    run = receiver.commit if step == "commit" else receiver.update
    return run(request, refusal or repacked)


def repacked_reason(model: torch.nn.Module) -> str:
    """Returns why the live weights do not have the loader's layout; empty if they do, as far as is known.

    Most repacking changes shapes, which the trace rejects. These kinds keep the shape and change the elements, so that
    weights written in the loader's layout would be silently wrong.
    """
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            return f"{name} was packed for AMX after loading, which an update cannot redo; start the engine without AMX"
        if getattr(module, "use_flashinfer_trtllm_moe", False):  # of experts, however they are quantized
            return (
                f"{name} was reordered for flashinfer-trtllm after loading, which an update cannot redo; "
                "start the engine with another moe_runner_backend, triton for example"
            )
        # On Blackwell. No checkpoint has scales in 32-bit integers: each is four exponents (UE8M0).
        if any("scale" in n and p.dtype == torch.int32 for n, p in module.named_parameters(recurse=False)):
            return (
                f"{name} was requantized for DeepGEMM after loading (its scales are UE8M0 now), which an update cannot "
                "redo; start the engine with SGLANG_ENABLE_JIT_DEEPGEMM=0, or with another fp8_gemm_backend and "
                "moe_runner_backend, triton for example"
            )
    return ""
