"""SGLang's routers that keep something of their weights, updated where CUDA graphs may hold addresses and where not.

Run as a script by test_forwards.py: SGLang chooses its code paths at import.

    router_cases.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examination import begin
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import build_rank
from sglang_reshard.derived import DerivedState
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.folded import flags_of
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.scripts import answer
from tools.oracle.digests import digest
from tools.oracle.replay import replay

_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
ROUTERS = {
    "Glm4MoeForCausalLM": ("Glm4MoeGate", "_weight_fp32", {}),
    "Gemma4ForCausalLM": ("Gemma4Router", "_fused_scale", _EXPERTS),
}


class Job(NamedTuple):
    """`kind`: "fresh" starts on checkpoint B, the others on A; "in place" as where CUDA graphs hold addresses."""

    architecture: str
    kind: str
    folder: str


def routed(job: Job) -> dict[str, Any]:
    """Returns what a router says with checkpoint B's weights, what it said before, and whether a tensor stayed."""
    kind, attribute, instead = ROUTERS[job.architecture]
    a, b = (
        str(write_checkpoint(job.architecture, Path(job.folder) / job.kind / str(s), instead=instead, seed=s))
        for s in (1, 2)
    )
    start = b if job.kind == "fresh" else a
    model = build_rank(start, tp_size=1, tp_rank=0)
    with torch.no_grad():
        model.load_weights(iter(read_weights(start).items()))  # type: ignore[operator]
    router = next(m for m in model.modules() if type(m).__name__ == kind)
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    if job.kind == "fresh":
        return {"says": digest(router(x))}
    derived = DerivedState(model, addresses_stay=job.kind == "in place")
    before = digest(router(x))
    kept = getattr(router, attribute)
    derived.signature()
    weights = read_weights(b)
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    replay(trace(model, specs), weights, derived)
    says = digest(router(x))
    return {"says": says, "before": before, "stayed": getattr(router, attribute) is kept, "remark": derived.remark}


def compressor_flags() -> list[str]:
    """Returns the flags of DeepSeek-V4's compressor that are put back before its loader's work in place."""
    from sglang.srt.layers.attention.dsv4.compressor import Compressor

    made: Any = object.__new__(Compressor)  # its constructor wants a GPU
    torch.nn.Module.__init__(made)
    made.ape, made.ape_converted = torch.nn.Parameter(torch.zeros(2, 8)), False
    return [flag.label for flag in flags_of(made)]


def main(folder: str) -> None:
    begin(1, gpu=False)
    jobs = [Job(a, kind, f"{folder}/{a}") for a in ROUTERS for kind in ("fresh", "dropped", "in place")]
    for job, found in run_in_forks(routed, jobs, processes=2, deadline_seconds=300):
        answer(json.dumps([job.architecture, job.kind, found]))
    answer(json.dumps(["DeepseekV4ForCausalLM", "flags", compressor_flags()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
