"""Trainers with transformers' own models: SGLang's engines are updated from the names that these have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import sglangs
from support.scripts import run_script
from support.sweep import sweep

pytestmark = [pytest.mark.engine]

# Of these the checkpoint has other names than the model, and each part is found where SGLang's loader has it.
RENAMED = {
    "Gemma3ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
}
FAST = "Gemma3ForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"
# What transformers' model has otherwise than the checkpoint, or what SGLang's loader does not read of either.
REFUSED = {
    "Ernie4_5_VLMoeForConditionalGeneration": "rename={'model.language_model.': 'model.'}",
    "Glm4vMoeForConditionalGeneration": "experts.gate_up_proj",
    "GlmImageForConditionalGeneration": "model.visual.blocks.0.mlp.fc1.weight",
    "Llama4ForConditionalGeneration": "vision_model.class_embedding",
    "PaddleOCRVLForConditionalGeneration": "packing_position_embedding",
    "Qwen3OmniMoeForConditionalGeneration": "experts.down_proj",
    "Qwen3VLMoeForConditionalGeneration": "experts.down_proj",
}


def found(end: str, folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("transformers_names.py")
    with sglangs.chosen(end):
        answers = run_script(script, str(folder), *names)
    return dict(json.loads(line) for line in answers)


def check(of_models: dict[str, dict[str, Any]]) -> None:
    for name, of in of_models.items():
        for what, outcome in of.items():
            if what == "transformers" and name in REFUSED:
                assert REFUSED[name] in outcome["refused"] + outcome["hint"], name
            elif what != "cannot":
                assert outcome.get("differing") == [], (name, what, outcome)
                assert bool(outcome["renamed"]) == (what == "thinker" or name in RENAMED), (name, what)
                assert outcome["runs"] <= 20, (name, what)


def test_parts_of_multimodal_models_are_found(tmp_path: Path) -> None:
    of_models = found("pinned", tmp_path, *FAST)
    assert of_models.keys() == {*FAST}
    assert of_models["Qwen3OmniMoeForConditionalGeneration"].keys() == {"transformers", "thinker"}
    check(of_models)


@pytest.mark.parametrize("end", [sweep("pinned"), sweep("newest")])
def test_every_multimodal_model_is_updated_or_refused_with_what_is_missing(end: str, tmp_path: Path) -> None:
    of_models = found(end, tmp_path)
    assert len(of_models) >= 24
    assert len([name for name, of in of_models.items() if "cannot" in of]) <= 6
    check(of_models)
