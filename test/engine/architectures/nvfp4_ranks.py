"""Updates engine ranks in NVFP4 in bfloat16, and answers with a line of JSON for each.

Run as a script by test_quantized_ranks.py: SGLang chooses its code paths at import. The trainer sends the scale of a
whole weight and that of its activations. The reference is a rank that stock SGLang starts on the same weights,
quantized as ModelOpt does. SGLang builds such layers for Blackwell GPUs, see `support.blackwell`.

    nvfp4_ranks.py FOLDER [BACKEND...]
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import torch

from examination import Weights, begin, remember_modules
from quantized_ranks import Backends, Engines, answer_for_ranks, randomized, set_quantization
from support import nvfp4
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS

ENGINES: Engines = {
    "Qwen3ForCausalLM": ((1, 1), (2, 1)),
    "Qwen3MoeForCausalLM": ((1, 1), (2, 1), (2, 2)),
}
BACKENDS: Backends = {
    "flashinfer_cutlass": {"moe_runner_backend": "flashinfer_cutlass"},
    "flashinfer_trtllm": {
        "moe_runner_backend": "flashinfer_trtllm", "fp4_gemm_runner_backend": "flashinfer_trtllm",
    },
}  # fmt: skip
_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")
_FUSED = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")


def main() -> None:
    root = Path(sys.argv[1])
    begin(2)
    remember_modules()
    dispatch_in_nvfp4()
    tiny_checkpoints.TINY = dataclasses.replace(IN_BLOCKS, wide=256, narrow=128)
    for architecture in ENGINES:
        write(architecture, root / architecture)

    def sent(architecture: str, seed: int) -> Weights:
        weights = randomized(read_weights(root / architecture), seed)
        return weights | scales(weights, seed)

    backends = {name: BACKENDS[name] for name in sys.argv[2:] or BACKENDS}
    answer_for_ranks(root, ENGINES, backends, sent, lambda _, weights: quantized(weights))


def dispatch_in_nvfp4() -> None:
    """As with FlashInfer's all-to-all: the dispatcher of experts has the scale of activations, too."""
    from sglang.srt.layers.quantization import modelopt_quant

    os.environ["SGLANG_MOE_NVFP4_DISPATCH"] = "1"  # 0.5.12 has read it
    vars(modelopt_quant)["MOE_NVFP4_DISPATCH"] = True


def write(architecture: str, folder: Path) -> None:
    write_checkpoint(architecture, folder)
    groups = {"group_0": {"weights": {"group_size": nvfp4.GROUP}}}
    config = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "config_groups": groups, "ignore": ["lm_head"]}
    set_quantization(folder, config)


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


def quantized(weights: Weights) -> Weights:
    found = dict(weights)
    for name in filter(_LINEAR.search, weights):
        found[name], found[f"{name}_scale"] = nvfp4.quantized(weights[name], weights[f"{name}_scale_2"])
    return found


if __name__ == "__main__":
    main()
