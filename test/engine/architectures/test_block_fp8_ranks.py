"""Every engine rank of block-fp8 engines of TP 1, 2 and 4 and EP 2: from bfloat16, what verl's quantizer and stock
loading leave, fused and stacked layers, experts and MLA's derived weights among them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from examination import examine
from rank_jobs import run_jobs
from support.checkpoints import tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS

ARCHITECTURES = {
    "Qwen3ForCausalLM": ((1, 1), (2, 1), (4, 1)),
    "Qwen3MoeForCausalLM": ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)),
    "DeepseekV3ForCausalLM": ((1, 1), (2, 1), (4, 1), (4, 2)),
}  # with their engines: TP and EP


pytestmark = [pytest.mark.engine, pytest.mark.sweep]


def write(root: Path) -> None:
    # For four ranks with whole blocks.
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)
    for architecture in ARCHITECTURES:
        write_checkpoint(architecture, root / architecture, fp8=True)


def examined(root: Path, architecture: str, tp: int, ep: int, rank: int) -> dict[str, Any]:
    return dataclasses.asdict(examine(str(root / architecture), tp_size=tp, ep_size=ep, tp_rank=rank))


def test_every_rank_has_what_verl_s_quantizer_and_stock_loading_leave(tmp_path: Path) -> None:
    jobs = [(name, tp, ep, rank) for name, runs in ARCHITECTURES.items() for tp, ep in runs for rank in range(tp)]
    found = run_jobs(examined, jobs, tmp_path, before=write, ranks=4, deadline_s=1400)
    assert len(found) == 31
    assert [of for of in found if of[-1]["outcome"] != "passed"] == []
    assert all("block-fp8" in of[-1]["has"] for of in found)
