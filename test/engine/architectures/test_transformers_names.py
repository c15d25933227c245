"""Trainers with transformers' own models: SGLang's engines are updated from the names that these have."""

from __future__ import annotations

import functools
import glob
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from architecture_cases import RESULTS
from architectures import Architecture, generation
from examination import built, said, specs_of
from rank_jobs import run_jobs
from sglang_reshard.engine.targets import LoaderNames
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import names_read, trace
from support import sglangs
from support.checkpoints import read_weights, write_checkpoint
from support.live_memory import differing, fill_with_garbage
from support.sweep import sweep
from test_given_names import found_for
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
TP = 2
THINKER = "thinker."


def states(architecture: Architecture, folder: str, weights: Weights) -> dict[str, tuple[Weights, list[str]]]:
    """What trainers send, and the names of tied tensors among it: transformers' model, and a thinker by itself."""
    model = getattr(transformers, str(architecture.writer)).from_pretrained(folder, dtype=torch.bfloat16)
    own = dict(model.named_parameters())
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
    found = {"transformers": (state, tied)}
    if any(name.startswith(THINKER) for name in weights):
        found["thinker"] = {n.removeprefix(THINKER): t for n, t in weights.items()}, []
    return found


def outcome(model: torch.nn.Module, started_on: Weights, sent: Weights, tied: Sequence[str]) -> dict[str, Any]:
    """Whether an engine rank is updated from `sent` to what stock loading leaves of its own checkpoint."""
    found, runs = LoaderNames(), 0
    try:
        found, runs = found_for(model, sent, [glob.escape(name) for name in tied])
        named = dict(zip(found.names or sent, sent.values(), strict=True))
        read = names_read(model, specs_of(named)).read
        unread = [old for old, new in zip(sent, named, strict=True) if new not in read and old not in tied]
        if unread:
            raise ReshardError(f"the engine does not read {unread[0]}")
        start = functools.partial(EngineStart, specs_of(started_on))
        fill_with_garbage(model)
        replay(trace(model, specs_of(named), start), named)
    except ReshardError as error:
        return {"refused": str(error), "hint": found.hint, "runs": runs}
    updated = digests(model)
    fill_with_garbage(model)
    with torch.no_grad():
        model.load_weights(iter([(n, t.clone()) for n, t in started_on.items()]))  # type: ignore[operator]
    renamed = sum(old != new for old, new in zip(found.given, found.names, strict=True))
    return {"differing": differing(updated, digests(model)), "renamed": renamed, "runs": runs}


def all_names() -> list[tuple[str]]:
    return [(one.name,) for one in generation() if one.own and one.kind == "multimodal"]


def look(root: Path, name: str) -> dict[str, Any]:
    (architecture,) = (one for one in generation() if one.name == name)
    folder = str(root / name)
    config = json.loads(RESULTS.read_text())["architectures"].get(architecture.name, {}).get("config", ())
    try:
        write_checkpoint(str(architecture.writer), Path(folder), architecture=architecture.name, variants=config)
        weights = read_weights(folder)
        sent = states(architecture, folder, weights)
        model = built(folder, True, {"tp_size": TP, "tp_rank": TP - 1})
        return {what: outcome(model, weights, state, tied) for what, (state, tied) in sent.items()}
    except Exception as error:
        return {"cannot": said(error, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    with sglangs.chosen(end):
        return dict(run_jobs(look, [(name,) for name in names] or all_names, folder, deadline_s=1500))


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
