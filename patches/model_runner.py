"""sglang.srt.model_executor.model_runner: where the live parameters are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_RECEIVER = "_reshard_receiver"


def apply() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.update_weights_distributed = update_weights_distributed


def update_weights_distributed(
    self: ModelRunner, request: DistributedUpdateWeightsReq, refusal: str
) -> DistributedUpdateWeightsOutput:
    """Bring this engine rank's parameters to the trainer's; `refusal` is why this rank must not."""
    from sglang.srt.distributed import get_tp_group

    from sglang_reshard.control import Control
    from sglang_reshard.receiver import WeightReceiver

    receiver: WeightReceiver | None = getattr(self, _RECEIVER, None)
    device = next(self.model.parameters()).device
    if receiver is None:
        tp = get_tp_group()
        control = Control(tp.cpu_group, tp.rank_in_group, tp.world_size)
        receiver = WeightReceiver(self.model, control, device)
        setattr(self, _RECEIVER, receiver)
    if device.type == "cuda":
        self.forward_stream.synchronize()  # a forward pass in flight still reads the old weights
    return receiver.update(request, refusal)
