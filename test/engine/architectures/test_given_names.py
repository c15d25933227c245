"""Names as trainers have them, against SGLang's own loaders: wrappers' prefixes, and text trainers of larger models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examination import built, specs_of
from rank_jobs import run_jobs
from sglang_reshard.engine.names import Reading, find_names, reading
from sglang_reshard.engine.targets import LoaderNames
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.tracer import names_read, trace
from support.checkpoints import read_weights, write_checkpoint
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
TOWERS = ("visual", "vision", "audio", "multi_modal", "image_newline")
WRAPPERS = ("module.{}", "_orig_mod.{}", "base_model.model.{}", "_fsdp_wrapped_module._checkpoint_wrapped_module.{}")
TP = 2


def look(root: Path, name: str) -> dict[str, Any]:
    write_checkpoint(name, root / name)
    folder = str(root / name)
    model, weights = built(folder, True, {"tp_size": TP, "tp_rank": TP - 1}), read_weights(folder)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
    read = names_read(model, specs_of(weights)).read
    weights = {name: tensor for name, tensor in weights.items() if name in read}
    return {
        "tensors": len(weights),
        "wrapped": differences(*found_for(model, wrapped(weights)), list(weights)),
        "text": text_trainer(model, weights),
    }


def wrapped(weights: Weights) -> Weights:
    """The weights with a wrapper's prefix in turn, and `base_layer` in every other linear layer."""
    named = {}
    for number, (name, tensor) in enumerate(weights.items()):
        module, _, leaf = name.rpartition(".")
        inner = f"{module}.base_layer.{leaf}" if leaf == "weight" and number % 2 else name
        named[WRAPPERS[number % len(WRAPPERS)].format(inner)] = tensor
    return named


def text_trainer(model: torch.nn.Module, weights: Weights) -> dict[str, Any]:
    """Updates the language model under the names that it has without its towers, and leaves the towers."""
    language = {n: t * 1.5 for n, t in weights.items() if not any(tower in n for tower in TOWERS)}
    if len(language) == len(weights):
        return {}
    names = [
        name.replace("model.language_model.", "model.").replace("language_model.", "") for name in language
    ]  # both ways in which transformers has saved them
    given = dict(zip(names, language.values(), strict=True))
    found, runs = found_for(model, given)
    as_read = dict(zip(found.names or names, given.values(), strict=True))
    live = dict(model.named_parameters())
    before = {name: parameter.clone() for name, parameter in live.items()}
    program = trace(model, specs_of(as_read), may_stay=MayStay(frozen=[f"*{tower}*" for tower in TOWERS]))
    replay(program, as_read)
    after = {name: parameter.clone() for name, parameter in live.items()}
    with torch.no_grad():  # SGLang's own load of the same, in the same memory
        for name, parameter in live.items():
            parameter.copy_(before[name])
        model.load_weights(iter(language.items()))  # type: ignore[operator]
    return {
        "runs": runs,
        "renamed": sum(old != new for old, new in zip(names, found.names, strict=False)),
        "kept": len(program.kept),
        "kept changed": [n for n in program.kept if not torch.equal(after[n], before[n])],
        "not of a tower": [n for n in program.kept if not any(tower in n for tower in TOWERS)],
        "not as stock": [n for n, p in live.items() if not torch.equal(p, after[n])],
        "moved": sum(not torch.equal(after[n], before[n]) for n in before),
    }


def found_for(model: torch.nn.Module, given: Weights, tied: Sequence[str] = ()) -> tuple[LoaderNames, int]:
    """What an engine of this one rank finds, and how often it ran the loader."""
    specs, runs = specs_of(given), [0]

    def probe(names: Sequence[str]) -> list[Reading]:
        runs[0] += 1
        renamed = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
        return [reading(names_read(model, renamed), names)]

    return find_names("layout", list(given), tied, probe), runs[0]


def differences(found: LoaderNames, runs: int, names: list[str]) -> dict[str, Any]:
    wrong = [pair for pair in zip(found.names or found.given, names, strict=False) if pair[0] != pair[1]]
    return {"runs": runs, "wrong": wrong, "found": len(found.names)}


TEXT = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GemmaForCausalLM"
LARGER = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return dict(run_jobs(look, [(name,) for name in (*TEXT, *LARGER)], tmp_path_factory.mktemp("names")))


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
