"""Engines of SGLang's quantization methods: updated bit for bit, or refused by name; none is wrong in silence.

`make test-all` writes benchmark/results/quantization.json and docs/results/quantization.md; `make test` compares a few.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark import pages, results
from examination import Weights, built, said, specs_of, started_on
from rank_jobs import run_jobs
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches import repacking
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.tracer import trace
from support import blackwell, sglangs
from support.checkpoints import tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS
from tools.oracle.replay import replay

MODELS = {"dense": "Qwen3ForCausalLM", "experts": "Qwen3MoeForCausalLM"}
_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class Case:
    """A quantization_config, or none if the engine quantizes a checkpoint in 16 bits by itself.

    method   of SGLang's registry, as `quantization=` names it; empty if the config does
    half     in float16, which some methods insist on
    options  of SGLang
    amx      on a CPU with AMX, whose packing kernel has a stand-in
    blackwell  SGLang builds it on Blackwell GPUs only, see `support.blackwell`
    """

    config: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    half: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    amx: bool = False
    blackwell: bool = False


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Case:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    if inputs is not None:
        group["input_activations"] = {"symmetric": True, "dynamic": True, "strategy": "token", **inputs}
    config = {"format": format, "ignore": ["lm_head"], "config_groups": {"group_0": group}}
    return Case({"quant_method": "compressed-tensors", **config}, half=inputs is None)


_INT4 = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
_NVFP4 = {
    "quant_method": "modelopt_fp4",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": {"group_size": 16}}},
    "ignore": [],
}
_TRTLLM = {"moe_runner_backend": "flashinfer_trtllm"}
CASES = {
    "none, AMX": Case(amx=True),
    "none, flashinfer-trtllm": Case(options=_TRTLLM),
    "fp8, block, flashinfer-trtllm": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, options=_TRTLLM
    ),
    "fp8, block": Case({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "fp8, static": Case({"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, dynamic": Case({"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8, of 16 bits": Case(method="fp8"),
    "mxfp8": Case(_MXFP8, blackwell=True),
    "mxfp8, flashinfer-cutlass": Case(
        _MXFP8, options={"fp8_gemm_runner_backend": "flashinfer_cutlass"}, blackwell=True
    ),
    "mxfp8, flashinfer-trtllm": Case(
        _MXFP8, options={"fp8_gemm_runner_backend": "flashinfer_trtllm", **_TRTLLM}, blackwell=True
    ),
    "blockwise_int8": Case(
        {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    ),
    "w8a8_int8": Case({"quant_method": "w8a8_int8"}),
    "w8a8_int8, of 16 bits": Case(method="w8a8_int8"),
    "w8a8_fp8": Case({"quant_method": "w8a8_fp8"}),
    "w8a8_fp8, of 16 bits": Case(method="w8a8_fp8"),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "awq", half=True),
    "awq_marlin": Case({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, half=True),
    "gptq": Case({"quant_method": "gptq", **_INT4}, "gptq", half=True),
    "gptq, desc_act": Case({"quant_method": "gptq", **_INT4, "desc_act": True}, "gptq", half=True),
    "gptq_marlin": Case({"quant_method": "gptq", **_INT4}, half=True),
    "moe_wna16": Case({"quant_method": "gptq", **_INT4}, "moe_wna16", half=True),
    "auto-round": Case({"quant_method": "auto-round", **_INT4}, half=True),
    "modelopt_fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt_fp4": Case(_NVFP4, blackwell=True),
    "modelopt_fp4, flashinfer-cutlass": Case(
        _NVFP4, options={"moe_runner_backend": "flashinfer_cutlass"}, blackwell=True
    ),
    "modelopt_fp4, flashinfer-trtllm": Case(
        _NVFP4, options={"fp4_gemm_runner_backend": "flashinfer_trtllm", **_TRTLLM}, blackwell=True
    ),
    "qoq": Case({"quant_method": "qoq", "wbits": 4, "group_size": -1}, half=True),
    "w4afp8": Case({"quant_method": "w4afp8", "weight_block_size": [128, 128]}),
    "fbgemm_fp8": Case({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [], "activation_scale_ub": 1200.0}),
    "compressed-tensors, int8": _compressed(
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}
    ),
    "compressed-tensors, fp8": _compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, {"num_bits": 8, "type": "float"}
    ),
    "compressed-tensors, nvfp4": replace(
        _compressed("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}), blackwell=True
    ),
    "compressed-tensors, nvfp4, flashinfer-trtllm": replace(
        _compressed("nvfp4-pack-quantized", _FP4, _FP4 | {"dynamic": "local"}), options=_TRTLLM, blackwell=True
    ),
    "compressed-tensors, int4": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, None
    ),
    "quark, fp8": Case(
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
            "global_quant_config": {"weight": _FP8, "input_tensors": _FP8},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head"],
        }
    ),
}


def examined(root: Path, case: str, model: str) -> tuple[str, str]:
    folder = root / f"{case}-{model}".replace(" ", "")
    _stand_in_for_kernels()
    try:
        return _examined(CASES[case], MODELS[model], folder)
    except Exception as error:
        return "failed", said(error, str(folder))


def _stand_in_for_kernels() -> None:
    """Of the kernels that post-processing calls, those of few lines: without them fewer methods could be started."""
    from sglang.srt.layers.quantization import fp8_kernel, gptq, marlin_utils
    from sglang.srt.layers.quantization.quark import quark

    def quantize(weight: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor, is_static: bool) -> None:
        if not is_static:
            scale.fill_(float(weight.abs().max()) / 448)
        quantized.copy_((weight.float() / scale.float()).clamp(-448, 448))

    vars(gptq)["gptq_shuffle"] = lambda weight, *_: weight.bitwise_not_()  # in place, whatever it is
    vars(fp8_kernel)["sgl_per_tensor_quant_fp8"] = quantize
    for module in (marlin_utils, quark):
        if "get_device_capability" in vars(module):
            vars(module)["get_device_capability"] = lambda *_: (9, 0)


def leave_dummy_weights() -> None:
    """SGLang's random weights cannot be written to an expanded tensor; here all are overwritten."""
    from sglang.srt.model_loader import loader

    vars(loader)["initialize_dummy_weights"] = lambda *_, **__: None


