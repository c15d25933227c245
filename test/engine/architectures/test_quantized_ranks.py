"""Engine ranks in MXFP8 and NVFP4, updated in bfloat16, equal ranks that stock SGLang starts on a quantized checkpoint.

The quantizer is SGLang's own for MXFP8, and ModelOpt's for NVFP4, for which a trainer sends the scale of a whole weight
and that of its activations. SGLang builds such layers for Blackwell GPUs, see `support.blackwell`; each backend keeps
the scales of experts in its own order.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from examination import Weights, built, said, specs_of, started_on
from rank_jobs import run_jobs
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.tracer import trace
from support import blackwell, nvfp4, sglangs
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint, write_weights
from support.checkpoints.tiny_configs import IN_BLOCKS
from support.sweep import SWEEP, sweep
from test_quantization import CASES, MODELS, leave_dummy_weights
from tools.oracle.replay import replay

pytestmark = [pytest.mark.engine]
SEEDS = (0, 1, 2)  # of a start, and of an update each
# Architectures with TP and EP of their engines, and options of SGLang.
SIZES = ((1, 1), (2, 1))
ENGINES = {
    "mxfp8": {
        "Qwen3ForCausalLM": SIZES,
        "Qwen2ForCausalLM": SIZES,
        "Glm4ForCausalLM": SIZES,
        "Qwen3MoeForCausalLM": (*SIZES, (2, 2)),
    },
    "nvfp4": {"Qwen3ForCausalLM": SIZES, "Qwen3MoeForCausalLM": (*SIZES, (2, 2))},
}
BACKENDS = {
    "mxfp8": {
        "triton": {"moe_runner_backend": "triton", "fp8_gemm_runner_backend": "triton"},
        "flashinfer_trtllm": {
            "moe_runner_backend": "flashinfer_trtllm", "fp8_gemm_runner_backend": "flashinfer_trtllm",
        },
    },
    "nvfp4": {
        "flashinfer_cutlass": {"moe_runner_backend": "flashinfer_cutlass"},
        "flashinfer_trtllm": {
            "moe_runner_backend": "flashinfer_trtllm", "fp4_gemm_runner_backend": "flashinfer_trtllm",
        },
    },
}  # fmt: skip
_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")
_FUSED = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
_SCALE = "_scale_inv"


# -- checkpoints


def write_mxfp8(root: Path) -> None:
    """Where a checkpoint in block-fp8 has a scale for a block, one in MXFP8 has a byte for 32 columns."""
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)  # for two ranks
    for architecture in ENGINES["mxfp8"]:
        folder = root / architecture
        write_checkpoint(architecture, folder, fp8=True)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        kept = {"modules_to_not_convert": config["modules_to_not_convert"]}
        set_quantization(folder, {"quant_method": "mxfp8", "activation_scheme": "dynamic"} | kept)
    write_starts(root, "mxfp8")


def write_nvfp4(root: Path) -> None:
    dispatch_in_nvfp4()
    tiny_checkpoints.TINY = dataclasses.replace(IN_BLOCKS, wide=256, narrow=128)
    for architecture in ENGINES["nvfp4"]:
        write_checkpoint(architecture, root / architecture)
        groups = {"group_0": {"weights": {"group_size": nvfp4.GROUP}}}
        config = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "config_groups": groups, "ignore": ["lm_head"]}
        set_quantization(root / architecture, config)
    write_starts(root, "nvfp4")


def write_starts(root: Path, quantization: str) -> None:
    for architecture in ENGINES[quantization]:
        for seed in SEEDS:
            folder = start_of(root, architecture, seed)
            folder.mkdir()
            (folder / "config.json").write_bytes((root / architecture / "config.json").read_bytes())
            weights = sent(root, quantization, architecture, seed)
            write_weights(
                in_nvfp4(weights) if quantization == "nvfp4" else in_mxfp8(weights, root / architecture), folder
            )


def start_of(root: Path, architecture: str, seed: int) -> Path:
    return root / f"{architecture}-{seed}"


def sent(root: Path, quantization: str, architecture: str, seed: int) -> Weights:
    """Returns an update's weights."""
    stored, generator = read_weights(root / architecture), torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
        for name, tensor in stored.items()
        if not name.endswith(_SCALE)
    }
    return weights | scales(weights, seed) if quantization == "nvfp4" else weights


def set_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a quantization_config into the config of a checkpoint."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def dispatch_in_nvfp4() -> None:
    """As with FlashInfer's all-to-all: the dispatcher of experts has the scale of activations, too."""
    from sglang.srt.layers.quantization import modelopt_quant

    os.environ["SGLANG_MOE_NVFP4_DISPATCH"] = "1"  # 0.5.12 has read it
    vars(modelopt_quant)["MOE_NVFP4_DISPATCH"] = True


