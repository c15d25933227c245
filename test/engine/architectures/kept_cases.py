"""SGLang's layers that keep something of weights, and run on GPUs only: their code, with stand-ins for the kernels.

Run as a script by test_forwards.py, for each SGLang. Answers a line for each layer, with and without CUDA graphs.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any

import torch
from torch import nn

from examination import begin
from sglang_reshard.derived import DerivedState, remember_loaded
from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support.scripts import answer
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
_SCALES = (
    "w13_weight", "g1_alphas", "g2_alphas", "w13_weight_scale_2", "w2_weight_scale_2", "w13_input_scale_quant",
    "w2_input_scale_quant",
)  # fmt: skip


def cutedsl_experts() -> type[nn.Module]:
    """NVFP4 experts with moe_runner_backend=flashinfer_cutedsl: a first forward pass makes scales of weights."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    cutedsl: Any = importlib.import_module("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl")
    kernels: Any = types.ModuleType("flashinfer")
    kernels.CuteDslMoEWrapper = lambda **_: types.SimpleNamespace()
    kernels.ActivationType = types.SimpleNamespace(Swiglu=0, Relu2=1)
    cutedsl.cuda_graph_fully_disabled = lambda: True
    cutedsl.get_parallel = lambda: types.SimpleNamespace(num_dp_ranks=1)
    cutedsl.cutedsl_moe_max_num_tokens = lambda: 8
    cutedsl._cutedsl_wrapper_activation_type = lambda *_: 0
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    arguments.get_global_server_args = lambda: types.SimpleNamespace(
        disable_cuda_graph=True, cuda_graph_max_bs=8, chunked_prefill_size=8
    )

    class Experts(FusedMoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            for name in _SCALES:
                setattr(self, name, nn.Parameter(torch.zeros(4), requires_grad=False))
            self.quant_method = object.__new__(ModelOptNvFp4FusedMoEMethod)
            self.num_experts = self.num_local_experts = 4
            self.moe_ep_rank, self.top_k = 0, 2
            self.hidden_size = self.intermediate_size_per_partition = 8
            self.moe_runner_config = types.SimpleNamespace(params_dtype=torch.bfloat16, top_k=2, activation="silu")
            self.quant_config = types.SimpleNamespace(use_per_token_activation=False)
            self._cutedsl_wrapper = None

        def forward(self) -> torch.Tensor:
            """What `apply` does first."""
            sys.modules["flashinfer"] = kernels
            cutedsl.ensure_cutedsl_wrapper(self)
            return torch.cat([x.reshape(-1) for x in (*self._cutedsl_scales, self._cutedsl_input_scale)])

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    return Experts


def hyper_connection() -> type[nn.Module] | None:
    """Qwen4-Exp's, which keeps a padded weight; only in newer SGLang."""
    try:
        layers = importlib.import_module("sglang.srt.layers.hyperconnection")
        kernel: Any = importlib.import_module("sglang.kernels.ops.gemm.hc_mix_splitk")
    except ModuleNotFoundError:
        return None

    def mix(x: torch.Tensor, _down: Any, up: torch.Tensor, count: int, size: int) -> torch.Tensor:
        return x.unflatten(-1, (count, size)).mean(-2) + up.float().sum().to(x.dtype)

    kernel.hc_mix = mix

    class Connection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner: Any = layers.GatedResidual.__new__(layers.GatedResidual)
            nn.Module.__init__(inner)
            inner.config = types.SimpleNamespace(hc_per_branch_norm=True, hidden_size=32)
            inner.hc_count, inner.hidden_size, inner.params_dtype = 4, 32, torch.bfloat16
            inner.input_mix_weight_down = nn.Linear(128, 8, bias=False, dtype=torch.bfloat16)
            inner.input_mix_weight_up = nn.Linear(8, 128, bias=False, dtype=torch.bfloat16)
            inner._jit_mix_ok, inner._mix_up_weight_padded, inner._gate_stream = True, None, None
            inner.hc_norm = nn.Identity()
            self.inner = inner

        def forward(self) -> torch.Tensor:
            """What `mix` does on a GPU."""
            if self.inner._mix_up_weight_padded is None:
                up = kernel.permute_pad_up_weight(self.inner.input_mix_weight_up.weight, 4)
                self.inner._mix_up_weight_padded = up
            return self.inner._mix_up_weight_padded.flatten()

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    return Connection


def outcome(kind: type[nn.Module], addresses_stay: bool) -> str:
    """Updates a layer that has run, three times, and compares it with a layer that has loaded the last weights."""
    layer = kind()
    shapes = {name: (p.shape, p.dtype) for name, p in layer.named_parameters()}

    def checkpoint(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {n: (torch.rand(shape, generator=generator) + 0.1).to(dtype) for n, (shape, dtype) in shapes.items()}

    layer.load_weights(checkpoint(1).items())  # type: ignore[operator]
    remember_loaded(layer)
    derived = DerivedState(layer, addresses_stay)
    layer()
    specs = [TensorSpec(n, tuple(shape), str(dtype).removeprefix("torch.")) for n, (shape, dtype) in shapes.items()]
    try:
        for seed in (2, 1, 2):
            derived.signature()
            replay(trace(layer, specs), checkpoint(seed), derived)
            said = layer()
    except Unsupported as refused:
        return f"refused: {refused}"
    fresh = kind()
    fresh.load_weights(checkpoint(2).items())  # type: ignore[operator]
    return "right" if torch.equal(said, fresh()) else "stale"


def main() -> None:
    begin(1)
    for make in (cutedsl_experts, hyper_connection):
        if (kind := make()) is not None:
            with torch.no_grad():
                answer(json.dumps([make.__name__, *(outcome(kind, stays) for stays in (False, True))]))


if __name__ == "__main__":
    main()
