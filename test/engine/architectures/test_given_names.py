"""Names as trainers have them, against SGLang's own loaders: wrappers' prefixes, and text trainers of larger models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import zygote
from support.scripts import run_script

TEXT = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GemmaForCausalLM"
LARGER = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("given_names.py")
    folder = str(tmp_path_factory.mktemp("names"))
    answers = run_script(script, folder, *TEXT, *LARGER, environment={zygote.VARIABLE: "gpu"})
    return dict(json.loads(line) for line in answers)


def test_every_loader_reads_its_checkpoint_s_names_below_the_wrappers(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == {*TEXT, *LARGER}
    for name, of in found.items():
        assert of["tensors"] == of["wrapped"]["found"] > 10, name
        assert of["wrapped"]["wrong"] == [], name
        assert of["wrapped"]["runs"] <= 3, name


def test_a_text_trainer_updates_the_language_model_and_leaves_the_towers(found: dict[str, dict[str, Any]]) -> None:
    for name in LARGER:
        of = found[name]["text"]
        assert (of["kept changed"], of["not of a tower"], of["not as stock"]) == ([], [], []), name
        assert of["kept"] > 5, name
        assert of["moved"] > 5, name
        assert of["runs"] <= 6, name
