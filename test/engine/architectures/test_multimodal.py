"""Models of images and sound under the names that transformers saves: bit for bit what stock loading leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import zygote
from support.scripts import run_script

GPU = {zygote.VARIABLE: "gpu"}  # the code paths of GPUs
pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


def test_every_tensor_of_every_tower_arrives(tmp_path: Path) -> None:
    script = Path(__file__).with_name("multimodal.py")
    found = dict(json.loads(line) for line in run_script(script, str(tmp_path), timeout_s=450, environment=GPU))
    assert {name: (of["outcome"], of["why"]) for name, of in found.items()} == dict.fromkeys(found, ("passed", ""))
    assert {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"} < set(found)
    assert len(found) == 5
