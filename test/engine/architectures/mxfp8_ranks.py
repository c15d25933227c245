"""Updates engine ranks in MXFP8 in bfloat16, and answers with a line of JSON for each.

Run as a script by test_mxfp8_ranks.py: SGLang chooses its code paths at import. The reference is a stock load of the
checkpoint that SGLang's quantizer makes of the same weights.

    mxfp8_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

from examination import built, said
from oracle.digests import digests
from oracle.replay import replay
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.live_memory import differing, fill_with_garbage
from support.scripts import answer

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "Glm4ForCausalLM")
SIZES, DEADLINE_S = (1, 2), 400
SCALE = "_scale_inv"


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(max(SIZES), gpu=True)
    torch.set_num_threads(1)
    import_before_forks()
    for architecture in ARCHITECTURES:
        write(architecture, root / architecture)

    def work(job: tuple[str, int, int]) -> list[str]:
        architecture, size, rank = job
        try:
            return updates(root / architecture, size, rank)
        except Exception as error:
            return [said(error, str(root))]

    jobs = [(name, size, rank) for name in ARCHITECTURES for size in SIZES for rank in range(size)]
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


def updates(folder: Path, size: int, rank: int) -> list[str]:
    """Returns what is wrong after two updates in bfloat16."""
    stored = read_weights(folder)
    names = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    model = built(str(folder), True, {"tp_size": size, "tp_rank": rank})
    complaints = [] if names else ["nothing is quantized"]
    for seed in (1, 2):
        weights = trained(stored, seed)
        specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
        fill_with_garbage(model)
        replay(trace(model, specs), weights)
        found = digests(model)
        fill_with_garbage(model)
        with torch.no_grad():
            model.load_weights(iter(quantized(weights, names).items()))  # type: ignore[operator]
        complaints += [f"seed {seed}: {name} differs" for name in differing(found, digests(model))[:3]]
    scales = {str(p.dtype) for n, p in model.named_parameters() if n.endswith(SCALE)}
    return complaints + ([] if scales == {"torch.uint8"} else [f"scales are {scales}"])


if __name__ == "__main__":
    main()
