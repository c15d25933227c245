"""Redundant experts, and experts that EPLB has moved: bit for bit what stock loading leaves where they are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examination import built, specs_of
from rank_jobs import run_jobs
from sglang_reshard.cli.plan.sglang_model import with_known
from sglang_reshard.patches.model_runner import placement
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.live_memory import differing, fill_with_garbage
from support.sglang_state import place_experts, published_arguments
from tools.oracle.replay import replay

ARCHITECTURES = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
EP, REDUNDANT = 2, 2


def write(folder: Path) -> None:
    for architecture in ARCHITECTURES:
        write_checkpoint(architecture, folder / architecture)


def updates(root: Path, architecture: str, rank: int) -> list[str]:
    """What is wrong after updates with experts in order, and twice elsewhere."""
    folder = str(root / architecture)
    build = {"tp_size": EP, "ep_size": EP, "tp_rank": rank, "ep_num_redundant_experts": REDUNDANT}
    model = built(folder, True, build)
    weights = read_weights(folder)
    complaints: list[str] = []
    placements, experts = set(), []
    for seed in (0, 1, 2):
        place_experts(metadata(seed, rank))
        placements.add(placement())
        fill_with_garbage(model)
        replay(trace(model, specs_of(weights)), weights)
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


pytestmark = [pytest.mark.engine]


def test_each_update_goes_to_where_the_experts_are(tmp_path: Path) -> None:
    jobs = [(name, rank) for name in ARCHITECTURES for rank in range(EP)]
    assert [of for of in run_jobs(updates, jobs, tmp_path, before=write) if of[-1]] == []
