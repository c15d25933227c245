"""LoRA adapters of stacked experts, which PEFT trains over FSDP2 with `target_parameters`, in a real engine's slots.

What a slot adds to each expert's weights is compared with what PEFT adds to them when it merges. SGLang computes with
adapters of experts in Triton only, so the engine generates nothing here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.sglangs import chosen
from support.trainer_rows import shown
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]


@pytest.mark.parametrize("sglang", ["pinned", pytest.param("newest", marks=pytest.mark.sweep)])
def test_slots_hold_the_experts_adapters(sglang: str, tmp_path: Path, record_property: Any) -> None:
    with chosen(sglang):
        seen, _ = run_trainers(2, "trainers.lora_experts_job:two_versions", tmp_path, tp_size=2)
    for added, expected in zip(seen["added"], seen["expected"], strict=True):
        assert len(added) == len(expected) == 2
        for of_rank, wanted in zip(added, expected, strict=True):
            assert len(of_rank) == len(wanted) == 2
            for layer, of_peft in zip(of_rank, wanted, strict=True):
                for one, other in zip(layer, of_peft, strict=True):
                    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)
    for of_rank in seen["without"]:
        assert not any(torch.tensor(one).any() for layer in of_rank for one in layer)
    first, second = seen["expected"]
    assert first != second
    for report in seen["reports"]:
        for rank in report["engine_ranks"]:
            assert rank["received_bytes"] == rank["least_bytes"] > 0
    prepared, ready = (report["seconds"] for report in seen["reports"])
    assert "plan" in prepared
    assert "plan" not in ready
    record_property("trainer", shown("FSDP2, PEFT, adapters of experts", "adapter_tensors", "auto", "run", 1.0))
