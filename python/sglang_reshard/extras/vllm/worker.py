"""A worker extension for vLLM: receives updates on an engine rank.

    llm = vllm.LLM(path, worker_extension_cls="sglang_reshard.extras.vllm.worker.ReshardWorker")

vLLM makes this class a base of its worker class, so `self` is the worker. While a call of `collective_rpc` runs, the
engine runs no model step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.extras.vllm.in_place import refusal
from sglang_reshard.extras.vllm.target import VLLMModel
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, decode, encode

if TYPE_CHECKING:
    import torch


class ReshardWorker:
    """A worker extension. vLLM refuses names that its worker has already, so all names begin with `reshard_`."""

    if TYPE_CHECKING:  # of vLLM's worker
        rank: int
        device: torch.device
        parallel_config: Any

        def get_model(self) -> torch.nn.Module: ...

    reshard_receiver: WeightReceiver | None = None
    reshard_refusal = ""

    def reshard_update(self, request: bytes) -> bytes:
        """Updates this worker's weights. Collective over all workers; returns an encoded output and does not raise."""
        if self.reshard_receiver is None:
            model = self.get_model()
            self.reshard_refusal = _unsupported(self.parallel_config) or refusal(model)
            # vLLM has run the model already, to measure memory. What those passes have kept counts as loaded.
            target = VLLMModel(model, addresses_stay=self.device.type != "cpu")
            size = self.parallel_config.world_size
            self.reshard_receiver = WeightReceiver(target, self.rank, size, self.device)
        given = decode(request, DistributedUpdateWeightsReq)
        why = self.reshard_refusal
        if given.lora is not None:
            why = "LoRA adapters of a vLLM engine are not updated; send the merged weights"
        runtime().synchronize([self.device])  # a step in flight still reads the old weights
        return encode(self.reshard_receiver.update(given, why))


def _unsupported(parallel: Any) -> str:
    if parallel.data_parallel_size > 1:
        return (
            "data parallel vLLM engines are not supported: their replicas have the same ranks. Start one engine for "
            "each replica"
        )
    return ""
