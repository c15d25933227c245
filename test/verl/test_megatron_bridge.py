"""As test_megatron.py, with Megatron-Bridge itself: its own registries and converters are what is traced."""

import json
from pathlib import Path

import pytest

from support.megatron_bridge_env import FOLDERS
from support.scripts import run_script
from support.trainer_rows import shown

pytestmark = [
    pytest.mark.sweep,
]
JOB = Path(__file__).parent / "megatron_bridge_job.py"
# Of these architectures Llama's registry alone knows Megatron-Core's names without Transformer Engine.
CASES = {
    "tp2 pp2, own names": {"kind": "llama", "tp": 2, "pp": 2},
    "tp2 pp2 vp2 tied, own names": {"kind": "llama", "tp": 2, "pp": 2, "vp": 2, "layers": 4, "tied": True},
    "tp2": {"kind": "qwen3", "tp": 2},
    "tp2 bias tied": {"kind": "qwen2", "tp": 2, "tied": True},
    "tp2 inside a group": {"kind": "qwen2", "tp": 2, "groups": 1},
    "tp2 pp2 tied": {"kind": "qwen3", "tp": 2, "pp": 2, "tied": True},
    "tp2 pp2 vp2": {"kind": "qwen3", "tp": 2, "pp": 2, "vp": 2, "layers": 4},
    "pp4 vp2 tied": {"kind": "qwen2", "pp": 4, "vp": 2, "layers": 8, "tied": True},
    "tp2 ep2 etp2": {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2},
    "pp2 ep2": {"kind": "qwen3_moe", "pp": 2, "ep": 2},
    "stacked, tp2 ep2 etp2": {"kind": "qwen3_vl_moe", "tp": 2, "ep": 2, "etp": 2, "flat": True},
    "stacked, pp2 ep2": {"kind": "qwen3_vl_moe", "pp": 2, "ep": 2, "flat": True},
    "stacked, ep4": {"kind": "qwen3_vl_moe", "ep": 4, "flat": True},
    "stacked, tp4": {"kind": "qwen3_vl_moe", "tp": 4, "etp": 4, "flat": True},
}
OF_LAYER = {"llama": 9, "qwen3": 11, "qwen2": 12, "qwen3_moe": 9 + 3 * 4, "qwen3_vl_moe": 9 + 2}


@pytest.fixture(scope="module", params=FOLDERS)
def release(request):
    if not FOLDERS[request.param].exists():
        pytest.skip("Megatron-Bridge is not installed: make setup-bridge")
    return request.param


@pytest.fixture(scope="module")
def results(release):
    found = list(map(json.loads, run_script(JOB, release, json.dumps(list(CASES.values())))))
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_parameters_put_together_are_the_checkpoint(results, release, name, record_property):
    case = CASES[name]
    for rank, found in enumerate(results[name]):
        assert found["wrong"] == [], f"trainer rank {rank}"
        assert found["tensors"] == OF_LAYER[case["kind"]] * case.get("layers", 2) + (2 if case.get("tied") else 3)
    assert sum(found["logits"] for found in results[name]) == 4 // case.get("pp", 1)
    trainer = f"Megatron-Core, {case['kind']} {name}"
    record_property("trainer", shown(trainer, f"parameters, by Megatron-Bridge {release}'s converters", "any", "read"))
