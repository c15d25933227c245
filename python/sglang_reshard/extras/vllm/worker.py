"""A worker extension for vLLM: receives updates on an engine rank.

    llm = vllm.LLM(path, worker_extension_cls="sglang_reshard.extras.vllm.worker.ReshardWorker")

vLLM makes this class a base of its worker class, so `self` is the worker. While a call of `collective_rpc` runs, the
engine runs no model step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.names import matches_any
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, decode, encode
from sglang_reshard.trace.program import MayStay, Program

# Buffers of vLLM's attention layers. Its loaders take them by name, and unquantized checkpoints do not have them.
_SCALES = ("*._q_scale", "*._k_scale", "*._v_scale", "*._prob_scale")
# By the name of the class: a subclass may change weights that the class leaves alone.
_LEAVE_WEIGHTS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod")
_EXPERTS, _LEAVE_EXPERTS = "UnquantizedFusedMoEMethod", ("TRITON", "BATCHED_TRITON")
_DERIVED_BY_MLA = ("W_UV", "W_UK_T", "W_K", "W_V")


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
            self.reshard_refusal = refusal(model)
            if self.parallel_config.data_parallel_size > 1:
                self.reshard_refusal = (
                    "data parallel vLLM engines are not supported: their replicas have the same ranks. Start one "
                    "engine for each replica"
                )
            # vLLM has run the model already, to measure memory. What those passes have kept counts as loaded.
            target = VLLMModel(model, addresses_stay=self.device.type != "cpu")
            size = self.parallel_config.world_size
            self.reshard_receiver = WeightReceiver(target, self.rank, size, self.device)
        given = decode(request, DistributedUpdateWeightsReq)
        why = self.reshard_refusal
        if given.lora:
            why = "LoRA adapters of a vLLM engine are not updated; send the merged weights"
        runtime().synchronize([self.device])  # a step in flight still reads the old weights
        return encode(self.reshard_receiver.update(given, why))


class VLLMModel(TracedModel):
    """A model of vLLM's, whose attention scales keep their values unless the trainer sends them."""

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        program = super().program(specs, replace(may_stay, frozen=(*may_stay.frozen, *_SCALES)))
        # The report lists what the trainer allowed to stay.
        kept = tuple(name for name in program.kept if may_stay(name) or not matches_any(name, _SCALES))
        return replace(program, kept=kept)


def refusal(model: torch.nn.Module) -> str:
    """Returns why the weights of a loaded vLLM model cannot be updated in place; empty if they can.

    vLLM calls `process_weights_after_loading` of every layer's quantization method. Some methods leave the weights as
    they were loaded; others repack them, or keep a copy that the kernels read. A write to the parameters does not reach
    those.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind != _EXPERTS and kind not in _LEAVE_WEIGHTS:
            return (
                f"{name} has the quantization method {kind}, which changes weights after loading. Start vLLM without "
                "quantization"
            )
        if kind == _EXPERTS:
            backend = getattr(getattr(method, "unquantized_backend", None), "name", "of an unknown name")
            if backend not in _LEAVE_EXPERTS:
                return (
                    f"{name} has the experts backend {backend}, which repacks weights after loading. Start vLLM with "
                    "moe_backend='triton'"
                )
        # vLLM's fallback to torch is a function of nothing; all others close over a packed copy of the weight.
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return (
                f"{name} computes with a packed copy of its weight, as vLLM's linear layers do on CPUs. Load these "
                "weights with vLLM's own reload_weights"
            )
        if derived := [attribute for attribute in _DERIVED_BY_MLA if hasattr(module, attribute)]:
            return (
                f"{name} has {derived[0]}, which vLLM computes from kv_b_proj when it loads. MLA is not supported yet"
            )
    return ""
