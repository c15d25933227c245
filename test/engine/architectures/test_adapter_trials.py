"""LoRA adapters that a multimodal engine would not serve whole are refused before it receives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.scripts import run_script

pytestmark = [pytest.mark.engine]


def test_an_adapter_is_served_whole_or_refused(tmp_path: Path) -> None:
    (seen,) = map(json.loads, run_script(Path(__file__).with_name("adapter_trials.py"), str(tmp_path)))
    assert seen["text"] == ""
    assert "visual.blocks.0.attn.qkv.lora_A.weight: SGLang serves no adapter of this module" in seen["tower"]
    assert "other.layers.0.self_attn.o_proj.lora_A.weight: the engine adapts no such module" in seen["another model's"]
    assert "ValueError: Cannot find target module name for" in seen["of no slot"]
    assert "SGLang cannot load the LoRA adapter of no layer: IndexError" in seen["of no layer"]