def _stand_in_for_amx() -> None:
    from sglang.srt.layers import amx_utils
    from sglang.srt.layers.quantization import unquant

    vars(amx_utils)["cpu_has_amx_support"] = lambda: True
    vars(unquant).update(_is_cpu=True, _is_cpu_amx_available=True)
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("convert_weight_packed(Tensor weight) -> Tensor")
    library.impl("convert_weight_packed", lambda weight: weight.flip(-1, -2).contiguous(), "CPU")
    vars(torch)["_amx_library"] = library  # which ends with its object


def _examined(case: Case, architecture: str, folder: Path) -> tuple[str, str]:
    """What becomes of an update, and why."""
    tiny_checkpoints.TINY = IN_BLOCKS  # whose sizes suit all methods
    write_checkpoint(architecture, folder)
    weights = tiny_checkpoints.read_weights(folder)
    options: dict[str, Any] = case.options | ({"quantization": case.method} if case.method else {})
    if case.blackwell:
        blackwell.pretend()
        leave_dummy_weights()
    if case.amx:
        _stand_in_for_amx()
    config = json.loads((folder / "config.json").read_text())
    if case.half:
        weights = {name: tensor.half() for name, tensor in weights.items()}
        config["dtype"] = options["dtype"] = "float16"
    if case.config:
        config["quantization_config"] = case.config
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = built(str(folder), gpu=True, build={"tp_size": 1, "tp_rank": 0, **options})
    except (Exception, SystemExit) as error:
        return "not built", said(error, str(folder))
    given = _checkpoint(weights, model) if case.config else weights
    if why := repacking.refusal(model):
        return "refused", why
    try:
        replay(trace(model, specs_of(given)), given)
        refusal = ""
    except ReshardError as error:
        refusal = str(error)
    found = digests(model)
    tiny_checkpoints.write_weights(given, folder)
    try:
        stock = digests(started_on(folder))
    except Exception as error:
        return "not built", said(error, str(folder))
    if refusal:
        return "refused", refusal
    wrong = [name for name, digest in stock.items() if found.get(name) != digest]
    if wrong:
        return "failed", f"{len(wrong)} live tensors differ, in silence: {', '.join(wrong[:4])}"
    return "exact", ""


def _checkpoint(weights: Weights, model: torch.nn.Module) -> Weights:
    """Random weights, those of linear layers as the engine's quantization method has them in a checkpoint."""
    from sglang.srt.layers.linear import ReplicatedLinear

    generator = torch.Generator().manual_seed(2)
    found: Weights = {}
    for name, weight in weights.items():
        if _LINEAR.search(name) is None:
            found[name] = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), weight.shape
        linear = ReplicatedLinear(
            columns, rows, bias=False, quant_config=model.quant_config, params_dtype=weight.dtype, prefix=module
        )
        for own, parameter in linear.named_parameters():
            found[f"{module}.{own}"] = _random(own, parameter, generator)
    return found


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if name == "g_idx":
        return torch.arange(like.numel(), dtype=like.dtype) // 64
    if not like.is_floating_point():
        high = torch.iinfo(like.dtype).max
        return torch.randint(0, high, like.shape, generator=generator, dtype=torch.int64).to(like.dtype)
    if "scale" in name:
        return (torch.rand(like.shape, generator=generator) + 0.1).to(like.dtype)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


SAVED = results.FOLDER / "quantization.json"
PAGE = Path(__file__).parents[3] / "docs" / "results" / "quantization.md"
REGISTRY = "from sglang.srt.layers.quantization import QUANTIZATION_METHODS as m; print('methods:', *m)"
FEW = (
    "fp8, block", "fp8, of 16 bits", "gptq", "none, AMX", "none, flashinfer-trtllm", "w8a8_int8, of 16 bits", "mxfp8",
    "modelopt_fp4", "compressed-tensors, nvfp4, flashinfer-trtllm",
)  # fmt: skip
pytestmark = [pytest.mark.engine]


def test_each_is_exact_or_refused(tmp_path: Path) -> None:
    sweep = "SGLANG_RESHARD_SWEEP" in os.environ
    cases = () if sweep else FEW
    jobs = [(name, kind) for name in cases or CASES for kind in MODELS]
    answers = run_jobs(examined, jobs, tmp_path, ranks=1, deadline_s=1400)
    found = [{"case": case, "model": model, "outcome": of[0], "why": of[1]} for case, model, of in answers]
    found.sort(key=lambda row: (row["case"], row["model"]))
    if sweep:
        results.save(SAVED, results.header("make test-all", []), found)
        pages.write("quantization")
    assert [row for row in found if row["outcome"] == "failed"] == []
    saved = [{**row, "why": ""} for row in results.load(SAVED)[1] if not cases or row["case"] in cases]
    assert [{**row, "why": ""} for row in found] == saved


@pytest.mark.parametrize("end", sglangs.ENDS)
def test_every_method_of_the_registry_is_on_the_page(end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", REGISTRY], env=sglangs.environment(end), capture_output=True, text=True, timeout=200
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("methods:")]
    assert set(line.split()[1:]) - set(re.findall(r"`([\w-]+)`", PAGE.read_text())) == set()
