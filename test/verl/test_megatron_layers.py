"""Layers of Qwen3.5 (Gated DeltaNet, gated attention, norms stored less one) by Megatron-Bridge's own converters."""

import json
from pathlib import Path

import pytest

from support.megatron_bridge_env import FOLDERS
from support.scripts import run_script
from support.trainer_rows import shown

RELEASE = "0.6.2"
SIZES = [1, 2, 4]
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(not FOLDERS[RELEASE].exists(), reason="Megatron-Bridge is not installed: make setup-bridge"),
]
JOB = Path(__file__).parent / "megatron_layer_job.py"


@pytest.fixture(scope="module")
def results():
    found = list(map(json.loads, run_script(JOB, RELEASE, json.dumps(SIZES))))
    return dict(zip(SIZES, found, strict=True))


@pytest.mark.parametrize("tp", SIZES)
def test_all_ranks_parameters_put_together_are_the_checkpoint(results, tp, record_property):
    assert results[tp] == [[], [], [], []]
    trainer = f"Megatron-Core's modules by name and shape, layers of qwen3_5 tp{tp}"
    record_property("trainer", shown(trainer, f"parameters, by Megatron-Bridge {RELEASE}'s converters", "any", "read"))
