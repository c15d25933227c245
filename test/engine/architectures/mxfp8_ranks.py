"""Updates engine ranks in MXFP8 in bfloat16, and answers with a line of JSON for each.

Run as a script by test_quantized_ranks.py: SGLang chooses its code paths at import. The reference is a rank that stock
SGLang starts on the checkpoint that its quantizer makes of the same weights. Experts need a Blackwell GPU, see
`support.blackwell`; each backend keeps their scales in its own order.

    mxfp8_ranks.py FOLDER [BACKEND...]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

from examination import Weights, begin, remember_modules
from quantized_ranks import Backends, Engines, answer_for_ranks, randomized, set_quantization
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS

ENGINES: Engines = {
    "Qwen3ForCausalLM": ((1, 1), (2, 1)),
    "Qwen2ForCausalLM": ((1, 1), (2, 1)),
    "Glm4ForCausalLM": ((1, 1), (2, 1)),
    "Qwen3MoeForCausalLM": ((1, 1), (2, 1), (2, 2)),
}
BACKENDS: Backends = {
    "triton": {"moe_runner_backend": "triton", "fp8_gemm_runner_backend": "triton"},
    "flashinfer_trtllm": {
        "moe_runner_backend": "flashinfer_trtllm", "fp8_gemm_runner_backend": "flashinfer_trtllm",
    },
}  # fmt: skip
SCALE = "_scale_inv"


def main() -> None:
    root = Path(sys.argv[1])
    begin(2)
    remember_modules()
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)  # for two ranks
    in_fp8 = {architecture: write(architecture, root / architecture) for architecture in ENGINES}

    def sent(architecture: str, seed: int) -> Weights:
        stored = read_weights(root / architecture)
        return randomized({name: tensor for name, tensor in stored.items() if not name.endswith(SCALE)}, seed)

    def stored(architecture: str, weights: Weights) -> Weights:
        return quantized(weights, in_fp8[architecture])

    backends = {name: BACKENDS[name] for name in sys.argv[2:] or BACKENDS}
    answer_for_ranks(root, ENGINES, backends, sent, stored)


def write(architecture: str, folder: Path) -> set[str]:
    """Writes a checkpoint in MXFP8: where one in block-fp8 has a scale for a block, it has a byte for 32 columns.

    Returns the names of the quantized weights.
    """
    write_checkpoint(architecture, folder, fp8=True)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kept = {"modules_to_not_convert": config["modules_to_not_convert"]}
    set_quantization(folder, {"quant_method": "mxfp8", "activation_scheme": "dynamic"} | kept)
    names = {name for name, tensor in read_weights(folder).items() if tensor.dtype == torch.float8_e4m3fn}
    assert names, f"nothing of {architecture} is quantized"
    return names


def quantized(weights: Weights, names: set[str]) -> Weights:
    found = dict(weights)
    for name in names:
        found[name], found[f"{name}{SCALE}"] = downcast_to_mxfp_torch(weights[name], torch.float8_e4m3fn, axis=1)
    return found


if __name__ == "__main__":
    main()
