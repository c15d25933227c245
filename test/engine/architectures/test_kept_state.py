"""What layers keep of their weights is made anew by an update: routers, and layers that run on GPUs only.

Of these it is SGLang's code, with stand-ins for the kernels.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examination import specs_of
from rank_jobs import run_jobs
from sglang_reshard.cli.plan.sglang_model import build_rank
from sglang_reshard.derived import DerivedState, remember_loaded
from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.selftest.digests import digest
from sglang_reshard.trace.folded import flags_of
from sglang_reshard.trace.tracer import trace
from support import sglangs
from support.checkpoints import read_weights, write_checkpoint
from tools.oracle.replay import replay

pytestmark = [pytest.mark.engine]
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
ROUTERS = {
    "Gemma4ForCausalLM": ("Gemma4Router", "_fused_scale", _EXPERTS),
}


def router(root: Path, architecture: str, kind: str) -> dict[str, Any]:
    """Returns what a router says with checkpoint B's weights, what it said before, and whether a tensor stayed.

    kind  "fresh" starts on checkpoint B, the others on A; "in place" as where CUDA graphs hold addresses
    """
    gate, attribute, instead = ROUTERS[architecture]
    a, b = (
        str(write_checkpoint(architecture, root / architecture / kind / str(s), instead=instead, seed=s))
        for s in (1, 2)
    )
    start = b if kind == "fresh" else a
    model = build_rank(start, tp_size=1, tp_rank=0)
    with torch.no_grad():
        model.load_weights(iter(read_weights(start).items()))  # type: ignore[operator]
    made = next(m for m in model.modules() if type(m).__name__ == gate)
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    if kind == "fresh":
        return {"says": digest(made(x))}
    derived = DerivedState(model, addresses_stay=kind == "in place")
    before = digest(made(x))
    kept = getattr(made, attribute)
    derived.signature()
    weights = read_weights(b)
    replay(trace(model, specs_of(weights)), weights, derived)
    says = digest(made(x))
    return {"says": says, "before": before, "stayed": getattr(made, attribute) is kept, "remark": derived.remark}


def compressor_flags(_: Path) -> list[str]:
    """Returns the flags of DeepSeek-V4's compressor that are put back before its loader's work in place."""
    from sglang.srt.layers.attention.dsv4.compressor import Compressor

    made: Any = object.__new__(Compressor)  # its constructor wants a GPU
    torch.nn.Module.__init__(made)
    made.ape, made.ape_converted = torch.nn.Parameter(torch.zeros(2, 8)), False
    return [flag.label for flag in flags_of(made)]


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


def outcomes(_: Path, layer: str) -> list[str]:
    """Without CUDA graphs, and with them; nothing of a layer that this SGLang does not have."""
    kind = {"cutedsl_experts": cutedsl_experts, "hyper_connection": hyper_connection}[layer]()
    with torch.no_grad():
        return [] if kind is None else [outcome(kind, stays) for stays in (False, True)]


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


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    jobs = [(name, kind) for name in ROUTERS for kind in ("fresh", "dropped", "in place")]
    found = run_jobs(router, jobs, tmp_path_factory.mktemp("routers"), ranks=1, gpu=False)
    return {(architecture, kind): case for architecture, kind, case in found}


@pytest.mark.parametrize("architecture", ROUTERS)
@pytest.mark.parametrize("kind", ["dropped", "in place"])
def test_a_router_says_what_that_of_a_fresh_model_says(routed, architecture, kind):
    """What the first forward pass keeps is dropped; where CUDA graphs may hold its address, it is computed in place."""
    case = routed[architecture, kind]
    assert case["says"] == routed[architecture, "fresh"]["says"]
    assert case["says"] != case["before"]
    assert case["stayed"] == (kind == "in place")
    assert case["remark"] == ""


@pytest.mark.parametrize("end", sglangs.ENDS)
def test_what_kernels_of_gpus_keep_is_right_or_refused(end, tmp_path):
    with sglangs.chosen(end):
        found = run_jobs(outcomes, [("cutedsl_experts",), ("hyper_connection",)], tmp_path, ranks=1)
    said = {name: outcomes for name, outcomes in found if outcomes}
    assert said.keys() == {"cutedsl_experts", *(["hyper_connection"] if end == "newest" else [])}
    for without_graphs, with_graphs in said.values():
        assert without_graphs == "right"
        assert with_graphs.startswith("refused: the first forward pass computed ")


def test_what_loading_does_to_a_weight_once_is_known_by_its_flag(tmp_path):
    assert run_jobs(compressor_flags, [()], tmp_path, ranks=1, gpu=False) == [[["ape_converted"]]]
