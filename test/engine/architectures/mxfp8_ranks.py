"""Updates engine ranks in MXFP8 in bfloat16, and answers with a line of JSON for each.

Run as a script by test_mxfp8_ranks.py: SGLang chooses its code paths at import. The reference is a rank that stock
SGLang starts on the checkpoint that its quantizer makes of the same weights. Experts need a Blackwell GPU, see
`support.blackwell`; each backend keeps their scales in its own order.

    mxfp8_ranks.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

from examination import built, remember_modules, said, started_on
from oracle.digests import digests
from oracle.replay import replay
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support import blackwell
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint, write_weights
from support.checkpoints.tiny_configs import IN_BLOCKS
from support.scripts import answer

DENSE = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "Glm4ForCausalLM")
ENGINES = {name: ((1, 1), (2, 1)) for name in DENSE} | {"Qwen3MoeForCausalLM": ((1, 1), (2, 1), (2, 2))}  # TP and EP
TRTLLM = {"moe_runner_backend": "flashinfer_trtllm", "fp8_gemm_runner_backend": "flashinfer_trtllm"}
BACKENDS: dict[str, dict[str, str]] = {"triton": {"moe_runner_backend": "triton"}, "flashinfer_trtllm": TRTLLM}
DEADLINE_S = 400
SCALE = "_scale_inv"


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(2, gpu=True)
    torch.set_num_threads(1)
    import_before_forks()
    remember_modules()
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)  # for two ranks
    for architecture in ENGINES:
        write(architecture, root / architecture)

    def work(job: tuple[str, str, int, int, int]) -> list[str]:
        architecture, backend, tp, ep, rank = job
        blackwell.pretend()
        build = {"tp_size": tp, "ep_size": ep, "tp_rank": rank, **BACKENDS[backend]}
        try:
            return updates(root / architecture, root / "-".join(map(str, job)), build)
        except Exception as error:
            return [said(error, str(root))]

    jobs = [
        (name, backend, tp, ep, rank)
        for name, engines in ENGINES.items()
        for backend in BACKENDS
        for tp, ep in engines
        for rank in range(tp)
    ]
    for job, complaints in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, complaints]))


def write(architecture: str, folder: Path) -> None:
    """Writes a checkpoint in MXFP8: where one in block-fp8 has a scale for a block, it has a byte for 32 columns."""
    write_checkpoint(architecture, folder, fp8=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    left_alone = config["quantization_config"]["modules_to_not_convert"]
    config["quantization_config"] = {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "modules_to_not_convert": left_alone,
    }  # fmt: skip
    path.write_text(json.dumps(config))


def trained(stored: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Returns weights in bfloat16, under the names of a checkpoint in block-fp8 without the scales."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for name in stored if not name.endswith(SCALE)]
    return {name: torch.randn(stored[name].shape, generator=generator).to(torch.bfloat16) for name in names}


def quantized(weights: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    found = dict(weights)
    for name in names:
        found[name], found[f"{name}{SCALE}"] = downcast_to_mxfp_torch(weights[name], torch.float8_e4m3fn, axis=1)
    return found


def updates(folder: Path, references: Path, build: dict[str, Any]) -> list[str]:
    """Returns what is wrong after two updates in bfloat16. Each is compared with a start on a checkpoint of its own."""
    stored = read_weights(folder)
    names = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    complaints = [] if names else ["nothing is quantized"]
    references.mkdir()
    (references / "config.json").write_bytes((folder / "config.json").read_bytes())
    write_weights(quantized(trained(stored, 0), names), references)
    model = built(str(folder), True, build | {"weights": str(references)})
    for seed in (1, 2):
        weights = trained(stored, seed)
        specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
        replay(trace(model, specs), weights)
        found = digests(model)
        write_weights(quantized(weights, names), references)
        stock = digests(started_on(references))
        complaints += [f"seed {seed}: {name} differs" for name in stock if found.get(name) != stock[name]][:3]
    scales = {str(p.dtype) for n, p in model.named_parameters() if n.endswith(SCALE)}
    return complaints + ([] if scales == {"torch.uint8"} else [f"scales are {scales}"])


if __name__ == "__main__":
    main()