def scales(weights: Weights, seed: int) -> Weights:
    """Returns the scales that a trainer sends: of fused layers they are one, and that of activations is as it was."""
    fused: dict[str, list[str]] = {}
    for name in filter(_LINEAR.search, weights):
        fused.setdefault(_FUSED.sub(lambda found: f".{found[1] in ('gate_proj', 'up_proj')}.", name), []).append(name)
    found: Weights = {}
    for n, names in enumerate(fused.values()):
        whole = nvfp4.whole_scale(*(weights[name] for name in names))
        for name in names:
            found[f"{name}_scale_2"] = whole.clone()
            found[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.01 * (seed + 1) + 0.001 * n)
    return found


def in_nvfp4(weights: Weights) -> Weights:
    found = dict(weights)
    for name in filter(_LINEAR.search, weights):
        found[name], found[f"{name}_scale"] = nvfp4.quantized(weights[name], weights[f"{name}_scale_2"])
    return found


def in_mxfp8(weights: Weights, checkpoint: Path) -> Weights:
    from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

    found = dict(weights)
    names = {name for name, tensor in read_weights(checkpoint).items() if tensor.dtype == torch.float8_e4m3fn}
    assert names, f"nothing of {checkpoint.name} is quantized"
    for name in names:
        found[name], found[f"{name}{_SCALE}"] = downcast_to_mxfp_torch(weights[name], torch.float8_e4m3fn, axis=1)
    return found


# -- engine ranks


def updated(root: Path, quantization: str, architecture: str, backend: str, tp: int, ep: int, rank: int) -> list[str]:
    """What is wrong."""
    blackwell.pretend()
    build = {"tp_size": tp, "ep_size": ep, "tp_rank": rank, **BACKENDS[quantization][backend]}
    first, *later = SEEDS
    complaints = []
    try:
        build["weights"] = str(start_of(root, architecture, first))
        model = built(str(root / architecture), True, build)
        for seed in later:
            weights = sent(root, quantization, architecture, seed)
            replay(trace(model, specs_of(weights)), weights)
            found, stock = digests(model), digests(started_on(start_of(root, architecture, seed)))
            complaints += [f"seed {seed}: {name} differs" for name in stock if found.get(name) != stock[name]][:3]
            complaints += [f"seed {seed}: {path}'s dispatcher has another scale" for path in misled(model)]
    except Exception as error:
        complaints.append(said(error, str(root)))
    return complaints


def misled(model: torch.nn.Module) -> list[str]:
    """Returns the paths of experts in NVFP4 that quantize what they dispatch with another scale than the live one."""
    return [
        path
        for path, module in model.named_modules()
        if (scale := getattr(module, "w13_input_scale_quant", None)) is not None
        and module.dispatcher.quant_config["input_global_scale"] is not scale
    ]


@pytest.mark.parametrize("end", ["pinned", sweep("newest")])
@pytest.mark.parametrize("quantization", ENGINES)
def test_every_rank_has_what_the_quantizer_and_a_start_leave(quantization: str, end: str, tmp_path: Path) -> None:
    """All ranks under `make test-all`, and else the last one of each engine that is sharded."""
    backends = BACKENDS[quantization] if end == "pinned" else ["flashinfer_trtllm"]
    jobs = [
        (quantization, name, backend, tp, ep, rank)
        for name, sizes in ENGINES[quantization].items()
        for backend in backends
        for tp, ep in (sizes if SWEEP else sizes[1:])
        for rank in (range(tp) if SWEEP else [tp - 1])
    ]
    write = write_nvfp4 if quantization == "nvfp4" else write_mxfp8
    with sglangs.chosen(end):
        assert [of for of in run_jobs(updated, jobs, tmp_path, before=write) if of[-1]] == []


# -- without scales


def refused(root: Path, method: str, kind: str, tp: int) -> tuple[str, bool]:
    """Returns the error, empty if there is none, and whether all live tensors are as they were."""
    tiny_checkpoints.TINY = IN_BLOCKS
    folder = root / f"{method}-{kind}-{tp}".replace(" ", "")
    write_checkpoint(MODELS[kind], folder)
    set_quantization(folder, CASES[method].config)
    blackwell.pretend()
    leave_dummy_weights()
    model = built(str(folder), True, {"tp_size": tp, "tp_rank": tp - 1})
    before, error = digests(model), ""
    try:
        trace(model, specs_of(read_weights(folder)))
    except ReshardError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, digests(model) == before


def test_weights_without_scales_are_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    advice = {"modelopt_fp4": "_scale_2 with it", "compressed-tensors, nvfp4": "Send it quantized"}
    jobs = [(method, kind, tp) for method in advice for kind in MODELS for tp in (1, 2)]
    for method, kind, _, (error, unchanged) in run_jobs(refused, jobs, tmp_path):
        assert unchanged
        start = "Unsupported: model.layers.0.mlp." + ("experts.0." if kind == "experts" else "")
        assert error.startswith(start), error
        assert "_proj.weight is bfloat16, and the engine keeps this weight in NVFP4 (" in error
        assert advice[method] in error
