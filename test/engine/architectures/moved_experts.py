"""Updates engine ranks whose experts are elsewhere than their numbers say, and move; a line of JSON for each.

Run as a script by test_moved_experts.py: SGLang chooses its code paths at import.

    moved_experts.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from examination import begin, built, said
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import with_known
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches.expert_location import placement
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.live_memory import differing, fill_with_garbage
from support.scripts import answer
from support.sglang_state import place_experts, published_arguments
from tools.oracle.digests import digests
from tools.oracle.replay import replay

ARCHITECTURES = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
EP, REDUNDANT, DEADLINE_S = 2, 2, 400


def main() -> None:
    root = Path(sys.argv[1])
    begin(EP)
    for architecture in ARCHITECTURES:
        write_checkpoint(architecture, root / architecture)

    def work(job: tuple[str, int]) -> list[str]:
        architecture, rank = job
        try:
            return updates(str(root / architecture), rank)
        except Exception as error:
            return [said(error, str(root))]

    jobs = [(name, rank) for name in ARCHITECTURES for rank in range(EP)]
    for job, complaints in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, complaints]))


def updates(folder: str, rank: int) -> list[str]:
    """What is wrong after updates with experts in order, and twice elsewhere."""
    build = {"tp_size": EP, "ep_size": EP, "tp_rank": rank, "ep_num_redundant_experts": REDUNDANT}
    model = built(folder, True, build)
    weights = read_weights(folder)
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    complaints: list[str] = []
    placements, experts = set(), []
    for seed in (0, 1, 2):
        place_experts(metadata(seed, rank))
        placements.add(placement())
        fill_with_garbage(model)
        replay(trace(model, specs), weights)
        found = digests(model)
        fill_with_garbage(model)
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
        stock = digests(model)
        complaints += [f"seed {seed}: {name} differs" for name in differing(found, stock)[:3]]
        experts.append({name: digest for name, digest in stock.items() if "experts.w13" in name})
    if len(placements) != 3:
        complaints.append("a move was not noticed")
    if experts[0] == experts[1] or experts[1] == experts[2]:
        complaints.append("no expert of this rank has moved")
    return complaints


def metadata(seed: int, rank: int) -> Any:
    """Experts in the order of their numbers for seed 0, and else shuffled, layer by layer.

    No rank has an expert twice: SGLang loads one of the two.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    arguments = published_arguments()
    config = ModelConfig.from_server_args(arguments)
    known = {"server_args": arguments, "model_config": config, "moe_ep_rank": rank}
    trivial = with_known(ExpertLocationMetadata.init_trivial, **known)
    if not seed:
        return trivial
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in trivial.physical_to_logical_map_cpu:
        shuffled = row[torch.randperm(len(row), generator=generator)]
        while any(len(part.unique()) < len(part) for part in shuffled.chunk(EP)):
            shuffled = row[torch.randperm(len(row), generator=generator)]
        rows.append(shuffled)
    return with_known(ExpertLocationMetadata.init_by_mapping, physical_to_logical_map=torch.stack(rows), **known)


if __name__ == "__main__":
    main()
