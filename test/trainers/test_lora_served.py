"""LoRA adapters that PEFT trains over FSDP, served as adapters by a real engine: only the adapter's tensors move.

Compared with SGLang's own load of the adapter that PEFT has saved, slot by slot, and with PEFT's greedy tokens; with
rsLoRA, whose scaling SGLang's own load does not know, with PEFT's log-probabilities.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.sglangs import chosen
from support.trainer_rows import shown
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]
SLOT = 1  # the base model's is the first


@pytest.mark.parametrize(
    ("strategy", "sglang"),
    [
        ("FSDP2", "pinned"),
        pytest.param("FSDP1", "pinned", marks=pytest.mark.sweep),
        pytest.param("FSDP2", "newest", marks=pytest.mark.sweep),
    ],
)
def test_an_engine_serves_the_adapter(strategy: str, sglang: str, tmp_path: Path, record_property: Any) -> None:
    with chosen(sglang):
        seen, other = run_trainers(2, "trainers.lora_served_job:two_versions", tmp_path, strategy=strategy, tp_size=2)
    assert seen["served"] == seen["stock"] == seen["expected"] == other["served"]
    assert seen["after"] == seen["served"][1] != seen["served"][0]
    *base, without_adapter = seen["base"]
    assert base == [without_adapter] * 2
    assert without_adapter not in seen["served"]
    for version, ranks in enumerate(seen["slots"], 1):
        assert len(ranks) == 2
        for slots in ranks:
            assert slots[SLOT] == slots[SLOT + version]
            assert len({str(slot) for slot in slots}) == 1 + version  # and zeros
    for report in seen["reports"]:
        for rank in report["engine_ranks"]:
            assert rank["received_bytes"] == rank["least_bytes"] == adapter_bytes()
    wrong_rank, too_large, no_adapter, wrong_sizes = seen["refused"]
    assert "is not of an adapter of rank 8" in wrong_rank
    assert "incompatible with the current LoRA memory pool" in too_large
    assert "is no tensor of a LoRA adapter" in no_adapter
    assert "SGLang cannot load the LoRA adapter sizes: AssertionError: LoRA buffer shape" in wrong_sizes
    torn = seen["torn"]
    assert torn["update"].startswith("TornWeights")
    assert "The engine has unloaded the LoRA adapter policy: repeat the update" in torn["update"]
    assert "loaded: policy" in torn["request"]
    assert torn["base"] == without_adapter
    assert seen["healed"] == seen["after"]
    rooted = {said: torch.tensor([p for prompt in found for p in prompt]) for said, found in seen["rooted"].items()}
    torch.testing.assert_close(rooted["served"], rooted["expected"], rtol=1e-4, atol=1e-4)
    assert (rooted["otherwise"] - rooted["expected"]).abs().max() > 0.1
    record_property("trainer", shown(f"{strategy}, PEFT", "adapter_tensors", "auto", "run", 1.0))


def adapter_bytes() -> int:
    """Of rank 4 in float32, on the seven projections of two layers, as (in, out)."""
    shapes = [(128, 256), (128, 128), (128, 128), (256, 128), (128, 192), (128, 192), (192, 128)]
    return 4 * 4 * 2 * sum(map(sum, shapes))
