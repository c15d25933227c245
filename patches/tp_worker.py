"""sglang.srt.managers.tp_worker: forwards an update from the scheduler to the model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
    Step,
)

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import BaseTpWorker

    from sglang_reshard.patches.draft_models import Drafts


def apply() -> None:
    from sglang.srt.managers.tp_worker import BaseTpWorker

    BaseTpWorker.update_weights_distributed = update_weights_distributed
    BaseTpWorker.share_weights = share_weights


def update_weights_distributed(
    self: BaseTpWorker, request: DistributedUpdateWeightsReq, step: Step, refusal: str, drafts: Drafts
) -> DistributedUpdateWeightsOutput:
    return self.model_runner.update_weights_distributed(request, step, refusal, drafts)


def share_weights(self: BaseTpWorker, request: ShareWeightsReq) -> DistributedUpdateWeightsOutput:
    return self.model_runner.share_weights(request)
